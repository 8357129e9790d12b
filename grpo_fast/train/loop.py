"""GRPO and PPO: prompts → completions → rewards → advantages → packed batch → updates → metrics.

They differ by where the advantages come from: the rewards of a group, or a critic.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_fast.data import Example, load_examples
from grpo_fast.data.tokenizer import token_counter
from grpo_fast.kernels import route
from grpo_fast.objective.kl import EXACT
from grpo_fast.rewards import RewardSet, build_rewards, check_examples, scorer_for
from grpo_fast.rollout import NonFiniteLogits, check_prompts
from grpo_fast.train.accumulate import accumulate
from grpo_fast.train.baseline import running_baseline
from grpo_fast.train.batch import StepBatch
from grpo_fast.train.collect import Collected, collect
from grpo_fast.train.config import RunConfig
from grpo_fast.train.critic import Critic, load_critic, value_metrics
from grpo_fast.train.evaluate import EvalResult, build_evaluation
from grpo_fast.train.fixed import RewardKL, add_fixed
from grpo_fast.train.folder import check_folder
from grpo_fast.train.kl_weight import KLWeight
from grpo_fast.train.loading import build_tokenizer, load_policy
from grpo_fast.train.metrics import (
    Clock,
    LossMetrics,
    Work,
    finite,
    is_policy_alone,
    sampling_metrics,
)
from grpo_fast.train.optimizer import Optimizer
from grpo_fast.train.planning.budget import TokenBudget, host_peak
from grpo_fast.train.policy import Policy
from grpo_fast.train.prompts import PromptQueue, log_prompts
from grpo_fast.train.reference import Reference, check_reference
from grpo_fast.train.report import RunReport, kernels_line, memory_line
from grpo_fast.train.samples import rows_of
from grpo_fast.train.trackers import check_trackers
from grpo_fast.train.updates import Updates
from grpo_fast.train.warm_start import warm_start

log = logging.getLogger(__name__)

FULLY_VALIDATED_STEPS = 2  # the loss checks every value in these; later only what costs no sync
LOSS_IS_ZERO = (
    "one update per batch: the loss stays near 0 while its gradient does not; watch reward and "
    "grad_norm"
)


def train(config: RunConfig) -> dict[str, Any]:
    """Run a recipe; returns the summary that also lies in `output_dir/summary.json`.

    The same configuration on the same machine gives the same metrics bit for bit, timings apart.

    Raises:
        ValueError: a configuration, data or a model that cannot be used.
        NonFiniteLogits, NonFiniteGradient, RewardError: the run cannot go on.
    """
    started, memory_before = time.perf_counter(), host_peak()
    torch.manual_seed(config.seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    check_folder(config.output_dir)
    check_trackers(config.log.trackers)
    rewards = build_rewards(config.rewards, max_failures=config.max_reward_failures)
    plain = config.data.model_copy(update={"shots_tokens": None})
    questions = load_examples(plain, split="train", seed=config.seed)
    # Of examples that are made when asked for, all alike, the first is checked.
    known = questions if isinstance(questions, list) else questions[:1]
    check_examples(rewards, known, "training")
    policy = load_policy(config.model, build_tokenizer(config, questions))
    check_reference(config.reference, config.model, policy.tokenizer)
    counted = token_counter(policy.tokenizer)
    examples = load_examples(config.data, split="train", seed=config.seed, count_tokens=counted)
    listed = examples if isinstance(examples, list) else examples[:1]
    check_prompts(policy, [example.prompt for example in listed], config.rollout.max_new_tokens)
    evaluate = build_evaluation(config, policy, rewards)
    kernels = {
        "backend": route.head_route("auto", policy.head.weight).backend,
        "backend_fallback": route.fallback_reason(policy.device.type),
    }
    with RunReport(config.output_dir, config) as report:
        report.note(kernels_line(kernels))
        if config.warm_start is not None:
            warm_start(policy, questions, config.warm_start, seed=config.seed, log=report.log)
        trainer = Trainer(config, policy, rewards, load_critic(config, policy))
        try:
            report.log(0, before := evaluate().metrics)
            after = run_steps(trainer, examples, evaluate, report) or before
        except NonFiniteLogits as error:
            when = f"at step {trainer.steps}" if trainer.steps else "before the first step"
            advice = "a lower optim.lr or a wider model.dtype may help"
            raise NonFiniteLogits(f"{error} {when}; {advice}") from None
        if config.log.save_model:
            policy.save(f"{config.output_dir}/model")
            if trainer.critic is not None:
                trainer.critic.save(f"{config.output_dir}/critic")
        summary = {"before": before, "after": after, **kernels, **trainer.summary(memory_before)}
        summary["seconds"] = time.perf_counter() - started
        report.finish(summary)
        report.note(memory_line(summary))
    return summary


def run_steps(
    trainer: Trainer,
    examples: Sequence[Example],
    evaluate: Callable[[], EvalResult],
    report: RunReport,
) -> dict[str, float] | None:
    """All steps, evaluated and reported along the way; returns the last evaluation's metrics."""
    config, after = trainer.config, None
    if trainer.updates == 1 and is_policy_alone(trainer.loss_config) and trainer.critic is None:
        report.note(LOSS_IS_ZERO)
    queue = PromptQueue(examples)
    for step in range(1, config.steps + 1):
        metrics, collected = trainer.step(step, queue)
        log_prompts(report.folder, collected.prompts)
        if step == config.steps or (config.eval.every and step % config.eval.every == 0):
            metrics |= (after := evaluate().metrics)
        for row in trainer.update_rows:
            report.log(step, row)
        report.log(step, finite(metrics))
        every = config.log.completions_every
        if every and (step in (1, config.steps) or step % every == 0):
            report.completions(step, trainer.rows(collected))
    return after


class Trainer:
    """What lives from step to step: the policy, its reference, a critic, their optimizers, β."""

    def __init__(
        self, config: RunConfig, policy: Policy, rewards: RewardSet, critic: Critic | None = None
    ) -> None:
        self.config, self.policy, self.rewards, self.critic = config, policy, rewards, critic
        self.loss_config = config.loss_config()
        self.reference = Reference(policy, config.reference, config.model)
        self.baseline = running_baseline(config.advantages, config.advantage_options)
        self.reads_reference = config.reference.kind != "none"
        self.beta = KLWeight(config.loss.beta, config.kl)  # type: ignore[attr-defined]
        self.work = Work(policy.lm)
        self.updates = config.inner_iterations * config.minibatches  # per batch, at most
        total = config.steps * self.updates
        self.optimizer = Optimizer(policy.trainable(), config.optim, total)
        self.optimizers = [self.optimizer]
        if critic is not None:
            self.optimizers.append(critic.optimizer(config.optim, total))
        self.update_rows: list[dict[str, float]] = []  # of the latest step, where they are wanted
        self.budget = TokenBudget(policy.lm, config)
        self.shared = config.shared_prompt and policy.unshared is None
        if config.shared_prompt and policy.unshared is not None:
            log.warning("every completion gets its own copy of the prompt: %s", policy.unshared)
        self.steps = self.num_tokens = self.peak_memory = 0

    def step(self, step: int, queue: PromptQueue) -> tuple[dict[str, float], Collected]:
        """A batch of completions and the updates it is good for: metrics, and the completions."""
        self.steps = step
        config, clock, group_size = self.config, Clock(), self.config.rollout.group_size
        collected = collect(self.policy, queue, self.rewards, config, step, clock, self.baseline)
        rollout = collected.rollout
        batch = StepBatch(
            rollout, collected.advantages, group_size=group_size, minibatches=config.minibatches,
            budget=self.budget.tokens, device=self.policy.device, shared=self.shared,
            mask_truncated=config.rollout.mask_truncated,
        )  # fmt: skip
        done = self.update(batch, step, "full" if step <= FULLY_VALIDATED_STEPS else "auto")
        self.reference.after_step(step)
        clock.lap("train")

        self.num_tokens += batch.trunk_tokens
        self.peak_memory = max(self.peak_memory, clock.peaks.get("train", 0))
        generated, seen = sum(rollout.lengths), done.merged()
        metrics = {
            **collected.metrics,
            **sampling_metrics(seen.logps),
            **self.learning_metrics(done, seen, batch),
            "num_tokens": float(self.num_tokens),
            "skipped_steps": float(self.optimizer.skipped),
            **clock.metrics(collected.generated, int(batch.trunk_tokens * done.passes)),
            **self.work.metrics(
                batch.trunk_tokens, generated, updates=done.passes, seconds=clock.seconds["train"],
                forwards=self.reads_reference + (self.updates > 1 or self.critic is not None),
            ),
        }  # fmt: skip
        self.adapt_beta(metrics.get("kl", math.nan), len(rollout.lengths))
        return metrics, collected._replace(advantages=batch.used_advantages())

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

    def update(self, batch: StepBatch, step: int, validate: str) -> Updates:
        """μ passes over the batch, one optimizer step per minibatch.

        After an early stop the schedule goes on as if all updates had been made.
        """
        config, first = self.config, (step - 1) * self.updates + 1
        done = Updates(config.minibatches, first)
        self.policy.model.train()
        for epoch in range(config.inner_iterations):
            if config.shuffle != "off":
                batch.shuffle(f"{config.seed}/shuffle/{step}/{epoch}", config.shuffle == "groups")
            for k in range(config.minibatches):
                found = self.gradients(batch, k, validate, keep_fixed=len(done) > 0)
                rate = self.optimizer.learning_rate
                norm, *_ = [optimizer.step() for optimizer in self.optimizers]
                done.add(found, rate, norm)
            if self.is_too_far(done):
                break
        for optimizer in self.optimizers:
            optimizer.pass_over(self.updates - len(done))
        self.update_rows = done.rows() if config.log.every_update else []
        return done

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
            return accumulate(
                self.policy, batch.minibatches[k], self.loss_config, validate=validate,
                correct_sampling=self.config.rollout.correct_sampling, critic=self.critic,
                ref_head=self.reference.head if self.reads_reference else None,
            )  # fmt: skip

        def undo() -> None:
            for optimizer in self.optimizers:
                optimizer.zero_grad()

        return self.budget.within(batch, attempt, undo, keep_fixed)

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
