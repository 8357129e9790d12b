"""The set that the sampler drew each token from, looked up by the tokens of a sequence.

TRL shuffles, cuts, pads and joins completions before it asks for their logps: a turn is known by
its prompt and its tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_fast import Support
from grpo_fast.rollout import Completion


class Replayed(NamedTuple):
    support: Support
    logps: Tensor  # (R,) fp32 of the sampler; NaN where it drew none
    mass: Tensor  # (R,) fp32, of the kept tokens before the others went


class Replay:
    def __init__(self) -> None:
        self.turns: dict[tuple[int, ...], list[tuple[Completion, int]]] = {}
        self.ids: list[Tensor] = []
        self.length = 0

    def remember(self, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> None:
        """Remember one completion of each prompt, if its sampler left tokens out."""
        for prompt, one in zip(prompts, completions, strict=True):
            if one.support is not None:
                self.turns.setdefault(tuple(prompt), []).append((one, self.length))
                self.ids.append(one.support.ids)
                self.length += len(one.support.ids)

    def __call__(
        self,
        input_ids: Tensor,  # (B, P+K)
        attention_mask: Tensor,  # (B, P+K)
        shape: tuple[int, int],  # (B, K)
        slots: Tensor,  # (R,) int64: the scored tokens in the flat (B, K)
    ) -> Replayed | None:
        """The sets of the scored tokens, empty where others drew them; None: nothing is known."""
        if not self.turns:
            return None
        # Places in `ids`, counts, logps and mass of each token of the batch.
        starts, counts = torch.zeros(2, *shape, dtype=torch.int64)
        logps, mass = torch.full(shape, torch.nan), torch.ones(shape)
        for row, (ids, real) in enumerate(
            zip(input_ids.cpu(), attention_mask.bool().cpu(), strict=True)
        ):
            tokens, columns = ids[real].tolist(), real[-shape[1] :].nonzero()[:, 0]
            for at, one, base in self._turns_of(tokens, len(tokens) - len(columns)):
                assert one.support is not None and one.mass is not None
                first = at - (len(tokens) - len(columns))
                where = row, columns[first : first + len(one.ids)]
                n = len(where[1])
                starts[where] = one.support.offsets[:n] + base
                counts[where] = one.support.offsets.diff()[:n]
                logps[where], mass[where] = one.logps[:n], one.mass[:n]
        scored, device = slots.cpu(), slots.device
        lengths, begins = counts.flatten()[scored], starts.flatten()[scored]
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        places = torch.arange(int(offsets[-1])) + (begins - offsets[:-1]).repeat_interleave(lengths)
        self.ids = [torch.cat(self.ids)]
        support = Support(self.ids[0][places].to(device), offsets.to(device))
        return Replayed(support, *(x.flatten()[scored].to(device) for x in (logps, mass)))

    def _turns_of(self, tokens: list[int], start: int) -> list[tuple[int, Completion, int]]:
        """(place, turn, its first row of `ids`) of each turn in a sequence prompted to `start`."""
        turns = []
        for length in {len(prompt) for prompt in self.turns}:
            if not start <= length < len(tokens):
                continue
            completion = tokens[length:]
            for one, base in self.turns.get(tuple(tokens[:length]), ()):
                # TRL may have cut the turn at the maximal length.
                n = min(len(one.ids), len(completion))
                if one.ids[:n] == completion[:n]:
                    turns.append((length, one, base))
                    break
        return turns
