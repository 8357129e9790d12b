"""Set of weighted reward functions. If a function fails, the run continues.

If a call raises an error or takes too long, its samples have no reward, and their entries in the
result are NaN. The trainer excludes them from the baseline and gives them no advantage. The run
ends with a RewardError if too many samples have no reward. It ends at once if a function does not
return one value per completion.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.errors import RewardError, Stopped, escape_control, require
from grpo_fast.rewards import conventions
from grpo_fast.rewards.conventions import OURS, STATE, Function, Score
from grpo_fast.rewards.isolated import IsolatedReward

logger = logging.getLogger(__name__)

WINDOW_CALLS = 10
MIN_CALLS = 3
NONE_APPLIES = "none_applies"  # reason for a sample for which every function returned None


class WeightedReward(NamedTuple):
    """A reward function with its weight.

    Attributes:
        name: name of the function in the metrics.
        weight: weight in the total reward. With weight 0, the function is only logged.
        function: the function. A plain function of our convention accepts lists as keyword
            arguments.
    """

    name: str
    weight: float
    function: Any


class RewardResult(NamedTuple):
    """Rewards of N completions, in fp32 on the CPU. NaN marks a sample without a reward.

    Attributes:
        total: (N,) weighted sum over the functions that apply. It is NaN if one of them failed, or
            if none applies.
        per_fn: the rewards (N,) of each function, keyed by name. A value is NaN if the function
            failed or does not apply.
        reasons: for each function, by name, a count of the samples without a reward in this call
            for each reason.
    """

    total: Tensor
    per_fn: dict[str, Tensor]
    reasons: dict[str, Counter[str]]


class RewardSet:
    """Callable set of weighted reward functions.

    Args:
        rewards: the functions. Their names must differ.
        max_failures: fraction of samples without a reward above which a RewardError is raised. It
            is measured over the last 10 calls of a function, and is not checked in the first 2
            calls.
    """

    def __init__(self, rewards: Sequence[WeightedReward], *, max_failures: float = 0.5) -> None:
        names = [reward.name for reward in rewards]
        require(len(set(names)) == len(names), "rewards", "different names", names)
        for name, weight, _ in rewards:
            require(math.isfinite(weight), "rewards", f"a finite weight for {name}", weight)
        require(0 <= max_failures <= 1, "max_failures", "a fraction from 0 to 1", max_failures)
        self.rewards = [
            reward if isinstance(reward.function, Function | IsolatedReward)
            else reward._replace(function=Function(reward.function, OURS, {}))
            for reward in rewards
        ]  # fmt: skip
        self.max_failures = max_failures
        # For each function and each of its latest calls, the number of samples without a reward and
        # the number of all samples.
        self.recent: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        self.last_error = dict.fromkeys(names, "")
        self.progress: dict[str, Any] = dict(STATE)  # fields of TRL's `trainer_state`

    def __call__(
        self, lists: Mapping[str, Mapping[str, Sequence[Any]]], count: int
    ) -> RewardResult:
        """Score N completions. `columns.score` builds the arguments.

        Args:
            lists: for each convention, the lists of N values that a function can request.
            count: N.

        Raises:
            RewardError: too many samples have no reward, or a function returned too few or too many
                values.
        """
        # 1. Call every function with the arguments of its convention.
        scores = {r.name: self._call(r, lists[r.function.convention], count) for r in self.rewards}
        # 2. A sample has no reward if no function applies. Functions with weight 0 do not count.
        weights = {r.name: r.weight for r in self.rewards if r.weight != 0}
        for i in range(count):
            if weights and all(scores[name][i] is None for name in weights):
                for name in weights:
                    scores[name][i] = NONE_APPLIES
                    self._note(name, "every function returned None for a sample")
        # 3. Add up the rewards, and count the samples without a reward.
        per_fn: dict[str, Tensor] = {}
        reasons: dict[str, Counter[str]] = {}
        total = torch.zeros(count)
        for name, found in scores.items():
            values = [score if isinstance(score, float) else math.nan for score in found]
            per_fn[name] = torch.tensor(values, dtype=torch.float32)
            reasons[name] = Counter(score for score in found if isinstance(score, str))
            if name in weights:
                applies = torch.tensor([score is not None for score in found], dtype=torch.bool)
                total = total + weights[name] * per_fn[name].where(applies, 0.0)
            self._count(name, reasons[name].total(), count)
        return RewardResult(total, per_fn, reasons)

    def state_dict(self) -> dict[str, list[tuple[int, int]]]:
        return dict(self.recent)

    def load_state_dict(self, state: Mapping[str, list[tuple[int, int]]]) -> None:
        self.recent = {name: state[name] for name in self.recent}

    def _call(
        self, reward: WeightedReward, lists: Mapping[str, Sequence[Any]], count: int
    ) -> list[Score | str]:
        """Return the scores of a reward function. If its call fails, every score is the reason.

        Raises:
            RewardError: the function did not return one value per completion.
        """
        try:
            # Copy the arguments. A function could modify the messages of a prompt, which are also
            # passed to later functions.
            columns = reward.function.signature.select(lists)
            arguments = copy.deepcopy({name: list(column) for name, column in columns.items()})
            # Restore the gradient mode afterwards, because the function could change it.
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                scores, note = reward.function.call(count, arguments, self.progress)
        except (KeyboardInterrupt, Stopped):  # the user ends the run
            raise
        except BaseException as error:  # includes sys.exit() and a cancelled coroutine
            why = conventions.why_of(error)
            if why == conventions.WRONG_LENGTH:
                raise RewardError(f"reward {reward.name}: {error}") from None
            note = conventions.describe(error)
            if note.startswith("TypeError") and reward.function.convention == OURS:
                note += "; a function with the arguments of TRL needs convention: trl"
            scores = [why] * count
        if note:
            self._note(reward.name, note)
        return scores

    def _note(self, name: str, message: str) -> None:
        if not self.last_error[name]:
            text = "reward %s failed (its samples are dropped and counted): %r"
            logger.warning(text, name, message[:500])
        self.last_error[name] = escape_control(message[:500])

    def _count(self, name: str, failed: int, asked: int) -> None:
        recent = [*self.recent[name], (failed, asked)][-WINDOW_CALLS:]
        self.recent[name] = recent
        lost = sum(failed for failed, _ in recent)
        samples = sum(asked for _, asked in recent)
        if len(recent) >= MIN_CALLS and lost > self.max_failures * samples:
            got = f"{lost} of the last {samples} samples have no reward"
            limit = f"more than {self.max_failures:.0%}"
            last = self.last_error[name]
            raise RewardError(f"reward {name}: {got} ({limit}); last error: {last}")
