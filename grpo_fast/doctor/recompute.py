"""The log-probabilities of a rollout's tokens by the trainer's model, under any view."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_fast import linear_logps
from grpo_fast.attention import pack_groups, plan_packs
from grpo_fast.doctor.prompts import AS_SENT, Ids, padded
from grpo_fast.doctor.rows import Truncation, row_logps
from grpo_fast.doctor.view import BF16, CURRENT, FITTED, KEPT, OWN, PREVIOUS, View
from grpo_fast.kernels.support import Support
from grpo_fast.rollout import Kept, Rollout
from grpo_fast.train.models.policy import Policy

BUDGET = 8192  # trunk tokens of a packed row
GRID, WIDEST, FINEST = 17, 4.0, 2e-5  # temperatures at a time; how far off; relative steps at last


class Recomputed:
    """Recomputes; what several views share is computed once.

    Args:
        policy: the trainer's.
        rollout: completions of one engine, G of each prompt side by side; none empty.
        readings: name → token ids of each prompt (not of each completion).
        previous: a policy that the engine may still have, or None.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        readings: dict[str, Ids],
        *,
        previous: Policy | None = None,
    ) -> None:
        self.policy, self.rollout, self.readings = policy, rollout, readings
        self.policies = {CURRENT: policy} | ({PREVIOUS: previous} if previous else {})
        self.group_size = len(rollout.completion_ids) // len(readings[AS_SENT])
        self.engine_logps = torch.cat(list(rollout.sampling_logps)).float().cpu()  # (R,)
        ids = [token for one in rollout.completion_ids for token in one]
        self.targets = torch.tensor(ids, device=policy.device)  # (R,)
        self.kept = joined(rollout.kept)
        self.support = None
        if self.kept is not None:
            device = policy.device
            self.support = Support(self.kept.ids.to(device), self.kept.offsets.to(device))
        self._states: dict[tuple[str, str, str, str], Tensor] = {}
        self._found: dict[View, float] = {}

    def difference(self, view: View) -> float:
        """Mean of |engine − trainer| in nats per token."""
        if view not in self._found:
            self._found[view] = float((self.engine_logps - self.logps(view)).abs().mean())
        return self._found[view]

    def fitted(self, view: View) -> View:
        """The view with the temperature that fits best, where none is given."""
        if view.temperature is not FITTED:
            return view
        low, high = 1 / WIDEST, WIDEST
        while True:
            ratio = (high / low) ** (1 / (GRID - 1))
            grid = [low * ratio**i for i in range(GRID)]
            errors = (self._at(view, grid) - self.engine_logps).abs().mean(-1)
            best = int(errors.argmin())
            if ratio < 1 + FINEST:
                return view._replace(temperature=grid[best])
            low, high = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]

    @torch.no_grad()
    def logps(self, view: View) -> Tensor:  # (R,) fp32 on the CPU
        """Under a view; the trainer's own by what the trainer runs."""
        view = self.fitted(view)
        temperature = float(view.temperature)
        if not view.is_trainers():
            return self._at(view, [temperature])[0]
        head, states = self._policy(view.model).head, self._hidden(view)
        support = self.support if view.truncation == KEPT else None
        logps = linear_logps(
            states, head.weight, self.targets, bias=head.bias, temperature=temperature,
            support=support, **head.rule,
        )  # fmt: skip
        return logps.cpu()

    def _at(self, view: View, temperatures: Sequence[float]) -> Tensor:
        truncation = view.truncation if isinstance(view.truncation, Truncation) else None
        return row_logps(
            self._hidden(view), self._policy(view.model).head, self.targets, temperatures,
            truncation=truncation, kept=self.kept if view.truncation == KEPT else None,
            dtype=torch.bfloat16 if view.model == BF16 else view.head,
        )  # fmt: skip

    def _hidden(self, view: View) -> Tensor:  # (R, H)
        """The states that predict the completions' tokens."""
        key = (view.model, view.forward, view.reading, view.padding)
        if key not in self._states:
            policy = self._policy(view.model)
            prompts = padded(self.readings[view.reading], view.padding, policy.pad_id)
            states: Callable[[Policy, Ids, Ids], list[Tensor]]
            is_own = view.forward == OWN or view.model == BF16  # as an engine computes it
            states = own_states if is_own else self._packed_states
            with torch.no_grad():
                found = states(policy, prompts, self.rollout.completion_ids)
            self._states[key] = torch.cat(found)
        return self._states[key]

    def _packed_states(self, policy: Policy, prompts: Ids, completions: Ids) -> list[Tensor]:
        size = self.group_size
        groups = [
            (prompt, completions[i * size : (i + 1) * size]) for i, prompt in enumerate(prompts)
        ]
        lengths = [(len(prompt), [len(c) for c in members]) for prompt, members in groups]
        shared = policy.unshared is None
        found: dict[int, Tensor] = {}
        for shares in plan_packs(lengths, BUDGET, shared=shared):
            parts = [share.of(groups) for share in shares]
            packed = pack_groups(parts, shared=shared, device=policy.device)
            places = [share.group * size + i for share in shares for i in share.completions]
            views = packed.split(policy.hidden(packed)[packed.predicting])
            found.update(zip(places, views, strict=True))
        return [found[i] for i in range(len(completions))]

    def _policy(self, name: str) -> Policy:
        if name == BF16 and name not in self.policies:
            twin = self.policy.frozen_copy()
            twin.lm.to(torch.bfloat16)
            self.policies[name] = twin
        return self.policies[name]


def own_states(policy: Policy, prompts: Ids, completions: Ids) -> list[Tensor]:
    """Each completion by itself behind its prompt, through the attention that generates."""
    size, found = len(completions) // len(prompts), []
    with policy.generation():
        for i, tokens in enumerate(completions):
            ids = torch.tensor([prompts[i // size] + tokens[:-1]], device=policy.device)
            states = policy.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            found.append(states[-len(tokens) :].to(policy.head.weight.dtype))
    return found


def joined(parts: Sequence[Kept | None]) -> Kept | None:
    """What each token was drawn from, one completion behind the other; None where one is silent."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not known:
        return None
    sizes = torch.cat([part.offsets.diff() for part in known])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    return Kept(torch.cat([part.ids for part in known]), offsets)
