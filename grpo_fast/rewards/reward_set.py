"""A set of weighted reward functions, none of which can stop or poison a run.

If a call raises or hangs, its samples are lost. Only a function that declares itself per-sample is
called again sample by sample, and loses the samples that fail again: any other function could give
other values for a part of the batch. A lost sample is NaN in the result: the trainer drops it from
the baseline and gives it no advantage. The run ends with a RewardError above a share of lost
samples, and at once if a function does not return one value per completion.
"""

from __future__ import annotations

import copy
import logging
import math
import reprlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from grpo_fast.data import escape_control
from grpo_fast.errors import RewardError, require
from grpo_fast.rewards import calling
from grpo_fast.rewards.calling import RewardFunction, Score
from grpo_fast.rewards.conventions import (
    OURS,
    TRL,
    RunLog,
    columns_of_others,
    is_per_sample,
    parameters_of,
)

logger = logging.getLogger(__name__)

FP32_MAX = torch.finfo(torch.float32).max
WINDOW_CALLS = 10
MIN_CALLS = 3
RETRY_TIMEOUTS = 2  # a function that hangs on more samples than this is not called for the rest
NONE_APPLIES = "none_applies"  # the reason of a sample for which every function returned None
Lost = Annotated[int, Field(ge=0, lt=1 << 53)]  # samples; JSON's readers agree on such a number


class WeightedReward(NamedTuple):
    """A reward function under the name it has in the metrics, and its weight in the sum."""

    name: str
    weight: float
    function: RewardFunction
    needs: Sequence[str] = ()  # columns without which it cannot be called
    convention: str = OURS  # by which it is called
    is_unsure: bool = False  # whether it might be written for another convention


class RewardResult(NamedTuple):
    """Rewards of N completions, fp32 on the CPU. NaN marks a sample without a reward."""

    # (N,) weighted sum over the functions that apply; NaN if one of them failed, or none applies
    total: Tensor
    per_fn: dict[str, Tensor]  # name → (N,), NaN where the function failed or does not apply
    reasons: dict[str, Counter[str]]  # name → samples lost in this call, by reason
    # For each completion the (tokens,) fp32 that add up to its total, where a function gave rewards
    # per token; what the others gave stands at the last token.
    per_token: list[Tensor] | None = None
    extra: Mapping[str, list[str]] = MappingProxyType({})  # columns of `log_extra`
    metrics: Mapping[str, list[float]] = MappingProxyType({})  # values of `log_metric`

    @property
    def failures(self) -> dict[str, int]:
        return {name: reasons.total() for name, reasons in self.reasons.items()}


@dataclass
class RewardsState:
    """The state of a RewardSet: samples that it has lost, by function."""

    failed_total: dict[str, Lost]
    recent: dict[str, list[tuple[Lost, Lost]]]  # of the latest calls: lost, asked
    last_error: dict[str, str]


class RewardSet:
    """Several weighted reward functions, with names that differ, as one.

    Args:
        max_failures: fraction of lost samples, over the last 10 calls (at least 3), above which
        RewardError is raised.
    """

    def __init__(self, rewards: Sequence[WeightedReward], *, max_failures: float = 0.5) -> None:
        names = [reward.name for reward in rewards]
        require(len(set(names)) == len(names), "rewards", "different names", names)
        for name, weight, *_ in rewards:
            require(math.isfinite(weight), "rewards", f"a finite weight for {name}", weight)
        require(0 <= max_failures <= 1, "max_failures", "a fraction from 0 to 1", max_failures)
        self.rewards = list(rewards)
        self.max_failures = max_failures
        self.state = RewardsState(
            dict.fromkeys(names, 0), {name: [] for name in names}, dict.fromkeys(names, "")
        )
        # TRL's `trainer_state`: the steps of the run that are done, and all of them.
        self.progress: dict[str, int] = {"global_step": 0, "max_steps": 0}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return [reward.name for reward in self.rewards]

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        answers: Sequence[str | None],
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        labels: Sequence[Any] | None = None,
        prompt_texts: Sequence[str] | None = None,
    ) -> RewardResult:
        """Score N completions.

        Args:
            columns: the lists that functions may name besides the first three.
            labels: gold answers as their rows hold them, for functions of other trainers.
            prompt_texts: the prompts as the model received them, for OpenRLHF's functions.

        Raises ValueError for lists of different lengths, RewardError above `max_failures`.
        """
        usual = {"prompts": prompts, "completions": completions, "answers": answers}
        lists = {**(columns or {}), **usual}
        raw = answers if labels is None else labels
        lengths = [len(column) for column in lists.values()]
        fits = len(set(lengths)) == 1
        require(fits, ", ".join(lists), "lists of one length", ", ".join(map(str, lengths)))
        run_log = RunLog()
        sent = prompt_texts or [""] * len(completions)
        given = columns_of_others(prompts, completions, answers, columns or {}, raw, sent)
        given |= {OURS: lists}
        scores = {r.name: self._scores(r, given[r.convention], run_log) for r in self.rewards}
        counted = {r.name: r.weight for r in self.rewards if r.weight != 0}  # 0: only watched
        for i in range(len(completions)):
            if counted and all(scores[name][i] is None for name in counted):
                for name in counted:
                    scores[name][i] = NONE_APPLIES
                    self._note(name, "every function returned None for a sample")
        per_fn: dict[str, Tensor] = {}
        reasons: dict[str, Counter[str]] = {}
        total = torch.zeros(len(completions))
        for name, values in scores.items():
            sums = [_sum(value) for value in values]
            per_fn[name] = torch.tensor(sums, dtype=torch.float32)
            reasons[name] = Counter(value for value in values if isinstance(value, str))
            if name in counted:
                applies = torch.tensor([value is not None for value in values], dtype=torch.bool)
                total = total + counted[name] * per_fn[name].where(applies, 0.0)
            self._count(name, reasons[name].total(), len(completions))
        scored = [(weight, scores[name]) for name, weight in counted.items()]
        per_token = _per_token(scored, lists.get("completion_lengths"))
        extra = {n: [str(x) for x in v] for n, v in run_log.extra.items() if len(v) == len(total)}
        return RewardResult(total, per_fn, reasons, per_token, extra, run_log.metrics)

    def state_dict(self) -> RewardsState:
        with self._lock:
            return copy.deepcopy(self.state)

    def load_state_dict(self, state: RewardsState) -> None:
        with self._lock:
            self.state = RewardsState(
                {name: state.failed_total[name] for name in self.names},
                {name: state.recent[name] for name in self.names},
                {name: state.last_error[name] for name in self.names},
            )

    def _scores(
        self, reward: WeightedReward, columns: Mapping[str, Sequence[Any]], run_log: RunLog
    ) -> list[Score | str]:
        """Return for each completion its score, or the reason why it has none."""
        count = len(next(iter(columns.values())))
        scores = self._ask(reward, columns, count, run_log)
        if not isinstance(scores, str):
            return scores
        if count < 2 or not is_per_sample(reward.function):
            return [scores] * count
        retried: list[Score | str] = []
        timeouts = 0
        for i in range(count):
            one: list[Score | str] | str = "timeout"
            if timeouts <= RETRY_TIMEOUTS:
                sample = {name: column[i : i + 1] for name, column in columns.items()}
                one = self._ask(reward, sample, 1, run_log)
                timeouts += one == "timeout"
            retried.append(one if isinstance(one, str) else one[0])
        return retried

    def _ask(
        self, reward: WeightedReward, columns: Mapping[str, Sequence[Any]], count: int,
        run_log: RunLog,
    ) -> list[Score | str] | str:  # fmt: skip
        """Return scores and reasons, or one reason if the call fails."""
        lists = {name: list(column) for name, column in columns.items()}
        try:
            parameters = parameters_of(reward.function)
            # A copy: a prompt may be a list of messages, which the other functions read, too.
            arguments = copy.deepcopy(parameters.select(lists))
            if reward.convention == TRL:
                arguments |= parameters.select(run_log.objects(self.progress))
            with torch.set_grad_enabled(torch.is_grad_enabled()):  # restores the mode
                values = calling.call(reward.function, count, arguments)
        except KeyboardInterrupt:  # the user wants the run to end
            raise
        except BaseException as error:  # sys.exit() and a cancelled coroutine are no Exception
            why = calling.why_of(error)
            if why == calling.WRONG_LENGTH:
                raise RewardError(f"reward {reward.name}: {error}") from None
            self._note(reward.name, calling.describe(error))
            return why
        lengths = columns.get("completion_lengths", [None] * count)
        pairs = zip(values, lengths, strict=True)
        return [self._checked(reward.name, value, length) for value, length in pairs]

    def _checked(self, name: str, value: Score | str, length: int | None) -> Score | str:
        if value is None:
            return None
        numbers = value if isinstance(value, list) else [value]
        if isinstance(value, list) and length is not None and length != len(value):
            self._note(name, f"expected a reward for each of {length} tokens, got {len(value)}")
            return calling.WRONG_LENGTH
        is_odd = isinstance(value, str) or (isinstance(value, list) and length is None)
        # The trainer computes in fp32: beyond its range a value is as useless as inf or NaN.
        if is_odd or not all(abs(x) <= FP32_MAX for x in (*numbers, _sum(value))):
            self._note(name, f"not a finite number: {reprlib.repr(value)}")
            return calling.NO_NUMBERS
        return value

    def _note(self, name: str, message: str) -> None:
        if not self.state.last_error[name]:
            said = "reward %s failed (its samples are dropped and counted): %r"
            logger.warning(said, name, message[:500])
        self.state.last_error[name] = escape_control(message[:500])

    def _count(self, name: str, failed: int, asked: int) -> None:
        with self._lock:
            self.state.failed_total[name] += failed
            recent = [*self.state.recent[name], (failed, asked)][-WINDOW_CALLS:]
            self.state.recent[name] = recent
        lost, of = sum(f for f, _ in recent), sum(n for _, n in recent)
        if len(recent) >= MIN_CALLS and lost > self.max_failures * of:
            raise RewardError(
                f"reward {name}: {lost} of the last {of} samples have no reward "
                f"(more than {self.max_failures:.0%}); last error: {self.state.last_error[name]}"
            )


def _sum(score: Score | str) -> float:
    """Return a completion's reward, NaN for a reason or None."""
    if isinstance(score, list):
        return float(sum(score))
    return math.nan if score is None or isinstance(score, str) else score


def _per_token(
    scored: list[tuple[float, list[Score | str]]],  # weight and scores of each function
    lengths: Sequence[int] | None,
) -> list[Tensor] | None:
    """Return the weighted rewards of every completion's tokens; None if no function gave any."""
    if lengths is None or not any(isinstance(s, list) for _, scores in scored for s in scores):
        return None
    rewards = [torch.zeros(length, dtype=torch.float64) for length in lengths]
    for weight, scores in scored:
        for reward, score in zip(rewards, scores, strict=True):
            if isinstance(score, list):
                reward += weight * torch.tensor(score, dtype=torch.float64)
            elif score is not None:  # an empty completion has no last token
                reward[-1:] += weight * _sum(score)
    return [reward.float() for reward in rewards]
