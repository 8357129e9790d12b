"""The log-probabilities of a rollout's tokens by the trainer's model, under any view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_fast import Support, linear_logps
from grpo_fast.attention import Head
from grpo_fast.doctor.models import cast, variants
from grpo_fast.doctor.prompts import AS_SENT, REORDERED, Ids
from grpo_fast.doctor.view import CURRENT, EMBEDDING, KEPT, ROWS, Drawn, Rows, View
from grpo_fast.rollout import Completion, Samples
from grpo_fast.rollout.completions import table_of
from grpo_fast.rollout.engine import EOS
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.update.batch import StepBatch

BUDGET = 8192  # trunk tokens of a packed row
PROMPTS = 16  # up to which every prompt is tried for every completion
BAND = 0.9, 1.1  # of a ratio, about as wide as PPO's clip


class Noise(NamedTuple):
    """The trainer against itself: the same tokens, each completion in a pack of its own."""

    dtype: str
    mean: float  # of the absolute difference, nats per token
    share: float  # of the tokens whose ratio leaves BAND


class Recomputed:
    """Recomputes a rollout's logps; hidden states that several views share are computed once.

    Args:
        policy: the trainer's.
        rollout: completions of one engine, G of each prompt side by side; none empty.
        readings: name → token ids of each prompt (not of each completion).
        previous: a policy that the engine may still have, or None.
    """

    def __init__(
        self, policy: Policy, rollout: Samples, readings: dict[str, Ids],
        previous: Policy | None = None,
    ) -> None:  # fmt: skip
        self.policy, self.rollout, self.readings = policy, rollout, readings
        self.models = variants(policy, previous)
        self.engine_logps = rollout.logps.float().cpu()  # (R,)
        pairs = list(zip(rollout.prompt_ids, rollout.lengths, strict=True))
        support = rollout.support
        self.drawn = Drawn(
            rollout.ids[rollout.segment.bool()].to(policy.device),
            torch.cat([torch.arange(n) for _, n in pairs]).to(policy.device),
            [prompt for prompt, n in pairs for _ in range(n)],
            sorted(policy.eos_ids),
            support and Support(*(tensor.to(policy.device) for tensor in support)),
        )
        self._moved: dict[str, Ids] = {}  # each prompt in the place of another
        self._states: dict[tuple[str, str], tuple[Tensor, Head]] = {}
        self._logps: dict[View, Tensor] = {}

    def difference(self, view: View) -> float:
        """Mean of |engine − view| in nats per token, of the tokens that the view predicts."""
        gap = (self.engine_logps - self.logps(view)).abs()
        known = gap[gap.isfinite()]
        return float(known.mean()) if 2 * len(known) >= len(gap) else float("inf")

    def logps(self, view: View) -> Tensor:  # (R,) fp32 on the CPU; NaN where it predicts nothing
        """The logps under a view. The trainer's own view is computed by the trainer's own code."""
        self.compute([view])
        return self._logps[view]

    @torch.no_grad()
    def compute(self, views: Sequence[View]) -> None:
        """Prepare `logps` of several views; views with the same logits share one product."""
        batches: dict[tuple[object, ...], list[View]] = {}
        for view in dict.fromkeys(views):
            if view in self._logps:
                continue
            if view.shift:
                self._logps[view] = self._shifted(view)
            elif view.reading == REORDERED:
                self._logps[view] = self._answers(view)
            elif view == View(view.temperature, KEPT if view.truncation == KEPT else None):
                support = self.drawn.kept if view.truncation == KEPT else None
                self._logps[view] = self._fused(*self._hidden(view), view.temperature, support)
            else:
                batches.setdefault((view.model, view.reading, view.head), []).append(view)
        for alike in batches.values():
            parts = [[rows.logps(view).cpu() for view in alike] for rows in self.rows(alike[0])]
            columns = zip(*parts, strict=True)
            self._logps |= {v: torch.cat(c) for v, c in zip(alike, columns, strict=True)}

    def rows(self, view: View) -> Iterator[Rows]:
        states, head = self._hidden(view)
        wide = view.head if isinstance(view.head, torch.dtype) else torch.float32
        if head.weight.dtype != self.policy.head.weight.dtype:
            wide = head.weight.dtype  # an engine in this dtype gives its logits in it
        if view.head == EMBEDDING:
            head = head._replace(weight=self.policy.lm.get_input_embeddings().weight)
        weight = head.weight.to(wide)
        bias = None if head.bias is None else head.bias.to(wide)
        for first in range(0, len(states), ROWS):
            z = F.linear(states[first : first + ROWS].to(wide), weight, bias).float()
            yield Rows(head.logit_scale * z, first, self.drawn, head.softcap)

    @torch.no_grad()
    def noise(self, temperature: float) -> list[Noise]:
        """The trainer's own noise: in the policy's dtype, then in the others of fp32 and bf16."""
        own, noises = self.policy.autocast or self.policy.head.weight.dtype, []
        for dtype in dict.fromkeys((own, torch.float32, torch.bfloat16)):
            policy = self.policy if dtype == own else cast(self.policy, dtype)
            one, other = (
                self._fused(self._packed(policy, self.readings[AS_SENT], budget), policy.head,
                            temperature)
                for budget in (BUDGET, 1)
            )  # fmt: skip
            gap, ratio = one - other, (one - other).exp()
            outside = ((ratio < BAND[0]) | (ratio > BAND[1])).float()
            name = str(dtype).removeprefix("torch.")
            noises.append(Noise(name, float(gap.abs().mean()), float(outside.mean())))
        return noises

    def _fused(
        self, states: Tensor, head: Head, temperature: float, support: Support | None = None
    ) -> Tensor:
        return linear_logps(
            states, head.weight, self.drawn.targets, bias=head.bias, support=support,
            temperature=temperature, **head.rule,
        ).cpu()  # fmt: skip

    def _shifted(self, view: View) -> Tensor:
        plain = self.logps(view._replace(shift=0)).split(self.rollout.lengths)
        gap = torch.full((1,), torch.nan)
        pairs = [(p[1:], gap) if view.shift > 0 else (gap, p[:-1]) for p in plain]
        return torch.cat([part for pair in pairs for part in pair])

    def _answers(self, view: View) -> Tensor:
        """Each completion behind the prompt that explains it best."""
        ids, lengths = self.readings[AS_SENT], self.rollout.lengths
        moves = range(len(ids)) if len(ids) <= PROMPTS else (0, 1, -1)
        self._moved = {f"prompts moved by {n}": ids[n:] + ids[:n] for n in moves}
        tried = torch.stack([self.logps(view._replace(reading=name)) for name in self._moved])
        gaps = (tried - self.engine_logps).abs().split(lengths, dim=1)
        parts = zip(tried.split(lengths, dim=1), gaps, strict=True)
        return torch.cat([part[gap.mean(1).argmin()] for part, gap in parts])

    def _hidden(self, view: View) -> tuple[Tensor, Head]:
        """The states (R, H) that predict the completions' tokens, and the model's head."""
        key = view.model, view.reading
        if key not in self._states:
            prompts, policy = (self.readings | self._moved)[view.reading], self.policy
            with torch.no_grad():
                if view.model == CURRENT:
                    states = self._packed(policy, prompts)
                else:
                    policy = self.models[view.model].build()
                    states = own_states(policy, prompts, self.rollout.completion_ids)
            self._states[key] = states, policy.head
        return self._states[key]

    def _packed(self, policy: Policy, prompts: Ids, budget: int = BUDGET) -> Tensor:  # (R, H)
        """The states by the trainer's packed rows of `budget` trunk tokens; 1: a row for each."""
        pairs = zip(self.rollout.completion_ids, self.rollout.sampling_logps, strict=True)
        samples = table_of(prompts, [Completion(ids, logps, EOS, 0) for ids, logps in pairs])
        samples.advantages = torch.zeros(len(samples))
        batch = StepBatch(
            samples, group_size=len(samples) // len(prompts), minibatches=1, budget=budget,
            device=policy.device, shared=policy.unshared is None,
        )  # fmt: skip
        for row in batch.micro_batches:
            row.write("ref_hidden", policy.hidden(row.packed)[row.packed.predicting])
        assert batch.samples.ref_hidden is not None
        return batch.samples.ref_hidden


def own_states(policy: Policy, prompts: Ids, completions: Ids) -> Tensor:  # (R, H)
    """The states of each completion by itself, through the attention that generates."""
    size, rows = len(completions) // len(prompts), []
    with policy.generation():
        for i, tokens in enumerate(completions):
            ids = torch.tensor([prompts[i // size] + tokens[:-1]], device=policy.device)
            states = policy.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            rows.append(states[-len(tokens) :].to(policy.head.weight.dtype))
    return torch.cat(rows)
