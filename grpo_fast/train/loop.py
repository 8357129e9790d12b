"""GRPO: prompts → completions → rewards → advantages → packed batch → μ updates → metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_fast.data import Example, load_examples
from grpo_fast.data.tokenizer import token_counter
from grpo_fast.kernels import route
from grpo_fast.rewards import RewardSet, build_rewards
from grpo_fast.rollout import NonFiniteLogits, check_prompts
from grpo_fast.train.accumulate import accumulate
from grpo_fast.train.baseline import running_baseline
from grpo_fast.train.batch import StepBatch
from grpo_fast.train.collect import collect
from grpo_fast.train.config import RunConfig
from grpo_fast.train.evaluate import EvalResult, build_evaluation
from grpo_fast.train.exact_kl import is_exact
from grpo_fast.train.loading import build_tokenizer, load_policy
from grpo_fast.train.metrics import (
    Clock,
    LossMetrics,
    Work,
    completion_metrics,
    finite,
    is_policy_alone,
    readable,
    reward_metrics,
    sampling_metrics,
)
from grpo_fast.train.optimizer import Optimizer
from grpo_fast.train.planning.budget import TokenBudget, host_peak
from grpo_fast.train.policy import Policy
from grpo_fast.train.reference import Reference, check_reference
from grpo_fast.train.report import RunReport, check_folder, kernels_line, memory_line
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
    rewards = build_rewards(config.rewards)
    plain = config.data.model_copy(update={"shots_tokens": None})
    questions = load_examples(plain, split="train", seed=config.seed)
    policy = load_policy(config.model, build_tokenizer(config, questions))
    check_reference(config.reference, config.model, policy.tokenizer)
    counted = token_counter(policy.tokenizer)
    examples = load_examples(config.data, split="train", seed=config.seed, count_tokens=counted)
    # Of examples that are made when asked for, all alike, the first is checked.
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
        trainer = Trainer(config, policy, rewards)
        try:
            report.log(0, before := evaluate().metrics)
            after = run_steps(trainer, examples, evaluate, report) or before
        except NonFiniteLogits as error:
            when = f"at step {trainer.steps}" if trainer.steps else "before the first step"
            advice = "a lower optim.lr or a wider model.dtype may help"
            raise NonFiniteLogits(f"{error} {when}; {advice}") from None
        if config.log.save_model:
            policy.save(f"{config.output_dir}/model")
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
    if trainer.updates == 1 and is_policy_alone(trainer.loss_config):
        report.note(LOSS_IS_ZERO)
    for step in range(1, config.steps + 1):
        prompts = prompts_of(examples, step, config.rollout.prompts_per_step)
        metrics, completions = trainer.step(step, prompts)
        if step == config.steps or (config.eval.every and step % config.eval.every == 0):
            metrics |= (after := evaluate().metrics)
        report.log(step, finite(metrics))
        every = config.log.completions_every
        if every and (step == 1 or step % every == 0):
            report.completions(step, completions)
    return after


def prompts_of(examples: Sequence[Example], step: int, count: int) -> list[Example]:
    """The prompts of a step (from 1): the training set in its order, round and round."""
    first = (step - 1) * count
    return [examples[i % len(examples)] for i in range(first, first + count)]


class Trainer:
    """What lives from step to step: the policy, its reference, its optimizer, the token budget."""

    def __init__(self, config: RunConfig, policy: Policy, rewards: RewardSet) -> None:
        self.config, self.policy, self.rewards = config, policy, rewards
        self.loss_config = config.loss_config()
        self.reference = Reference(policy, config.reference, config.model)
        self.baseline = running_baseline(config.advantages, config.advantage_options)
        self.work = Work(policy.lm)
        self.updates = config.inner_iterations * config.minibatches  # per batch, at most
        self.optimizer = Optimizer(policy.trainable(), config.optim, config.steps * self.updates)
        self.budget = TokenBudget(policy.lm, config)
        self.shared = config.shared_prompt and policy.unshared is None
        if config.shared_prompt and policy.unshared is not None:
            log.warning("every completion gets its own copy of the prompt: %s", policy.unshared)
        self.steps = self.num_tokens = self.peak_memory = 0

    def step(self, step: int, examples: list[Example]) -> tuple[dict[str, float], list[dict]]:
        """A batch of completions and the updates it is good for: metrics, readable completions."""
        self.steps = step
        config, clock, group_size = self.config, Clock(), self.config.rollout.group_size
        rollout, repeated, scores, advantages = collect(
            self.policy, examples, self.rewards, config, step, clock, self.baseline
        )
        batch = StepBatch(
            rollout, advantages, group_size=group_size, minibatches=config.minibatches,
            budget=self.budget.tokens, device=self.policy.device, shared=self.shared,
            mask_truncated=config.rollout.mask_truncated,
        )  # fmt: skip
        seen, norms = self.update(batch, "full" if step <= FULLY_VALIDATED_STEPS else "auto")
        self.reference.after_step(step)
        clock.lap("train")

        self.num_tokens += batch.trunk_tokens
        self.peak_memory = max(self.peak_memory, clock.peaks.get("train", 0))
        grad_norm, passes = sum(norms) / len(norms), len(norms) / config.minibatches
        generated = sum(rollout.lengths)
        metrics = {
            **reward_metrics(scores, group_size),
            **completion_metrics(rollout),
            **sampling_metrics(seen.logps),
            **seen.result(),
            "grad_norm": grad_norm,
            **({"policy_grad_norm": grad_norm} if is_policy_alone(self.loss_config) else {}),
            "learning_rate": self.optimizer.learning_rate,
            "num_tokens": float(self.num_tokens),
            "skipped_steps": float(self.optimizer.skipped),
            **clock.metrics(generated, batch.trunk_tokens * len(norms) // config.minibatches),
            **self.work.metrics(
                batch.trunk_tokens, generated, updates=passes, seconds=clock.seconds["train"],
                forwards=int(self.loss_config.uses_reference) + int(self.updates > 1),
            ),
        }  # fmt: skip
        answers = [example.answer for example in repeated[: config.log.completions]]
        return metrics, readable(rollout, scores.total, advantages, answers)

    def update(self, batch: StepBatch, validate: str) -> tuple[LossMetrics, list[float]]:
        """μ passes over the batch, one optimizer step per minibatch.

        Returns the metrics of all losses with the first pass's logps, and the gradient norms.
        """
        seen, limit = LossMetrics(), self.config.max_approx_kl
        norms: list[float] = []
        self.policy.model.train()
        for iteration in range(self.config.inner_iterations):
            for k in range(self.config.minibatches):
                found = self.gradients(batch, k, validate, keep_logps=bool(norms))
                norms.append(self.optimizer.step())
                seen.extend(found, with_logps=iteration == 0)
            if limit is not None and seen.last("approx_kl") > limit:
                break
        return seen, norms

    def gradients(self, batch: StepBatch, k: int, validate: str, keep_logps: bool) -> LossMetrics:
        """Minibatch k's gradients; out of memory: the same again in smaller micro-batches."""

        def attempt() -> LossMetrics:
            self.add_fixed_logps(batch)
            return accumulate(
                self.policy, batch.minibatches[k], self.loss_config, validate=validate,
                correct_sampling=self.config.rollout.correct_sampling,
                ref_head=self.reference.head if is_exact(self.loss_config) else None,
            )  # fmt: skip

        return self.budget.within(batch, attempt, self.optimizer.zero_grad, keep_logps)

    @torch.no_grad()
    def add_fixed_logps(self, batch: StepBatch) -> None:
        """Logps that stay while the batch is used: the reference's, and the policy's as it is now.

        Used for one update only, the batch needs no old logps: they are the new ones, and the ratio
        is exactly 1.
        """
        if batch.has_fixed_logps:
            return
        temperature = float(self.loss_config.temperature)
        for micro in batch.micro_batches:
            if is_exact(self.loss_config):
                micro.ref_hidden = self.reference.hidden(micro.packed)
            elif self.loss_config.uses_reference:
                micro.ref_logps = self.reference.logps(micro.packed, temperature)
            if self.updates > 1:
                micro.old_logps = self.policy.logps(micro.packed, temperature)
        batch.has_fixed_logps = True

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
