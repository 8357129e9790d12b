"""A run: the objects that a checkpoint stores, and the update of the weights by a step."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_fast import LossConfig
from grpo_fast.kernels.cpu.gemm import shared_copies
from grpo_fast.rollout import Samples
from grpo_fast.train import ranks
from grpo_fast.train.batch import StepBatch, TokenBudget
from grpo_fast.train.collect import Collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.critic import Critic, value_metrics
from grpo_fast.train.metrics import Clock, LossMetrics, SamplerWatch, sampling_metrics
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import KLWeight, Reference
from grpo_fast.train.optimizer import Optimizer
from grpo_fast.train.plan import predict_model
from grpo_fast.train.update import accumulate, gradient_variance, precompute

log = logging.getLogger(__name__)

# Number of steps at the start of a run in which the loss checks all its inputs. In later steps, the
# loss makes only the checks that need no GPU sync.
FULLY_VALIDATED_STEPS = 2


@dataclass
class Rows:
    """The metrics and completions of a finished step that have not been logged yet."""

    metrics: dict[str, float]
    completions: list[dict[str, Any]]


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


class Run:
    """A run: policy, reference, critic, optimizers, position in the data, and counters.

    Args:
        config: configuration of the run.
        policy: the policy to train.
        reference: the reference model of the KL divergence.
        critic: PPO's value function, or None.
        collector: the source of samples. It holds the position in the training set.
    """

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        reference: Reference,
        critic: Critic | None,
        collector: Collector,
    ) -> None:
        self.config = config
        self.policy = policy
        self.reference = reference
        self.critic = critic
        self.collector = collector
        self.step = 0  # finished steps
        self.before: dict[str, float] | None = None  # metrics of the first evaluation
        self.after: dict[str, float] | None = None  # metrics of the latest evaluation
        self.unlogged: Rows | None = None  # rows of a step that was finished and not yet logged
        self.watch = SamplerWatch(config.rollout)
        self.initial_loss = config.loss_config()
        self.reads_reference = config.reference.kind != "none"
        self.beta = KLWeight(config.loss.beta, config.kl)
        self.updates_per_step = config.inner_iterations * config.minibatches  # upper limit
        total = config.steps * self.updates_per_step
        # Shard before building the optimizers. Sharding replaces the parameters, and the optimizers
        # would otherwise refer to the old ones.
        if config.is_sharded:
            models = (policy, reference.copy, critic)
            ranks.shard_all(models, policy.device, config.distributed_replicas)
        self.optimizer = Optimizer(policy.trainable(), config.optim, total)
        self.optimizers = {"policy": self.optimizer}
        if critic is not None:
            rate = critic.config.lr or config.optim.lr
            optim = config.optim.model_copy(update={"lr": rate})
            self.optimizers["critic"] = Optimizer(critic.parameters(), optim, total)
        self.budget = TokenBudget(
            policy.device, predict_model(policy.lm, config), config.tokens_per_microbatch,
            is_sharded=config.is_sharded,
        )  # fmt: skip
        if policy.unshared is not None:
            log.warning(
                "completions are computed alone, without shared prompts: %s", policy.unshared
            )
        self.num_tokens = self.peak_memory = 0

    # ------------------------------------------------------------------------------- One step
    @property
    def loss_config(self) -> LossConfig:
        """Configuration of the loss, with the current weight of the KL divergence."""
        loss = self.initial_loss
        return loss.replace(beta=self.beta.value) if loss.uses_reference else loss

    def pack(self, number: int, clock: Clock, samples: Samples, metrics: dict[str, float]) -> Step:
        """Pack samples into micro-batches.

        Args:
            number: number of the step, counted from 1.
            clock: clock that measures the time of each part of the step.
            samples: samples with advantages.
            metrics: metrics of the samples.
        """
        config = self.config
        batch = StepBatch(
            samples, config.rollout.group_size, self.budget.tokens, self.policy.device,
            updates=config.minibatches, shared=self.policy.unshared is None,
            mask_truncated=config.rollout.mask_truncated, rank=ranks.rank(), ranks=ranks.size(),
        )  # fmt: skip
        return Step(number, clock, batch, metrics)

    def minibatches(self, step: Step) -> Iterator[int]:
        """Yield the index of the minibatch for each optimizer step of a training step.

        The run makes `inner_iterations` passes over the batch. If the mean KL of a pass exceeds
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
        reference = self.reference if self.reads_reference else None
        while True:
            self.budget.largest = max(self.budget.largest, batch.largest)
            try:
                # 1. In the first update of a step, compute the columns that all its updates use.
                precompute(
                    batch, self.policy, self.loss_config, keep_old=self.updates_per_step > 1,
                    reference=reference, critic=self.critic, guarded=self.budget.guarded,
                    reward_beta=self.beta.value if self.config.kl.into == "reward" else None,
                )  # fmt: skip
                # 2. Compute the gradients: hidden states, fused loss, backward pass.
                with self.budget.guarded(), shared_copies():
                    own = accumulate(
                        self.policy, batch.minibatches[minibatch], self.loss_config,
                        validate="full" if step.number <= FULLY_VALIDATED_STEPS else "auto",
                        correct_sampling=self.config.rollout.correct_sampling,
                        critic=self.critic, totals=batch.totals[minibatch],
                        ref_head=None if reference is None else reference.head,
                    )  # fmt: skip
                break
            except MemoryError as error:
                failure = str(error)
            self.forget_gradients()
            self.budget.lower(batch, failure)
            # After the first update, keep the columns of `precompute`. They depend on old weights
            # and cannot be computed again.
            batch.has_fixed = batch.has_fixed and len(step.updates) > 0
            batch.budget = self.budget.tokens
            batch.pack()
        # 3. Clip the gradients and step. Read the rate before `step` advances the schedule.
        losses = own.of_all_ranks()
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
        self.has_moved = True  # even if all updates were skipped, the reference may change
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

    # ------------------------------------------------------------------------ State of the run
    @property
    def has_moved(self) -> bool:
        """True if weights may have changed since the state of the run was recorded."""
        return any(optimizer.has_moved for optimizer in self.optimizers.values())

    @has_moved.setter
    def has_moved(self, value: bool) -> None:
        for optimizer in self.optimizers.values():
            optimizer.has_moved = value

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights and moments that a checkpoint stores, keyed by name, without copies.

        The reference is included only if a resumed run cannot load or build it again.
        """
        reference = self.reference.copy if self.config.stores_reference else None
        models: dict[str, Policy | Critic | None] = {
            "policy": self.policy, "reference": reference, "critic": self.critic,
        }  # fmt: skip
        tensors: dict[str, Tensor] = {}
        for name, model in models.items():
            weights = {} if model is None else model.weights()
            tensors |= {f"{name}.{part}": tensor for part, tensor in weights.items()}
        names = {weight: f"optimizer.{name}" for name, weight in tensors.items()}
        for optimizer in self.optimizers.values():
            tensors |= optimizer.moments(names)
        return tensors

    def draws(self) -> dict[str, Tensor]:
        """Return torch's random state, and the samples that were drawn for the next step."""
        draws = {"random.cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            draws["random.cuda"] = torch.cuda.get_rng_state()
        ahead = self.collector.sampled
        if ahead is not None:
            draws |= {f"ahead.{name}": column for name, column in ahead.tensors().items()}
        return draws

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for a checkpoint, as plain data."""
        return {
            "step": self.step,
            "before": self.before,
            "after": self.after,
            "unlogged": self.unlogged,
            "num_tokens": self.num_tokens,
            "beta": self.beta.value,
            "tokens_per_microbatch": self.budget.tokens,
            "optimizers": {who: x.state_dict() for who, x in self.optimizers.items()},
            **self.collector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], draws: Mapping[str, Tensor]) -> None:
        """Restore the counters, the samples of the next step, and the random state.

        Args:
            state: result of `state_dict()`.
            draws: result of `draws()`.

        Raises:
            ValueError: the samples do not belong to the next prompts.
        """
        for name in ("step", "before", "after", "unlogged", "num_tokens"):
            setattr(self, name, state[name])
        self.beta.value = state["beta"]
        self.budget.tokens = state["tokens_per_microbatch"]
        for who, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][who])
        self.collector.load_state_dict(state)
        columns = {
            name.removeprefix("ahead."): column
            for name, column in draws.items() if name.startswith("ahead.")
        }  # fmt: skip
        if columns:
            self.collector.take_ahead(Samples.of_tensors(columns))
        torch.set_rng_state(draws["random.cpu"])
        if "random.cuda" in draws and torch.cuda.is_available():
            torch.cuda.set_rng_state(draws["random.cuda"])

    def summary(self) -> dict[str, Any]:
        """Return totals of the run. Memory is in bytes."""
        predicted = self.budget.memory
        return {
            "before": self.before,
            "after": self.after,
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
