"""GRPO, top to bottom: prompts → completions → rewards → advantages → packed batch → μ updates → metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_fast import group_advantages
from grpo_fast.data import Example
from grpo_fast.kernels import route
from grpo_fast.rewards import RewardSet, build_rewards
from grpo_fast.rollout import NonFiniteLogits, Rollout, generate
from grpo_fast.train.batch import StepBatch
from grpo_fast.train.budget import TokenBudget, host_peak
from grpo_fast.train.clock import Clock
from grpo_fast.train.config import RunConfig
from grpo_fast.train.evaluate import EvalResult
from grpo_fast.train.folders import check_folder
from grpo_fast.train.metrics import LossMetrics, Work, completion_metrics, finite, reward_metrics, sampling_metrics
from grpo_fast.train.optimizer import Optimizer
from grpo_fast.train.policy import Policy
from grpo_fast.train.reference import Reference
from grpo_fast.train.report import RunReport, kernels_line, memory_line
from grpo_fast.train.setup import (
    build_evaluation,
    build_policy,
    check_prompts,
    examples_for,
    plain_examples,
    prompts_of,
)
from grpo_fast.train.update import Seen, accumulate, is_policy_alone
from grpo_fast.train.warm_start import warm_start

log = logging.getLogger(__name__)

FULLY_VALIDATED_STEPS = 2  # the loss checks every value on the device in these; later only what costs no sync
LOSS_IS_ZERO = "one update per batch: the loss stays near 0 while its gradient does not; watch reward and grad_norm"


def train(config: RunConfig) -> dict[str, Any]:
    """Run a recipe; returns the summary that also lies in `output_dir/summary.json`.

    The same configuration on the same machine gives the same metrics bit for bit, timings apart.
    """
    started, memory_before = time.perf_counter(), host_peak()
    torch.manual_seed(config.seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    check_folder(config.output_dir)
    rewards = build_rewards(config.rewards)
    questions = plain_examples(config)
    policy = build_policy(config, questions)
    train_set = examples_for(config, policy, "train")
    check_prompts(policy, train_set)
    evaluate = build_evaluation(config, policy, rewards)
    kernels = kernels_of(policy.device)
    with RunReport(config.output_dir, config) as report:
        report.note(kernels_line(kernels))
        if config.warm_start is not None:
            warm_start(policy, questions, config.warm_start, seed=config.seed, log=report.log)
        trainer = Trainer(config, policy, rewards)
        with _diverging("before the first step"):
            before = evaluate().metrics
        report.log(0, before)
        after = run_steps(trainer, train_set, evaluate, report) or before
        if config.log.save_model:
            policy.save(f"{config.output_dir}/model")
        summary = {"before": before, "after": after, **kernels, **trainer.summary(memory_before)}
        summary["seconds"] = time.perf_counter() - started
        report.finish(summary)
        report.note(memory_line(summary))
    return summary


def run_steps(
    trainer: Trainer, train_set: Sequence[Example], evaluate: Callable[[], EvalResult], report: RunReport
) -> dict[str, float] | None:
    """All steps of a run, evaluated and reported along the way; returns the last evaluation's metrics."""
    config, after = trainer.config, None
    if config.inner_iterations * config.minibatches == 1 and is_policy_alone(trainer.loss_config):
        report.note(LOSS_IS_ZERO)
    for step in range(1, config.steps + 1):
        examples = prompts_of(train_set, step, config.rollout.prompts_per_step)
        with _diverging(f"at step {step}"):
            metrics, rows = trainer.step(step, examples)
            if step == config.steps or (config.eval.every and step % config.eval.every == 0):
                after = evaluate().metrics
                metrics |= after
        report.log(step, finite(metrics))
        if config.log.completions_every and (step == 1 or step % config.log.completions_every == 0):
            report.completions(step, rows)
    return after


@contextmanager
def _diverging(when: str) -> Iterator[None]:
    """Says when the policy's logits stopped being numbers."""
    try:
        yield
    except NonFiniteLogits as error:
        advice = "a lower optim.lr or a wider model.dtype may help"
        raise NonFiniteLogits(f"{error} {when}; {advice}") from None


class Trainer:
    """What lives from step to step: the policy, its reference, its optimizer and the token budget."""

    def __init__(self, config: RunConfig, policy: Policy, rewards: RewardSet) -> None:
        self.config, self.policy, self.rewards = config, policy, rewards
        self.loss_config = config.loss_config()
        self.reference = Reference(policy, config.reference)
        self.work = Work(policy.lm)
        self.updates = config.inner_iterations * config.minibatches  # optimizer steps per batch, at most
        self.optimizer = Optimizer(policy.trainable(), config.optim, config.steps * self.updates)
        self.budget = TokenBudget(policy.lm, config)
        self.shared = config.shared_prompt and policy.unshared is None
        if config.shared_prompt and policy.unshared is not None:
            log.warning("every completion gets its own copy of the prompt: %s", policy.unshared)
        self.num_tokens = self.peak_memory = 0

    def step(self, step: int, examples: list[Example]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """One batch of completions and the updates it is good for; returns the metrics and readable completions."""
        config, clock = self.config, Clock()
        rollout = generate(self.policy, [e.prompt for e in examples], config.rollout, seed=(config.seed, step))
        clock.lap("rollout")

        repeated = [e for e in examples for _ in range(config.rollout.group_size)]
        scores = self.rewards([e.prompt for e in repeated], rollout.texts, [e.answer for e in repeated])
        advantages = advantages_of(scores.total, rollout, config)
        clock.lap("reward")

        batch = self.pack(rollout, advantages)
        seen, norms = self.update(batch, validate="full" if step <= FULLY_VALIDATED_STEPS else "auto")
        self.reference.after_step(step)
        clock.lap("train")

        self.num_tokens += batch.trunk_tokens
        self.peak_memory = max(self.peak_memory, clock.peaks.get("train", 0))
        grad_norm = sum(norms) / len(norms)
        metrics = {
            **reward_metrics(scores, config.rollout.group_size),
            **completion_metrics(rollout),
            **sampling_metrics(torch.cat(seen.logps), torch.cat(seen.sampling_logps)),
            **seen.losses.result(),
            "grad_norm": grad_norm,
            **({"policy_grad_norm": grad_norm} if is_policy_alone(self.loss_config) else {}),
            "learning_rate": self.optimizer.learning_rate,
            "num_tokens": float(self.num_tokens),
            "skipped_steps": float(self.optimizer.skipped),
            **clock.metrics(sum(rollout.lengths), batch.trunk_tokens * len(norms) // config.minibatches),
            **self.work.metrics(self.flops(batch, rollout, len(norms)), clock.seconds["train"]),
        }
        return metrics, readable(rollout, scores.total, advantages, repeated, config.log.completions)

    def flops(self, batch: StepBatch, rollout: Rollout, updates: int) -> float:
        """Of the matrix products of one step: its updates, and the passes for the reference's and the old logps."""
        tokens, rows = batch.trunk_tokens, sum(rollout.lengths)
        fixed = int(self.loss_config.uses_reference) + int(self.updates > 1)
        passes = updates / self.config.minibatches
        return fixed * self.work.forward(tokens, rows) + passes * self.work.update(tokens, rows)

    def pack(self, rollout: Rollout, advantages: Tensor) -> StepBatch:
        """The completions as minibatches (one optimizer step each) of micro-batches (one forward and backward each)."""
        return StepBatch(
            rollout, advantages, group_size=self.config.rollout.group_size, minibatches=self.config.minibatches,
            budget=self.budget.tokens, device=self.policy.device, shared=self.shared,
            mask_truncated=self.config.rollout.mask_truncated,
        )  # fmt: skip

    @torch.no_grad()
    def add_fixed_logps(self, batch: StepBatch) -> None:
        """Log-probabilities that stay fixed while the batch is used: the reference's, and the policy's as it is now.

        Used for one update only, the batch needs no old logps: they are the new ones, and the ratio is exactly 1.
        """
        if batch.has_fixed_logps:
            return
        temperature = float(self.loss_config.temperature)
        for micro in batch.micro_batches:
            if self.loss_config.uses_reference:
                micro.ref_logps = self.reference.logps(micro.packed, temperature)
            if self.updates > 1:
                micro.old_logps = self.policy.logps(micro.packed, temperature)
        batch.has_fixed_logps = True

    def update(self, batch: StepBatch, validate: str) -> tuple[Seen, list[float]]:
        """μ passes over the batch, one optimizer step per minibatch.

        Returns all losses' metrics with the first pass's logps, and the gradient norms.
        """
        all_seen = Seen(LossMetrics(), [], [])
        norms: list[float] = []
        self.policy.model.train()
        for iteration in range(self.config.inner_iterations):
            for k in range(self.config.minibatches):
                seen = self.gradients(batch, k, validate, keep_logps=bool(norms))
                norms.append(self.optimizer.step())
                all_seen.losses.extend(seen.losses)
                if iteration == 0:
                    all_seen.logps.extend(seen.logps)
                    all_seen.sampling_logps.extend(seen.sampling_logps)
            limit = self.config.max_approx_kl
            if limit is not None and all_seen.losses.last("approx_kl") > limit:
                break
        return all_seen, norms

    def gradients(self, batch: StepBatch, k: int, validate: str, keep_logps: bool) -> Seen:
        """The gradients of minibatch k; where they do not fit into memory, of the same in smaller micro-batches."""

        def attempt() -> Seen:
            self.add_fixed_logps(batch)
            return accumulate(
                self.policy, batch.minibatches[k], self.loss_config,
                correct_sampling=self.config.rollout.correct_sampling, validate=validate,
            )  # fmt: skip

        return self.budget.within(batch, attempt, self.optimizer.zero_grad, keep_logps)

    def summary(self, memory_before: int) -> dict[str, Any]:
        """What the run came to, memory in bytes: a GPU's peak in training, and the growth of the whole process."""
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


def kernels_of(device: torch.device) -> dict[str, str | None]:
    """The backend that the loss runs on, and why it is not the one made for this device."""
    return {
        "backend": "torch" if route.fallback_reason(device.type) else route.PREFERRED.get(device.type, "torch"),
        "backend_fallback": route.fallback_reason(device.type),
    }


def advantages_of(rewards: Tensor, rollout: Rollout, config: RunConfig) -> Tensor:
    """(N·G,) advantages; `opo` weighs its baseline by the completions' lengths."""
    options = dict(config.advantage_options)
    if config.advantages == "opo":
        options["lengths"] = torch.tensor(rollout.lengths)
    return group_advantages(rewards, config.advantages, group_size=config.rollout.group_size, **options)


def readable(rollout: Rollout, rewards: Tensor, advantages: Tensor, examples: list, count: int) -> list[dict[str, Any]]:
    """The first completions of a step, for people to read."""
    return [
        {"prompt": rollout.prompts[i], "completion": rollout.texts[i], "answer": examples[i].answer,
         "reward": float(rewards[i]), "advantage": float(advantages[i]), "truncated": rollout.truncated[i]}
        for i in range(min(count, len(rollout.texts)))
    ]  # fmt: skip
