"""Record of the tokens that a truncating sampler kept at each position.

A turn is one completion that the sampler generated. Before TRL computes log-probabilities, it
shuffles, cuts, pads and joins turns. The record of a turn is therefore found by its token ids, not
by its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.integrations.trl.packed import Pack
from grpo_fast.rollout import Completion


class Replayed(NamedTuple):
    """Data that the sampler recorded when it sampled R tokens."""

    support: Support  # the kept ids; none for tokens that were not sampled, as tool output
    logps: Tensor  # (R,) fp32: the sampler's log-probabilities; NaN for tokens not sampled
    mass: Tensor  # (R,) fp32: sum of the kept ids' probabilities before renormalization


class Replay:
    """Store of the turns of one batch, with the ids that the sampler kept at each token."""

    def __init__(self) -> None:
        # Map from the ids of a prompt to its completions. The integer is the index of the
        # completion's first kept id in the concatenation of `ids`.
        self.turns: dict[tuple[int, ...], list[tuple[Completion, int]]] = {}
        self.ids: list[Tensor] = []
        self.length = 0

    def remember(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> None:
        """Store the completion of each prompt if the sampler truncated its distribution."""
        for prompt, one in zip(prompts, completions, strict=True):
            if one.support is not None:
                self.turns.setdefault(tuple(prompt), []).append((one, self.length))
                self.ids.append(one.support.ids)
                self.length += len(one.support.ids)

    def __call__(
        self,
        input_ids: Tensor,  # (B, P+K)
        attention_mask: Tensor,  # (B, P+K)
        pack: Pack,
    ) -> Replayed | None:
        """Return the sampler's records of the scored tokens of a padded batch.

        Args:
            input_ids: Token ids, shape (B, P+K).
            attention_mask: 1 at real tokens, shape (B, P+K).
            pack: Packed row of the batch, with R scored tokens.

        Returns:
            The records of the scored tokens, or None if no turn is stored.
        """
        if not self.turns:
            return None
        # 1. For each completion token, look up the index of its first kept id, the number of its
        # kept ids, its log-probability, and the sum of the probabilities of its kept ids.
        starts, counts = torch.zeros(2, *pack.shape, dtype=torch.int64)
        logps = torch.full(pack.shape, torch.nan)
        mass = torch.ones(pack.shape)
        for row, (ids, real) in enumerate(
            zip(input_ids.cpu(), attention_mask.bool().cpu(), strict=True)
        ):
            tokens = ids[real].tolist()
            columns = real[-pack.shape[1] :].nonzero()[:, 0]
            for at, one, base in self._turns_of(tokens, len(tokens) - len(columns)):
                assert one.support is not None and one.mass is not None
                first = at - (len(tokens) - len(columns))
                where = row, columns[first : first + len(one.ids)]
                n = len(where[1])
                starts[where] = one.support.offsets[:n] + base
                counts[where] = one.support.offsets.diff()[:n]
                logps[where] = one.logps[:n]
                mass[where] = one.mass[:n]
        # 2. Concatenate the kept ids of the scored tokens.
        scored = pack.slots.cpu()
        device = pack.slots.device
        lengths = counts.flatten()[scored]
        begins = starts.flatten()[scored]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        places = torch.arange(int(offsets[-1])) + (begins - offsets[:-1]).repeat_interleave(lengths)
        self.ids = [torch.cat(self.ids)]
        support = Support(self.ids[0][places].to(device), offsets.to(device))
        return Replayed(support, *(x.flatten()[scored].to(device) for x in (logps, mass)))

    def _turns_of(self, tokens: list[int], start: int) -> list[tuple[int, Completion, int]]:
        """Find the stored turns in a sequence whose prompt has `start` tokens.

        Returns:
            For each turn, the index of its first token in the sequence, the stored completion, and
            the index of the completion's first kept id in the concatenation of `ids`.
        """
        turns = []
        for length in {len(prompt) for prompt in self.turns}:
            if not start <= length < len(tokens):
                continue
            completion = tokens[length:]
            for one, base in self.turns.get(tuple(tokens[:length]), ()):
                # TRL may have cut the turn at the maximum completion length. Compare only the
                # tokens that both sequences have.
                n = min(len(one.ids), len(completion))
                if one.ids[:n] == completion[:n]:
                    turns.append((length, one, base))
                    break
        return turns
