"""Set of weighted reward functions. If a function fails, the run continues.

If a call raises an error or takes too long, its samples have no reward. Only a function that
declares itself per-sample is then called again, once for each sample. The values of any other
function could differ if it were called with a part of the batch.

If a sample has no reward, its entry in the result is NaN. The trainer excludes it from the baseline
and gives it no advantage. The run ends with a RewardError if too many samples have no reward. It
ends at once if a function does not return one value per completion.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.data import escape_control
from grpo_fast.errors import RewardError, require
from grpo_fast.rewards import conventions
from grpo_fast.rewards.conventions import OPENRLHF, OURS, STATE, TRL, VERL, Function, Reply, Score
from grpo_fast.rewards.isolated import IsolatedReward

logger = logging.getLogger(__name__)

WINDOW_CALLS = 10
MIN_CALLS = 3
RETRY_TIMEOUTS = 2  # after more timeouts than this, the remaining samples of a call are lost
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
        per_token: the rewards of the tokens of each completion, which add up to the total. If a
            function returned one number for a completion, the last token gets this number. None if
            no function returned rewards per token.
        extra: columns that functions logged through `log_extra`, as in TRL.
        metrics: values that functions logged through `log_metric`, as in TRL.
    """

    total: Tensor
    per_fn: dict[str, Tensor]
    reasons: dict[str, Counter[str]]
    per_token: list[Tensor] | None = None
    extra: Mapping[str, list[str]] = MappingProxyType({})
    metrics: Mapping[str, list[float]] = MappingProxyType({})


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
        for name, weight, *_ in rewards:
            require(math.isfinite(weight), "rewards", f"a finite weight for {name}", weight)
        require(0 <= max_failures <= 1, "max_failures", "a fraction from 0 to 1", max_failures)
        self.rewards = list(rewards)
        for i, reward in enumerate(rewards):
            if not isinstance(reward.function, Function | IsolatedReward):
                function = Function(reward.function, OURS, {})
                self.rewards[i] = reward._replace(function=function)
        self.max_failures = max_failures
        # For each function and each of its latest calls, the number of samples without a reward and
        # the number of all samples.
        self.recent: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        self.last_error = dict.fromkeys(names, "")
        self.progress: dict[str, Any] = dict(STATE)  # fields of TRL's `trainer_state`

    def __call__(
        self,
        prompts: Sequence[object],
        completions: Sequence[str],
        answers: Sequence[str | None],
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        labels: Sequence[object] | None = None,
        prompt_texts: Sequence[str] | None = None,
        chats: Sequence[object] | None = None,
    ) -> RewardResult:
        """Score N completions.

        Args:
            prompts: N prompts, each a string or a list of messages.
            completions: N strings.
            answers: N gold answers as strings. An entry is None for an example without an answer.
            columns: further lists of N values, which functions can request by parameter name.
            labels: N gold answers as they are in the data rows, of any type, for functions for TRL,
                verl and OpenRLHF. Default: `answers`.
            prompt_texts: N prompts as the model received them, for functions of OpenRLHF.
            chats: N prompts as texts or messages for a chat template, for a reward model. Default:
                `prompts`.

        Raises:
            ValueError: the lists differ in length.
            RewardError: too many samples have no reward, or a function returned too few or too many
                values.
        """
        columns = columns or {}
        lists = {**columns, "prompts": prompts, "completions": completions, "answers": answers}
        lengths = [len(column) for column in lists.values()]
        fits = len(set(lengths)) == 1
        require(fits, ", ".join(lists), "lists of one length", ", ".join(map(str, lengths)))
        count = len(completions)
        # 1. Call every function with the arguments of its convention.
        gold = answers if labels is None else labels
        given = _arguments(lists, columns, gold, prompt_texts or [""] * count)
        extra: dict[str, list[str]] = defaultdict(list)
        metrics: dict[str, list[float]] = defaultdict(list)
        scores: dict[str, list[Score | str]] = {}
        for reward in self.rewards:
            scores[reward.name] = []
            reads_chats = getattr(reward.function, "reads_chats", False)
            given[OURS] = {**lists, "prompts": chats or prompts} if reads_chats else lists
            for reply in self._replies(reward, given, prompts):
                scores[reward.name] += reply.scores
                if reply.note:
                    self._note(reward.name, reply.note)
                for name, texts in reply.extra.items():
                    extra[name] += map(str, texts)
                for name, values in reply.metrics.items():
                    metrics[name] += values
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
            per_fn[name] = torch.tensor([score_sum(value) for value in found], dtype=torch.float32)
            reasons[name] = Counter(value for value in found if isinstance(value, str))
            if name in weights:
                applies = torch.tensor([value is not None for value in found], dtype=torch.bool)
                total = total + weights[name] * per_fn[name].where(applies, 0.0)
            self._count(name, reasons[name].total(), count)
        scored = [(weight, scores[name]) for name, weight in weights.items()]
        per_token = per_token_rewards(scored, lists.get("completion_lengths"))
        full = {name: texts for name, texts in extra.items() if len(texts) == count}
        return RewardResult(total, per_fn, reasons, per_token, full, metrics)

    def state_dict(self) -> dict[str, list[tuple[int, int]]]:
        return dict(self.recent)

    def load_state_dict(self, state: Mapping[str, list[tuple[int, int]]]) -> None:
        self.recent = {name: state[name] for name in self.recent}

    def _replies(
        self, reward: WeightedReward, given: Mapping[str, Any], prompts: Sequence[object]
    ) -> Iterator[Reply]:
        """Call a function for all completions, or after a failure for each completion alone."""
        count = len(prompts)
        try:
            per_sample = reward.function.signature.per_sample  # may start a worker
        except Exception as error:
            yield Reply([conventions.why_of(error)] * count, conventions.describe(error), {}, {})
            return
        where = f"in a call with {count} samples, the first"
        reply, why = self._call(reward, given, prompts, slice(None), where)
        if not why or count < 2 or not per_sample:
            yield reply
            return
        timeouts = 0
        for i in range(count):
            if timeouts > RETRY_TIMEOUTS:
                yield Reply(["timeout"], "", {}, {})
                continue
            where = f"sample {i} of {count},"
            reply, why = self._call(reward, given, prompts, slice(i, i + 1), where)
            timeouts += why == "timeout"
            yield reply

    def _call(
        self, reward: WeightedReward, given: Mapping[str, Any], prompts: Sequence[object],
        part: slice, where: str,
    ) -> tuple[Reply, str]:  # fmt: skip
        """Call a reward function for a part of the completions.

        Returns:
            The function's reply, and "" or the reason why the call failed.

        Raises:
            RewardError: the function returned too few or too many values.
        """
        signature = reward.function.signature
        columns = given[signature.convention]
        lists = {name: list(column[part]) for name, column in columns.items()}
        lengths = lists.get("completion_lengths")
        state = self.progress if signature.convention == TRL else None
        count = len(prompts[part])
        try:
            # Copy the arguments. A function could modify the messages of a prompt, which are also
            # passed to later functions.
            arguments = copy.deepcopy(signature.select(lists))
            # Restore the gradient mode afterwards, because the function could change it.
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                return reward.function.call(count, arguments, lengths, state), ""
        except KeyboardInterrupt:  # the user ends the run
            raise
        except BaseException as error:  # includes sys.exit() and a cancelled coroutine
            why = conventions.why_of(error)
            if why == conventions.WRONG_LENGTH:
                raise RewardError(f"reward {reward.name}: {error}") from None
            first = str(next(iter(prompts[part]), ""))[:80]
            note = f"{conventions.describe(error)} ({where} with the prompt {first!r})"
            return Reply([why] * count, note, {}, {}), why

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


def score_sum(score: Score | str) -> float:
    """Return the reward of a completion as one number, or NaN if it has none."""
    if isinstance(score, list):
        return float(sum(score))
    return math.nan if score is None or isinstance(score, str) else score


def per_token_rewards(
    scored: list[tuple[float, list[Score | str]]],  # (weight, scores) of each function
    lengths: Sequence[int] | None,
) -> list[Tensor] | None:
    """Combine the scores of all functions into weighted rewards of the tokens.

    Args:
        scored: the weight of each function, and its score for each completion.
        lengths: number of tokens of each completion.

    Returns:
        An fp32 tensor for each completion, or None if no function returned rewards per token.
    """
    if lengths is None or not any(isinstance(s, list) for _, scores in scored for s in scores):
        return None
    rewards = [torch.zeros(length, dtype=torch.float64) for length in lengths]
    for weight, scores in scored:
        for reward, score in zip(rewards, scores, strict=True):
            if isinstance(score, list):
                reward += weight * torch.tensor(score, dtype=torch.float64)
            elif score is not None:  # `-1:` also works for an empty completion
                reward[-1:] += weight * score_sum(score)
    return [reward.float() for reward in rewards]


def _arguments(
    lists: Mapping[str, Sequence[Any]], columns: Mapping[str, Sequence[Any]],
    labels: Sequence[object], sent: Sequence[str],
) -> dict[str, dict[str, Sequence[Any]]]:  # fmt: skip
    """Return the arguments of functions for TRL, verl and OpenRLHF.

    Args:
        lists: the lists of N values that our functions can request.
        columns: the lists that come from the data.
        labels: N gold answers as they are in the data rows.
        sent: N prompts as the model received them.
    """
    completions = lists["completions"]
    none = [None] * len(completions)
    # For a chat prompt, TRL passes the completion as a list with one message.
    turns = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(lists["prompts"], completions, strict=True)
    ]
    return {
        # As in TRL, a column of the data replaces our column of the same name.
        TRL: {"answers": lists["answers"], "answer": labels, **columns,
              "prompts": lists["prompts"], "completions": turns},
        VERL: {"data_source": columns.get("data_source", none), "solution_str": completions,
               "ground_truth": labels,
               "extra_info": [info or {} for info in columns.get("extra_info", none)]},
        OPENRLHF: {"queries": [a + b for a, b in zip(sent, completions, strict=True)],
                   "prompts": sent, "labels": labels},
    }  # fmt: skip
