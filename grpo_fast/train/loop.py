"""GRPO, top to bottom: prompts → completions → rewards → advantages → packed batch → μ updates → metrics."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from torch import Tensor

from grpo_fast import LossConfig, group_advantages, linear_grpo_loss
from grpo_fast.data import Example, load_examples
from grpo_fast.rewards import RewardSet, build_rewards
from grpo_fast.rollout import Rollout, generate
from grpo_fast.train.batch import MicroBatch, split
from grpo_fast.train.config import RunConfig
from grpo_fast.train.metrics import LossMetrics, completion_metrics, finite, reward_metrics, sampling_metrics
from grpo_fast.train.optimizer import Optimizer
from grpo_fast.train.policy import Policy
from grpo_fast.train.reference import Reference
from grpo_fast.train.report import RunReport
from grpo_fast.train.setup import build_evaluation, build_policy, prompts_of
from grpo_fast.train.warm_start import warm_start

log = logging.getLogger(__name__)

FULLY_VALIDATED_STEPS = 2  # the loss checks every value on the device in these; later only what costs no sync


def train(config: RunConfig) -> dict[str, Any]:
    """Run a recipe; returns the summary that also lies in `output_dir/summary.json`.

    The same configuration on the same machine gives the same metrics bit for bit, timings apart.
    """
    torch.manual_seed(config.seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    train_set = load_examples(config.data, split="train", seed=config.seed)
    rewards = build_rewards(config.rewards)
    policy = build_policy(config.model, config.data, train_set)
    evaluate = build_evaluation(config, policy, rewards)
    started = time.perf_counter()
    with RunReport(config.output_dir, config) as report:
        if config.warm_start is not None:
            warm_start(policy, train_set, config.warm_start, seed=config.seed, log=report.log)
        trainer = Trainer(config, policy, rewards)
        before = after = evaluate().metrics
        report.log(0, before)
        for step in range(1, config.steps + 1):
            examples = prompts_of(train_set, step, config.rollout.prompts_per_step)
            metrics, rows = trainer.step(step, examples)
            if step == config.steps or (config.eval.every and step % config.eval.every == 0):
                after = evaluate().metrics
                metrics |= after
            report.log(step, finite(metrics))
            if config.log.completions_every and (step == 1 or step % config.log.completions_every == 0):
                report.completions(step, rows)
        if config.log.save_model:
            policy.save(f"{config.output_dir}/model")
        summary = {
            "before": before,
            "after": after,
            "steps": config.steps,
            "skipped_steps": trainer.optimizer.skipped,
            "num_tokens": trainer.num_tokens,
            "seconds": time.perf_counter() - started,
        }
        report.finish(summary)
    return summary


class Trainer:
    """What lives from step to step: the policy, its reference and its optimizer."""

    def __init__(self, config: RunConfig, policy: Policy, rewards: RewardSet) -> None:
        self.config, self.policy, self.rewards = config, policy, rewards
        self.loss_config = config.loss_config()
        self.reference = Reference(policy, config.reference)
        updates = config.steps * config.inner_iterations * config.minibatches
        self.optimizer = Optimizer(policy.trainable(), config.optim, updates)
        self.num_tokens = 0

    def step(self, step: int, examples: list[Example]) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """One batch of completions and the updates it is good for; returns the metrics and readable completions."""
        config, policy, group_size, clock = self.config, self.policy, self.config.rollout.group_size, Clock()
        rollout = generate(policy, [e.prompt for e in examples], config.rollout, seed=(config.seed, step))
        clock.lap("rollout")

        repeated = [e for e in examples for _ in range(group_size)]
        scores = self.rewards([e.prompt for e in repeated], rollout.texts, [e.answer for e in repeated])
        advantages = advantages_of(scores.total, rollout, config)
        clock.lap("reward")

        minibatches = pack(rollout, advantages, config, policy.device)
        batches = [batch for minibatch in minibatches for batch in minibatch]
        self.add_fixed_logps(batches, reused=config.inner_iterations * len(minibatches) > 1)
        losses, norms, logps = self.update(minibatches, validate="full" if step <= FULLY_VALIDATED_STEPS else "auto")
        self.reference.after_step(step)
        clock.lap("train")

        tokens = sum(batch.layout.total for batch in batches)
        self.num_tokens += tokens
        metrics = {
            **reward_metrics(scores.total, scores.per_fn, group_size),
            **completion_metrics(rollout),
            **sampling_metrics(logps, torch.cat([b.sampling_logps[b.completion_mask] for b in batches])),
            **losses.result(),
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": self.optimizer.learning_rate,
            "num_tokens": float(self.num_tokens),
            "skipped_steps": float(self.optimizer.skipped),
            **clock.metrics(generated=sum(rollout.lengths), trained=tokens * len(norms) // len(minibatches)),
        }
        return metrics, readable(rollout, scores.total, advantages, repeated, config.log.completions)

    @torch.no_grad()
    def add_fixed_logps(self, batches: list[MicroBatch], reused: bool) -> None:
        """Log-probabilities that stay fixed while the batch is used: the reference's, and the policy's as it is now.

        Used for one update only, the batch needs no old logps: they are the new ones, and the ratio is exactly 1.
        """
        for batch in batches:
            if self.loss_config.uses_reference:
                batch.ref_logps = self.reference.logps(batch, self.config.rollout.temperature)
            if reused:
                batch.old_logps = self.policy.logps(batch, self.config.rollout.temperature)

    def update(self, minibatches: list[list[MicroBatch]], validate: str) -> tuple[LossMetrics, list[float], Tensor]:
        """μ passes over the batch, one optimizer step per minibatch.

        Returns the loss's metrics, the gradient norms, and the logps of the active tokens as first seen.
        """
        losses, norms, logps = LossMetrics(), [], []
        self.policy.model.train()
        for iteration in range(self.config.inner_iterations):
            for minibatch in minibatches:
                seen = accumulate(
                    self.policy, minibatch, self.loss_config, losses, self.config.rollout.correct_sampling, validate
                )
                norms.append(self.optimizer.step())
                logps += seen if iteration == 0 else []
            if self.config.max_approx_kl is not None and losses.last("approx_kl") > self.config.max_approx_kl:
                break
        return losses, norms, torch.cat(logps)


def advantages_of(rewards: Tensor, rollout: Rollout, config: RunConfig) -> Tensor:
    """(N·G,) advantages; `opo` weighs its baseline by the completions' lengths."""
    options = dict(config.advantage_options)
    if config.advantages == "opo":
        options["lengths"] = torch.tensor(rollout.lengths)
    return group_advantages(rewards, config.advantages, group_size=config.rollout.group_size, **options)


def pack(rollout: Rollout, advantages: Tensor, config: RunConfig, device: torch.device) -> list[list[MicroBatch]]:
    """The completions as minibatches (one optimizer step each) of micro-batches (one forward and backward each)."""
    size = len(rollout.completion_ids) // config.minibatches
    minibatches = []
    for first in range(0, len(rollout.completion_ids), size):
        costs = [len(rollout.prompt_ids[i]) + len(rollout.completion_ids[i]) - 1 for i in range(first, first + size)]
        minibatches.append([
            MicroBatch.pack(rollout, advantages, [first + i for i in piece], device, config.rollout.mask_truncated)
            for piece in split(costs, config.accumulation, config.micro_batch_tokens)
        ])  # fmt: skip
    return minibatches


def accumulate(
    policy: Policy,
    minibatch: list[MicroBatch],
    config: LossConfig,
    losses: LossMetrics,
    correct_sampling: bool,
    validate: str,
) -> list[Tensor]:
    """Gradients of one optimizer step: the normalisers are the whole step's, so the micro-batches simply add up.

    Returns the log-probabilities of the active tokens, micro-batch by micro-batch.
    """
    items = max(1, sum(batch.active_tokens for batch in minibatch))
    completions = sum(len(batch) for batch in minibatch)
    # token_mean_local is local by definition: its micro-batches are averaged.
    share = 1 / len(minibatch) if config.aggregation == "token_mean_local" else 1.0
    logps = []
    for batch in minibatch:
        hidden, head = policy.hidden(batch.input_ids, batch.layout, batch.predicting), policy.head
        output = linear_grpo_loss(
            hidden, head.weight, batch.target_ids, batch.advantages,
            config.replace(softcap=head.softcap, logit_scale=head.logit_scale), bias=head.bias,
            completion_mask=batch.completion_mask, cu_seqlens=batch.cu_seqlens, old_logps=batch.old_logps,
            ref_logps=batch.ref_logps, sampling_logps=batch.sampling_logps if correct_sampling else None,
            num_items_in_batch=items, num_completions_in_batch=completions, validate=validate,
        )  # fmt: skip
        (output.loss * share).backward()
        losses.add({"loss": output.loss, **output.metrics}, batch.active_tokens, share)
        logps.append(output.logps[batch.completion_mask])
    losses.optimizer_steps += 1
    return logps


def readable(rollout: Rollout, rewards: Tensor, advantages: Tensor, examples: list, count: int) -> list[dict[str, Any]]:
    """The first completions of a step, for people to read."""
    return [
        {"prompt": rollout.prompts[i], "completion": rollout.texts[i], "answer": examples[i].answer,
         "reward": float(rewards[i]), "advantage": float(advantages[i]), "truncated": rollout.truncated[i]}
        for i in range(min(count, len(rollout.texts)))
    ]  # fmt: skip


class Clock:
    """Seconds spent in the parts of a step."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.parts: dict[str, float] = {}

    def lap(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.parts[name], self.last = now - self.last, now

    def metrics(self, generated: int, trained: int) -> dict[str, float]:
        peak = {"perf/peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30} if torch.cuda.is_available() else {}
        return {
            "step_time": self.last - self.start,
            "perf/rollout_tok_s": generated / self.parts["rollout"],
            "perf/train_tok_s": trained / self.parts["train"],
            **{f"perf/{name}_time": seconds for name, seconds in self.parts.items()},
            **peak,
        }
