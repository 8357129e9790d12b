"""The trainer of GRPO and PPO. It updates the weights with the samples of a step."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from grpo_fast import LossConfig
from grpo_fast.kernels.cpu.autocast import shared_copies
from grpo_fast.train.collect.collector import Collected
from grpo_fast.train.config import RunConfig
from grpo_fast.train.metrics.clock import Clock
from grpo_fast.train.metrics.losses import LossMetrics
from grpo_fast.train.metrics.samples import SamplerWatch, sampling_metrics
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import KLWeight, Reference
from grpo_fast.train.planning.memory_model import predict_model
from grpo_fast.train.ranks import distributed, sharding
from grpo_fast.train.update.batch import StepBatch
from grpo_fast.train.update.budget import TokenBudget
from grpo_fast.train.update.critic import Critic, value_metrics
from grpo_fast.train.update.gradients import accumulate, gradient_variance
from grpo_fast.train.update.optimizer import Optimizer
from grpo_fast.train.update.precompute import precompute

log = logging.getLogger(__name__)

# Number of steps at the start of a run in which the loss checks all its inputs. In later steps, the
# loss makes only the checks that need no GPU sync.
FULLY_VALIDATED_STEPS = 2


@dataclass
class Update:
    """Losses, gradient norm and learning rate of one optimizer update."""

    losses: LossMetrics
    norm: float
    rate: float


@dataclass
class Step:
    """Samples, metrics and updates of one training step."""

    number: int
    clock: Clock
    batch: StepBatch
    metrics: dict[str, float]  # metrics of the samples
    updates: list[Update] = field(default_factory=list)


class Trainer:
    """Trainer of a policy, with its reference model, an optional critic and the KL weight β.

    Args:
        config: configuration of the run.
        policy: the policy to train.
        reference: the reference model of the KL divergence.
        critic: PPO's value function, or None.
    """

    def __init__(
        self, config: RunConfig, policy: Policy, reference: Reference, critic: Critic | None = None
    ) -> None:
        self.config = config
        self.policy = policy
        self.reference = reference
        self.critic = critic
        self.watch = SamplerWatch(config.rollout)
        self.initial_loss = config.loss_config()
        self.reads_reference = config.reference.kind != "none"
        self.beta = KLWeight(config.loss.beta, config.kl)
        self.updates_per_step = config.inner_iterations * config.minibatches  # upper limit
        total = config.steps * self.updates_per_step
        # Shard before building the optimizers. Sharding replaces the parameters, and the optimizers
        # would otherwise refer to the old ones.
        if config.is_sharded:
            models = (policy, self.reference.copy, critic)
            sharding.shard_all(models, policy.device, config.distributed_replicas)
        self.optimizer = Optimizer(policy.trainable(), config.optim, total)
        self.optimizers = {"policy": self.optimizer}
        if critic is not None:
            rate = critic.config.lr or config.optim.lr
            optim = config.optim.model_copy(update={"lr": rate})
            self.optimizers["critic"] = Optimizer(critic.parameters(), optim, total)
        self.budget = TokenBudget(
            policy.device, predict_model(policy.lm, config), config.tokens_per_microbatch,
            in_step=config.is_sharded and distributed.size() > 1,
        )  # fmt: skip
        if policy.unshared is not None:
            log.warning(
                "completions are computed alone, without shared prompts: %s", policy.unshared
            )
        self.num_tokens = self.peak_memory = 0

    @property
    def loss_config(self) -> LossConfig:
        """Configuration of the loss, with the current weight of the KL divergence."""
        loss = self.initial_loss
        return loss.replace(beta=self.beta.value) if loss.uses_reference else loss

    def pack(self, number: int, clock: Clock, collected: Collected) -> Step:
        """Pack collected samples into micro-batches.

        Args:
            number: number of the step, counted from 1.
            clock: clock that measures the time of each part of the step.
            collected: samples and metrics of the collector.
        """
        samples, metrics = collected
        config = self.config
        batch = StepBatch(
            samples, config.rollout.group_size, self.budget.tokens, self.policy.device,
            updates=config.minibatches, shared=self.policy.unshared is None,
            mask_truncated=config.rollout.mask_truncated, rank=distributed.rank(),
            ranks=distributed.size(),
        )  # fmt: skip
        return Step(number, clock, batch, metrics)

    def minibatches(self, step: Step) -> Iterator[int]:
        """Yield the index of the minibatch for each optimizer step of a training step.

        The trainer makes `inner_iterations` passes over the batch. If the mean KL of a pass exceeds
        `max_approx_kl`, no further pass is made.
        """
        config = self.config
        batch = step.batch
        self.policy.model.train()
        if config.log.grad_variance:
            step.metrics |= gradient_variance(self.policy, batch, self.loss_config)
        limit = config.max_approx_kl
        for epoch in range(config.inner_iterations):
            if epoch and limit is not None:
                latest = merge_losses(step.updates[-config.minibatches :], config.minibatches)
                if latest.result()["approx_kl"] > limit:
                    return
            if config.shuffle != "off":
                seed = f"{config.seed}/shuffle/{step.number}/{epoch}"
                batch.shuffle(seed, config.shuffle == "groups")
            yield from range(config.minibatches)

    def update(self, step: Step, minibatch: int) -> None:
        """Run one optimizer step on a minibatch.

        If memory runs out, repeat the forward and backward passes with smaller micro-batches.
        """
        batch = step.batch
        while True:
            self.budget.largest = max(self.budget.largest, batch.largest)
            try:
                # 1. In the first update of a step, compute the columns that all its updates use.
                precompute(
                    batch, self.policy, self.loss_config, keep_old=self.updates_per_step > 1,
                    reference=self.reference if self.reads_reference else None,
                    critic=self.critic,
                    reward_beta=self.beta.value if self.config.kl.into == "reward" else None,
                )  # fmt: skip
                # 2. Compute the gradients: hidden states, fused loss, backward pass.
                with distributed.together(in_step=self.policy.is_sharded), shared_copies():
                    own = accumulate(
                        self.policy, batch.minibatches[minibatch], self.loss_config,
                        validate="full" if step.number <= FULLY_VALIDATED_STEPS else "auto",
                        correct_sampling=self.config.rollout.correct_sampling,
                        critic=self.critic, totals=batch.totals[minibatch],
                        ref_head=self.reference.head if self.reads_reference else None,
                    )  # fmt: skip
                losses = own.of_all_ranks()
                break
            except (RuntimeError, MemoryError) as error:
                failure = self.budget.refuse(error)
            self.forget_gradients()
            self.budget.lower(batch, failure)
            # After the first update, keep the columns of `precompute`. They depend on old weights
            # and cannot be computed again.
            batch.has_fixed = batch.has_fixed and len(step.updates) > 0
            batch.budget = self.budget.tokens
            batch.pack()
        # 3. Clip the gradients and step. Read the rate before `step` advances the schedule.
        rate = self.optimizer.learning_rate
        norms = [optimizer.step() for optimizer in self.optimizers.values()]
        step.updates.append(Update(losses, norms[0], rate))

    def finish(self, step: Step) -> dict[str, float]:
        """Finish a step after its updates. Return the metrics of the step.

        The learning rate schedules advance by the full number of updates, even if the KL limit
        ended the step early.
        """
        batch = step.batch
        clock = step.clock
        updates = step.updates
        # 1. Advance the schedules, update a synced reference, and count tokens and memory.
        for optimizer in self.optimizers.values():
            optimizer.steps += self.updates_per_step - len(updates)
            optimizer.has_moved = True  # even if all updates were skipped, the reference may change
        self.reference.after_step(step.number)
        self.num_tokens += batch.trunk_tokens
        self.peak_memory = max(self.peak_memory, clock.peaks.get("train", 0))
        # 2. Compute the metrics.
        passes = len(updates) / self.config.minibatches
        clock.tokens["train"] = int(batch.trunk_tokens * passes)
        seen = merge_losses(updates, self.config.minibatches)
        self.watch.look(step.number, updates[0].losses.logps)
        grad_norm = sum(update.norm for update in updates) / len(updates)
        metrics = {
            **step.metrics,
            **sampling_metrics(seen.logps),
            **seen.result(),
            "grad_norm": grad_norm,
            "learning_rate": updates[-1].rate,
            "num_tokens": float(self.num_tokens),
            "skipped_steps": float(self.optimizer.skipped),
            **clock.metrics(),
        }
        loss = self.loss_config
        adds_values = self.critic is not None and self.critic.is_shared
        if not (loss.uses_reference or loss.entropy_coef or adds_values):
            metrics["policy_grad_norm"] = grad_norm  # the loss has only the policy term
        if self.beta.value:
            metrics["beta"] = self.beta.value
        if self.critic is not None:
            metrics |= value_metrics(batch)
        # 3. Adapt β, the weight of the KL divergence, to the KL of this step.
        self.beta.after_step(metrics.get("kl", math.nan), completions=len(batch.samples))
        return metrics

    def forget_gradients(self) -> None:
        """Clear all gradients, which frees their memory."""
        for optimizer in self.optimizers.values():
            optimizer.adam.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that a checkpoint stores, keyed by name. The tensors are not copied.

        The reference is included only if a resumed run cannot load or build it again.
        """
        reference = self.reference.copy if self.config.stores_reference else None
        models: dict[str, Policy | Critic | None] = {
            "policy": self.policy, "reference": reference, "critic": self.critic,
        }  # fmt: skip
        return {
            f"{name}.{part}": tensor
            for name, model in models.items()
            if model is not None
            for part, tensor in model.weights().items()
        }

    def moments(
        self, weights: dict[str, Tensor], stored: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Return the moments of the optimizers, keyed by name. The tensors are not copied.

        Args:
            weights: result of `weights()`.
            stored: names of the tensors in a checkpoint. If they are given, all moments are
                replaced with zero tensors of these names, into which the checkpoint can be loaded.
        """
        names = {weight: f"optimizer.{name}" for name, weight in weights.items()}
        moments: dict[str, Tensor] = {}
        for optimizer in self.optimizers.values():
            if stored is not None:
                optimizer.make_moments(stored, names)
            moments |= optimizer.moments(names)
        return moments

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for a checkpoint. Weights and moments are not included."""
        return {
            "num_tokens": self.num_tokens,
            "beta": self.beta.value,
            "tokens_per_microbatch": self.budget.tokens,
            "optimizers": {who: x.state_dict() for who, x in self.optimizers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_tokens = state["num_tokens"]
        self.beta.value = state["beta"]
        self.budget.tokens = state["tokens_per_microbatch"]
        for who, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][who])

    def summary(self) -> dict[str, Any]:
        """Return totals of the run. Memory is in bytes."""
        predicted = self.budget.memory
        return {
            "steps": self.config.steps,
            "skipped_steps": self.optimizer.skipped,
            "num_tokens": self.num_tokens,
            "tokens_per_microbatch": self.budget.tokens,
            "largest_microbatch": self.budget.largest,
            "predicted_memory": predicted and predicted.peak(self.budget.largest),
            "peak_memory": self.peak_memory or None,
        }


def merge_losses(updates: Sequence[Update], per_pass: int) -> LossMetrics:
    """Merge the losses of several updates of one step.

    Args:
        updates: the updates of the step.
        per_pass: updates per pass over the batch. The result contains only the log-probs of the
            first pass.
    """
    seen = LossMetrics(optimizer_steps=len(updates))
    for index, each in enumerate(updates):
        seen.parts += each.losses.parts
        if index < per_pass:
            seen.logps += each.losses.logps
    return seen
