"""One step of GRPO or PPO: completions → packed batch → updates → metrics.

They differ by where the advantages come from: the rewards of a group, or a critic.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from grpo_fast.objective.baseline import running_baseline
from grpo_fast.objective.kl import EXACT
from grpo_fast.rewards import RewardSet, scorer_for
from grpo_fast.rollout import Engine, awake, build_engine
from grpo_fast.train.collect.ahead import Ahead
from grpo_fast.train.collect.collect import Collected, collect
from grpo_fast.train.collect.prompts import PromptQueue
from grpo_fast.train.config import RunConfig
from grpo_fast.train.config.run import SHARDED
from grpo_fast.train.metrics.agreement import SamplerWatch
from grpo_fast.train.metrics.losses import (
    Clock,
    LossMetrics,
    Work,
    is_policy_alone,
    sampling_metrics,
)
from grpo_fast.train.models.kl_weight import KLWeight
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import Reference
from grpo_fast.train.ranks import distributed, sharding
from grpo_fast.train.report.samples import rows_of
from grpo_fast.train.step import Underway
from grpo_fast.train.update.batch import StepBatch
from grpo_fast.train.update.budget import TokenBudget, host_peak
from grpo_fast.train.update.critic import Critic, value_metrics
from grpo_fast.train.update.gradients import accumulate
from grpo_fast.train.update.optimizer import Optimizer
from grpo_fast.train.update.precompute import RewardKL, add_fixed
from grpo_fast.train.update.updates import Updates
from grpo_fast.train.update.variance import gradient_variance

log = logging.getLogger(__name__)

FULLY_VALIDATED_STEPS = 2  # the loss checks every value in these; later only what costs no sync


class Trainer:
    """What lives from step to step: the policy, its reference, a critic, their optimizers, β."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        rewards: RewardSet,
        critic: Critic | None = None,
        engine: Engine | None = None,
    ) -> None:
        self.config, self.policy, self.rewards, self.critic = config, policy, rewards, critic
        self.engine = engine or build_engine(policy, config.rollout)
        self.ahead = Ahead(config, policy, self.engine)
        self.watch = SamplerWatch(config.rollout)
        self.loss_config = config.loss_config()
        self.reference = Reference(policy, config.reference, config.model)
        self.baseline = running_baseline(config.advantages, config.advantage_options)
        self.reads_reference = config.reference.kind != "none"
        self.beta = KLWeight(config.loss.beta, config.kl)  # type: ignore[attr-defined]
        self.work = Work(policy.lm)
        self.updates = config.inner_iterations * config.minibatches  # per batch, at most
        total = config.steps * self.updates
        if config.distributed in SHARDED:
            models = (policy, self.reference.copy, critic)
            sharding.shard_all(models, policy.device, config.distributed_replicas)
        self.optimizer = Optimizer(policy.trainable(), config.optim, total)
        self.optimizers = [self.optimizer]
        if critic is not None:
            self.optimizers.append(critic.optimizer(config.optim, total))
        self.budget = TokenBudget(policy.lm, config)
        self.shared = config.shared_prompt and policy.unshared is None
        if config.shared_prompt and policy.unshared is not None:
            log.warning("every completion gets its own copy of the prompt: %s", policy.unshared)
        self.steps = self.num_tokens = self.peak_memory = 0
        self.underway: Underway | None = None  # the step that has its completions
        self.at_rest: Callable[[], Any] = lambda: None  # called where the run can be left

    def step(self, step: int, queue: PromptQueue) -> tuple[dict[str, float], Collected]:
        """A batch of completions and the updates it is good for: metrics, and the completions.

        A step that is under way goes on where it stands. The caller sets `underway` to None when
        the step is written down.
        """
        self.steps = step
        now = self.underway
        if now is None:
            now = self.underway = self.begin(step, queue)
            self.ahead.done()
            self.at_rest()
        self.ahead.begin(step, queue, now.clock)
        if now.metrics is None:
            if now.noise is None:
                now.noise = self.noise(now.batch) if self.config.log.grad_variance else {}
            self.update(now, "full" if step <= FULLY_VALIDATED_STEPS else "auto")
            now.metrics = self.finish(now)
            self.at_rest()
        return dict(now.metrics), now.collected._replace(advantages=now.batch.used_advantages())

    def begin(self, step: int, queue: PromptQueue) -> Underway:
        """The completions of a step, packed."""
        clock = Clock()
        ahead = self.ahead.rollout(clock)
        is_idle = ahead is not None and self.config.rollout.dynamic is None
        with nullcontext() if is_idle else awake(self.engine, self.policy, version=step - 1):
            collected = collect(
                self.policy, queue, self.rewards, self.config, step, clock, self.baseline,
                self.engine, ahead,
            )  # fmt: skip
        batch = StepBatch(
            collected.rollout, collected.advantages, budget=self.budget.tokens,
            **self.batch_options(),
        )  # fmt: skip
        done = Updates(self.config.minibatches, first=(step - 1) * self.updates + 1)
        return Underway(step, collected, batch, done, clock)

    def batch_options(self) -> dict[str, Any]:
        """How completions are packed, apart from the budget."""
        rollout = self.config.rollout
        return {
            "group_size": rollout.group_size, "minibatches": self.config.minibatches,
            "device": self.policy.device, "shared": self.shared,
            "mask_truncated": rollout.mask_truncated,
            "rank": distributed.rank(), "ranks": distributed.size(),
        }  # fmt: skip

    def finish(self, now: Underway) -> dict[str, float]:
        """What follows from a step's updates, and its metrics."""
        collected, batch, done, clock = now.collected, now.batch, now.done, now.clock
        self.reference.after_step(now.step)
        clock.lap("train")
        self.ahead.settle(clock)
        self.num_tokens += batch.trunk_tokens
        self.peak_memory = max(self.peak_memory, clock.peaks.get("train", 0))
        generated, seen = sum(collected.rollout.lengths), done.merged()
        self.watch.look(now.step, done.losses[0].logps)
        metrics = {
            **collected.metrics,
            **sampling_metrics(seen.logps),
            **self.learning_metrics(done, seen, batch),
            **(now.noise or {}),
            "num_tokens": float(self.num_tokens),
            "skipped_steps": float(self.optimizer.skipped),
            **clock.metrics(collected.generated, int(batch.trunk_tokens * done.passes)),
            **self.work.metrics(
                batch.trunk_tokens, generated, updates=done.passes, seconds=clock.seconds["train"],
                forwards=self.reads_reference + (self.updates > 1 or self.critic is not None),
            ),
        }  # fmt: skip
        now.update_rows = done.rows() if self.config.log.every_update else []
        self.adapt_beta(metrics.get("kl", math.nan), len(collected.rollout.lengths))
        return metrics

    def forget_gradients(self) -> None:
        """Of a minibatch that was left in its middle: it starts again."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def optimizers_by_name(self) -> dict[str, Optimizer]:
        return dict(zip(("policy", "critic"), self.optimizers, strict=False))

    def counters(self) -> dict[str, Any]:
        """What counts on from step to step, beside the optimizers."""
        return {
            "num_tokens": self.num_tokens, "peak_memory": self.peak_memory, "beta": self.beta.value,
            "budget": self.budget.state_dict(),
        }  # fmt: skip

    def load_counters(self, state: dict[str, Any]) -> None:
        self.num_tokens, self.peak_memory = state["num_tokens"], state["peak_memory"]
        self.beta.value = state["beta"]
        self.use_beta()
        self.budget.load_state_dict(state["budget"])

    def rows(self, collected: Collected) -> list[dict[str, Any]]:
        """A step's completions for its table and for the page."""
        answers = [e.answer for e in collected.examples if e.answer]
        scorer = scorer_for(self.config.data.task, answers)
        return rows_of(
            collected, self.policy.tokenizer, scorer, count=self.config.log.completions,
            group_size=self.config.rollout.group_size,
        )  # fmt: skip

    def adapt_beta(self, kl: float, completions: int) -> None:
        """Lead the KL's weight towards the KL that is wanted, where one is."""
        self.beta.after_step(kl, completions)
        self.use_beta()

    def use_beta(self) -> None:
        """The loss weighs its KL with beta as it is now."""
        if self.loss_config.uses_reference:
            self.loss_config = self.loss_config.replace(beta=self.beta.value)

    def learning_metrics(
        self, done: Updates, seen: LossMetrics, batch: StepBatch
    ) -> dict[str, float]:
        """Of the losses of a step's updates, and what they were weighed with."""
        grad_norm = sum(done.norms) / len(done)
        metrics = {**seen.result(), "grad_norm": grad_norm, "learning_rate": done.rates[-1]}
        if is_policy_alone(self.loss_config, self.critic is not None and self.critic.is_shared):
            metrics["policy_grad_norm"] = grad_norm
        if self.beta.value:
            metrics["beta"] = self.beta.value
        return metrics | (value_metrics(batch) if self.critic is not None else {})

    def update(self, now: Underway, validate: str) -> None:
        """μ passes over the batch, one optimizer step per minibatch, from where the step stands.

        After an early stop the schedule goes on as if all updates had been made.
        """
        config, batch, done = self.config, now.batch, now.done
        self.policy.model.train()
        while now.epoch < config.inner_iterations:
            if config.shuffle != "off" and now.minibatch == 0:
                seed = f"{config.seed}/shuffle/{now.step}/{now.epoch}"
                batch.shuffle(seed, config.shuffle == "groups")
            while now.minibatch < config.minibatches:
                found = self.gradients(batch, now.minibatch, validate, keep_fixed=len(done) > 0)
                rate = self.optimizer.learning_rate
                norm, *_ = [optimizer.apply() for optimizer in self.optimizers]
                done.add(found, rate, norm)
                now.minibatch += 1
                for optimizer in self.optimizers:
                    optimizer.check()
                self.at_rest()
            now.epoch, now.minibatch = now.epoch + 1, 0
            if self.is_too_far(done):
                now.epoch = config.inner_iterations
        for optimizer in self.optimizers:
            optimizer.pass_over(self.updates - len(done))

    def noise(self, batch: StepBatch) -> dict[str, float]:
        """The variance of the policy gradient over the groups, before the first update."""
        self.policy.model.train()
        return gradient_variance(
            self.policy, batch.rollout, batch.advantages, self.loss_config, shared=self.shared,
            group_size=batch.group_size, mask_truncated=batch.mask_truncated,
        )  # fmt: skip

    def is_too_far(self, done: Updates) -> bool:
        """Whether the latest pass saw a policy too far from the old one, or from the reference."""
        limits = {"approx_kl": self.config.max_approx_kl, "kl": self.config.max_ref_kl}
        return any(
            limit is not None and done.last_pass(name) > limit for name, limit in limits.items()
        )

    def gradients(self, batch: StepBatch, k: int, validate: str, keep_fixed: bool) -> LossMetrics:
        """Minibatch k's gradients; out of memory: the same again in smaller micro-batches."""

        def attempt() -> LossMetrics:
            self.add_fixed(batch)
            with distributed.together(in_step=self.policy.is_sharded):
                seen = accumulate(
                    self.policy, batch.minibatches[k], self.loss_config, validate=validate,
                    correct_sampling=self.config.rollout.correct_sampling, critic=self.critic,
                    ref_head=self.reference.head if self.reads_reference else None,
                    totals=batch.totals[k],
                )  # fmt: skip
            return seen.of_all_ranks()

        return self.budget.within(batch, attempt, self.forget_gradients, keep_fixed)

    def add_fixed(self, batch: StepBatch) -> None:
        """What stays while the batch is used, as the weights are now."""
        loss, in_reward = self.loss_config, self.config.kl.into == "reward"
        add_fixed(
            batch, self.policy, temperature=float(loss.temperature),
            keep_old=self.updates > 1 or in_reward,
            reference=self.reference if self.reads_reference else None,
            exact=loss.kl_estimator == EXACT, critic=self.critic,
            reward_kl=RewardKL(self.beta.value, loss.kl_estimator) if in_reward else None,
        )  # fmt: skip

    def summary(self, memory_before: int) -> dict[str, Any]:
        """What the run came to; bytes: a GPU's peak in training, the growth of the process."""
        return {
            "steps": self.config.steps,
            "skipped_steps": self.optimizer.skipped,
            "num_tokens": self.num_tokens,
            "tokens_per_microbatch": self.budget.tokens,
            "largest_microbatch": self.budget.largest,
            "predicted_memory": self.budget.predicted_peak,
            "peak_memory": self.peak_memory or None,
            "process_growth": host_peak() - memory_before,
        }
