"""Collection of the samples of a step: prompts, completions, rewards and advantages.

With several ranks, each rank samples completions for its share of the prompts, and rank 0 scores
all completions.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_fast import group_advantages, rewards, rollout
from grpo_fast.data import Example
from grpo_fast.errors import Stopped, require
from grpo_fast.objective.advantages import Options
from grpo_fast.objective.baseline import running_baseline, split_options
from grpo_fast.rewards import RewardResult, RewardSet
from grpo_fast.rollout import Engine, Samples, Sampling, awake, prompt_texts
from grpo_fast.rollout.completions import decoded
from grpo_fast.rollout.engine import started
from grpo_fast.train import ranks
from grpo_fast.train.config import GAE, RolloutConfig
from grpo_fast.train.metrics import (
    Clock,
    completion_metrics,
    reward_metrics,
    staleness,
    support_metrics,
)
from grpo_fast.train.models.policy import Policy

log = logging.getLogger(__name__)

WATCHED_STEPS = 5  # number of steps in a row after which a warning about equal rewards is logged

Collected = tuple[Samples, dict[str, float]]  # samples of a step, and its metrics


@dataclass
class Collector:
    """Collector that samples completions, scores them and computes their advantages.

    With `rollout.ahead`, the completions of the next step are sampled with the weights from before
    the current step's updates. An engine on a separate device samples them in a thread during
    training. Any other engine samples them before the updates of the current step begin.
    """

    config: RolloutConfig
    policy: Policy
    engine: Engine
    rewards: RewardSet
    queue: PromptQueue
    advantages: Advantages
    seed: int  # seed of the run
    steps: int  # steps of the run
    sampled: Samples | None = None  # unscored samples of the next step
    seconds: float = math.nan  # time that sampling them took; NaN if a checkpoint provided them
    logged: dict[str, list[float]] = field(default_factory=dict)  # values logged by rewards
    steps_without_spread: int = 0  # latest steps in which most groups had equal rewards
    coming: Future[tuple[Samples | None, float]] | None = None  # result of the sampling thread

    def next(self, step: int, clock: Clock) -> Collected:
        """Return the samples of a step.

        With `rollout.dynamic`, groups with equal rewards are replaced with groups from the next
        prompts. If groups are still missing after `rollout.dynamic.rounds` rounds of replacement,
        groups with equal rewards complete the batch.

        Args:
            step: number of the step, counted from 1.
            clock: clock that measures the time of each part of the step.

        Returns:
            The samples and the metrics of the step.
        """
        dynamic = self.config.dynamic
        wanted = self.config.prompts_per_step
        ahead = self.sampled
        self.sampled = None
        metrics: dict[str, float] = {}
        self.logged = {}
        is_used = torch.ones(wanted, dtype=torch.bool)  # one entry per group
        # 1. Sample and score the prompts of the step. Skip sampling if it was done ahead.
        if ahead is not None:
            clock.seconds["rollout"] = self.seconds
        is_idle = ahead is not None and dynamic is None
        with nullcontext() if is_idle else awake(self.engine, self.policy, version=step - 1):
            places = self.queue.take(wanted)
            samples, lost = self._scored(places, (self.seed, step), clock, ahead)
            # 2. Replace groups whose rewards are all equal with groups from the next prompts.
            if dynamic is not None:
                rounds = 0
                is_used, filled = used_groups(self._judged(samples), wanted)
                while filled and rounds < dynamic.rounds:
                    rounds += 1
                    # Include the queue position in the seed, so that each round draws new random
                    # numbers.
                    seed = (self.seed, step, self.queue.consumed)
                    places = self.queue.take(filled)
                    more, also_lost = self._scored(places, seed, clock)
                    samples = Samples.cat([samples, more])
                    lost = {name: lost[name] + also_lost[name] for name in lost}
                    is_used, filled = used_groups(self._judged(samples), wanted)
                metrics = {
                    "dynamic_sampling/asked": float(len(is_used)),
                    "dynamic_sampling/dropped": float((~is_used).sum()),
                    "dynamic_sampling/filled": float(filled),
                    "dynamic_sampling/rounds": float(rounds),
                    "prompts_consumed": float(self.queue.consumed),
                }
        # 3. Compute the advantages of the groups that are used.
        size = self.config.group_size
        chosen = samples[is_used.repeat_interleave(size).nonzero()[:, 0]]
        assert chosen.rewards is not None and samples.rewards is not None
        chosen.advantages = self.advantages.of(chosen.rewards, chosen.scores, chosen.lengths)
        # Update the baseline now, so that the advantages of a step see only earlier rewards.
        baseline = self.advantages.baseline
        if baseline is not None:
            baseline.update(samples.rewards)
        # 4. Compute metrics over all samples, including those of dropped groups.
        metrics = {
            **{f"logged/{name}": math.fsum(x) / len(x) for name, x in self.logged.items()},
            **reward_metrics(samples.rewards, samples.scores, lost, size),
            **completion_metrics(samples),
            **support_metrics(samples),
            **metrics,
            **staleness(samples, step, most=self.config.ahead),
        }
        self._warn_without_spread(metrics["frac_reward_zero_std"])
        return chosen, metrics

    def begin_ahead(self, step: int, clock: Clock) -> None:
        """Sample the completions of the next step if `rollout.ahead` is 1.

        Args:
            step: number of the current step, counted from 1.
            clock: clock that measures the time of the sampling.
        """
        if not self.config.ahead or step == self.steps:
            return
        places = self.queue.next(self.config.prompts_per_step)  # the next step consumes these

        def sample(by: Callable[..., Samples | None]) -> tuple[Samples | None, float]:
            start = time.perf_counter()
            samples = self._sample(by, places, (self.seed, step + 1))
            return samples, time.perf_counter() - start

        with awake(self.engine, self.policy, version=step - 1):
            if self.engine.is_apart:
                self.coming = started(partial(sample, generate_share))
            else:
                self.sampled, self.seconds = sample(generate)
        clock.lap("ahead")

    def settle_ahead(self, clock: Clock) -> None:
        """Wait for the samples that `begin_ahead` draws in a thread."""
        coming = self.coming
        self.coming = None
        if coming is None:
            return
        own, self.seconds = coming.result()
        self.sampled = join_ranks(own)
        clock.lap("ahead")

    def examples_of(self, samples: Samples) -> list[Example]:
        """Return the training example that each sample belongs to."""
        return [self.queue.example(place) for place in samples.group.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. It does not include samples that were drawn ahead."""
        baseline = self.advantages.baseline
        return {
            "consumed": self.queue.consumed,
            "lost_rewards": self.rewards.state_dict(),
            "baseline": None if baseline is None else dict(baseline.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.queue.consumed = state["consumed"]
        self.rewards.load_state_dict(state["lost_rewards"])
        if self.advantages.baseline is not None and state["baseline"] is not None:
            self.advantages.baseline.load_state_dict(state["baseline"])

    def take_ahead(self, samples: Samples | None) -> None:
        """Restore the samples of the next step from a checkpoint.

        Args:
            samples: the samples that were drawn ahead, or None if the checkpoint has none.

        Raises:
            ValueError: the samples do not belong to the next prompts.
        """
        if samples is not None:
            samples.check(self.policy.head.weight.shape[0])
            places = torch.tensor(self.queue.next(self.config.prompts_per_step))
            fits = torch.equal(samples.group, places.repeat_interleave(self.config.group_size))
            expected = f"samples of the prompts {int(places[0])} to {int(places[-1])}"
            require(fits, "ahead.group", expected, samples.group.tolist()[:8])
            samples.texts = decoded(self.policy.tokenizer, samples.completion_ids)
        self.sampled = samples

    def _sample(
        self, by: Callable[..., Samples | None], places: range, seed: tuple[int, ...]
    ) -> Samples | None:
        """Sample completions for the prompts at the queue positions `places`.

        The function `by` draws the samples. It is `generate` or `generate_share`. The group number
        of a sample is the queue position of its prompt.
        """
        prompts = [self.queue.example(place).prompt for place in places]
        options: dict[str, Any] = {"group_size": self.config.group_size, "seed": seed}
        samples = by(self.policy, prompts, self.config, engine=self.engine, **options)
        if samples is not None:
            samples.group += places.start
        return samples

    def _scored(
        self, places: range, seed: tuple[int, ...], clock: Clock, samples: Samples | None = None
    ) -> tuple[Samples, dict[str, Counter[str]]]:
        """Score completions of the prompts at the queue positions `places`.

        If `samples` is None, the completions are sampled first.

        Returns:
            The samples, and for each reward function the number of samples without a reward, by
            reason.
        """
        # 1. Sample, unless the caller passed samples.
        if samples is None:
            samples = self._sample(generate, places, seed)
        assert samples is not None
        clock.lap("rollout", tokens=sum(samples.lengths))
        examples = self.examples_of(samples)
        # Render the chat template once per group, because all samples of a group share the prompt.
        size = self.config.group_size
        texts = prompt_texts(self.policy, [example.prompt for example in examples[::size]])
        sent = [text for text in texts for _ in range(size)]
        # 2. Call the reward functions.
        done = seed[1] - 1
        epoch = done * self.config.prompts_per_step / len(self.queue.examples)
        self.rewards.progress |= {"global_step": done, "max_steps": self.steps, "epoch": epoch}
        result = score(self.rewards, examples, samples.texts, samples.completion_ids, sent)
        # 3. Store the rewards and the values that the functions logged.
        samples.rewards = result.total
        samples.scores = result.per_fn
        samples.extra = dict(result.extra)
        for name, values in result.metrics.items():
            self.logged.setdefault(name, []).extend(values)
        if self.advantages.mode == GAE:
            samples.token_rewards = token_rewards(result, samples)
        clock.lap("reward")
        return samples, result.reasons

    def _judged(self, samples: Samples) -> Tensor:
        """Return the rewards that decide which groups are kept, shape (groups, G).

        A group may be dropped if these rewards are all equal. They are the total rewards, or the
        rewards of the function `rollout.dynamic.judged_by` if it is set.
        """
        judge = self.config.dynamic and self.config.dynamic.judged_by
        judged = samples.scores[judge] if judge else samples.rewards
        return judged.view(-1, self.config.group_size)

    def _warn_without_spread(self, fraction: float) -> None:
        """Log a warning if most groups had equal rewards in each of the last WATCHED_STEPS steps.

        Args:
            fraction: fraction of this step's groups in which all rewards are equal.
        """
        is_counted = fraction > 0.5 and self.config.group_size > 1
        self.steps_without_spread = self.steps_without_spread + 1 if is_counted else 0
        if self.steps_without_spread == WATCHED_STEPS:
            log.warning(
                "most groups of the last %d steps have equal rewards, and nothing is learned from "
                "them: the prompts may be too easy or too hard (rollout.dynamic={} replaces such "
                "groups)", WATCHED_STEPS,
            )  # fmt: skip


# ------------------------------------------------------------------------------ Several ranks
def generate(
    policy: Any, prompts: Sequence[Any], options: Sampling, *, engine: Engine | None = None,
    **others: Any,
) -> Samples:  # fmt: skip
    """Sample completions for all prompts, which are divided among the ranks.

    Args:
        policy: the policy from which to sample.
        prompts: all prompts of the step.
        options: the sampling options.
        engine: the engine that samples. None uses transformers.
        **others: further arguments of `rollout.generate`.

    Returns:
        The samples of all prompts, on every rank. They do not depend on the number of ranks.

    Raises:
        Stopped: a rank has received a signal.
    """
    if ranks.size() == 1:
        return rollout.generate(policy, prompts, options, engine=engine, **others)
    is_apart = engine is not None and engine.is_apart
    own: Samples | Stopped | None
    with ranks.unsharded(policy.lm) if policy.is_sharded and not is_apart else nullcontext():
        try:
            own = generate_share(policy, prompts, options, engine=engine, **others)
        except Stopped as stopped:
            own = stopped
    return join_ranks(own)


def generate_share(
    policy: Any, prompts: Sequence[Any], options: Sampling, **others: Any
) -> Samples | None:
    """Sample completions for this rank's part of the prompts. Ranks do not communicate.

    Returns:
        The samples, or None if the rank has no prompts.
    """
    count = len(prompts)
    rank = ranks.rank()
    size = ranks.size()
    places = range(count * rank // size, count * (rank + 1) // size)
    if not places:
        return None
    own = prompts[places.start : places.stop]
    return rollout.generate(policy, own, options, places=places, **others)


def join_ranks(own: Samples | Stopped | None) -> Samples:
    """Join the samples of all ranks in the order of the prompts.

    Raises:
        Stopped: a signal has ended the sampling of a rank.
    """
    every = ranks.gather(own)
    for each in every:
        if isinstance(each, Stopped):
            raise ranks.common(Stopped(each.number))
    return Samples.cat(every)


def score(*arguments: Any) -> RewardResult:
    """Call `rewards.score` on rank 0, and return its result on all ranks.

    Reward functions run on rank 0, and receive the same batch as in a single process.
    """
    return ranks.from_main(lambda: rewards.score(*arguments))


# ------------------------------------------------------------------- Prompts, groups, advantages
class PromptQueue:
    """Endless sequence of training prompts, which cycles through the training set in order.

    A place is an index into this sequence. It is also the number of the prompt's group.

    Args:
        examples: the training set.
        consumed: number of prompts that were already used, which is also the next place.
    """

    def __init__(self, examples: Sequence[Example], consumed: int = 0) -> None:
        self.examples = examples
        self.consumed = consumed

    def next(self, count: int) -> range:
        """Return the next `count` places (queue positions) without consuming them."""
        return range(self.consumed, self.consumed + count)

    def take(self, count: int) -> range:
        """Return the next `count` places (queue positions) and consume them."""
        places = self.next(count)
        self.consumed = places.stop
        return places

    def example(self, place: int) -> Example:
        return self.examples[place % len(self.examples)]


def used_groups(judged: Tensor, wanted: int) -> tuple[Tensor, int]:
    """Choose the groups that a step uses.

    A group is used if its rewards are not all equal. If these are fewer than `wanted` groups, the
    first groups with equal rewards complete the batch. All other groups are dropped.

    Args:
        judged: rewards of shape (groups, G). NaN marks samples without a reward, which are ignored.
        wanted: number of groups that the step uses.

    Returns:
        A mask of the used groups, and the number of used groups with equal rewards.
    """
    # If no sample of a group has a reward, the minimum is +inf and the maximum is -inf. The group
    # then counts as a group with equal rewards.
    low = judged.nan_to_num(nan=torch.inf).amin(1)
    has_spread = judged.nan_to_num(nan=-torch.inf).amax(1) > low
    missing = wanted - int(has_spread.sum())
    is_filled = ~has_spread & ((~has_spread).cumsum(0) <= missing)
    return has_spread | is_filled, int(is_filled.sum())


class Advantages:
    """Advantage computation of a run, with the running baseline that some modes use.

    Args:
        mode: value of the setting `advantages`.
        options: value of the setting `advantage_options`.
        group_size: number of completions per prompt (G).
        weights: weight of each reward function. Functions with weight 0 are logged but do not
            contribute.
    """

    def __init__(
        self, mode: str, options: Options, group_size: int, weights: Mapping[str, float]
    ) -> None:
        self.weights = {name: weight for name, weight in weights.items() if weight}
        self.mode = mode
        self.group_size = group_size
        self.options, _ = split_options(mode, options)
        self.baseline = running_baseline(mode, options)

    def of(self, rewards: Tensor, scores: Mapping[str, Tensor], lengths: Sequence[int]) -> Tensor:
        """Compute the advantage of each completion.

        Args:
            rewards: weighted sum of the rewards of each completion, shape (N·G,). The completions
                of a prompt are adjacent.
            scores: rewards of each function, shape (N·G,). Mode gdpo normalizes each function's
                rewards separately.
            lengths: number of tokens of each completion, which mode opo needs for its baseline.

        Returns:
            fp32 tensor of shape (N·G,). In mode gae it contains the rewards, because the critic
            computes advantages per token later.
        """
        if self.mode == GAE:
            return rewards.float()
        options = dict(self.options)
        if self.baseline is not None:
            options["value"] = self.baseline.value
        if self.mode == "gdpo":
            options = {"weights": list(self.weights.values()), **options}
            each = torch.stack([scores[name] for name in self.weights])
            # NaN in `each` means that a function does not apply to a sample. NaN in `rewards` means
            # that a function failed. Set all rewards of such a sample to NaN, so that none counts.
            rewards = each.masked_fill(rewards.isnan(), torch.nan)
        if self.mode == "opo":
            options["lengths"] = torch.tensor(lengths)
        return group_advantages(rewards, self.mode, group_size=self.group_size, **options)


def token_rewards(result: RewardResult, samples: Samples) -> Tensor:
    """Return the reward of each completion token, fp32 of shape (R,).

    The last token of a sample receives its reward, which is NaN if a function failed.
    """
    rewards = torch.zeros(len(samples.logps))
    at_end = torch.tensor(samples.lengths) > 0
    rewards[samples.rows[1:][at_end] - 1] = result.total[at_end]
    return rewards
