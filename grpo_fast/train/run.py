"""A run: the objects that a checkpoint stores, and the update of the weights by a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from grpo_fast.kernels.cpu.gemm import shared_copies
from grpo_fast.rollout import Samples
from grpo_fast.train import ranks
from grpo_fast.train.batch import StepBatch, explained_memory
from grpo_fast.train.collect import Collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.critic import Critic, value_metrics
from grpo_fast.train.metrics import Clock, LossMetrics, sampling_metrics
from grpo_fast.train.plan import token_budget
from grpo_fast.train.policy import Policy, Reference
from grpo_fast.train.update import Optimizer, accumulate, precompute

log = logging.getLogger(__name__)

# Number of steps at the start of a run in which the loss checks all its inputs. In later steps, the
# loss makes only the checks that need no GPU sync.
FULLY_VALIDATED_STEPS = 2
# A run warns if the log-probs of sampler and trainer differ by more than this limit, in nats per
# token. For comparison, rounding in 16-bit kernels causes a difference of about a tenth of the
# limit. A sampler with weights that are a few updates old differs by about ten times the limit.
MOST_DIFFERENCE = 0.05
COUNTERS = ("step", "before", "after", "unlogged", "num_tokens")  # attributes in a checkpoint


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
        self.unlogged: dict[str, float] | None = None  # metrics of a finished step before its log
        self.loss_config = config.loss_config()
        self.updates_per_step = config.inner_iterations * config.minibatches  # upper limit
        total = config.steps * self.updates_per_step
        # Shard before building the optimizers. Sharding replaces the parameters, and the optimizers
        # would otherwise refer to the old ones.
        if config.is_sharded:
            models = (policy, reference.copy, critic)
            ranks.shard_all(models, policy.device, config.distributed_replicas)
        self.optimizers = {"policy": Optimizer(policy.trainable(), config.optim, total)}
        if critic is not None:
            rate = critic.config.lr or config.optim.lr
            optim = config.optim.model_copy(update={"lr": rate})
            self.optimizers["critic"] = Optimizer(critic.parameters(), optim, total)
        self.budget = config.tokens_per_microbatch or token_budget(policy.lm, config)
        self.has_warned = False
        self.num_tokens = 0
        if policy.unshared is not None:
            log.warning(
                "completions are computed alone, without shared prompts: %s", policy.unshared
            )

    # ------------------------------------------------------------------------------- One step
    def pack(self, samples: Samples) -> StepBatch:
        """Pack the samples of a step, which have advantages, into micro-batches."""
        config = self.config
        return StepBatch(
            samples, self.budget, self.policy.device,
            updates=config.minibatches, shared=self.policy.unshared is None,
            mask_truncated=config.rollout.mask_truncated, rank=ranks.rank(), ranks=ranks.size(),
        )  # fmt: skip

    def train(self, number: int, batch: StepBatch, clock: Clock) -> dict[str, float]:
        """Make all updates of a step, which are `inner_iterations` passes over its samples.

        If the mean KL of a pass exceeds `max_approx_kl`, no further pass is made.

        Args:
            number: number of the step, counted from 1.
            batch: the packed samples of the step.
            clock: clock that measures the time of each part of the step.

        Returns:
            The metrics of the updates.
        """
        config = self.config
        self.policy.model.train()
        updates: list[LossMetrics] = []
        for epoch in range(config.inner_iterations):
            if epoch and config.max_approx_kl is not None:
                latest = LossMetrics.merged(updates[-config.minibatches :])
                if latest.result()["approx_kl"] > config.max_approx_kl:
                    break
            if config.shuffle != "off":
                batch.shuffle(f"{config.seed}/shuffle/{number}/{epoch}")
            for minibatch in range(config.minibatches):
                with explained_memory(batch):
                    updates.append(self._update(number, batch, minibatch))
        clock.lap("train", int(batch.trunk_tokens * len(updates) / config.minibatches))
        return self._finish(number, batch, updates, clock)

    def _update(self, number: int, batch: StepBatch, minibatch: int) -> LossMetrics:
        """Run one optimizer step on a minibatch, and return its metrics."""
        config = self.config
        reference = None if config.reference.kind == "none" else self.reference
        # 1. In the first update of a step, compute the columns that all its updates use.
        precompute(
            batch, self.policy, self.loss_config, keep_old=self.updates_per_step > 1,
            reference=reference, critic=self.critic,
            reward_beta=config.loss.beta if config.kl_in_reward else None,
        )  # fmt: skip
        # 2. Compute the gradients: hidden states, fused loss, backward pass.
        with shared_copies():
            own = accumulate(
                self.policy, batch.minibatches[minibatch], self.loss_config,
                validate="full" if number <= FULLY_VALIDATED_STEPS else "auto",
                correct_sampling=config.rollout.correct_sampling,
                critic=self.critic, totals=batch.totals[minibatch],
                ref_head=None if reference is None else reference.head,
            )  # fmt: skip
        # 3. Clip the gradients and step. Read the rate before `step` advances the schedule.
        losses = own.of_all_ranks()
        losses.learning_rate = self.optimizers["policy"].learning_rate
        norms = [optimizer.step() for optimizer in self.optimizers.values()]
        losses.grad_norm = norms[0]
        return losses

    def _finish(
        self, number: int, batch: StepBatch, updates: list[LossMetrics], clock: Clock
    ) -> dict[str, float]:
        """Finish a step after its updates, and return their metrics.

        The learning rate schedules advance by the full number of updates, even if the KL limit
        ended the step early.
        """
        # 1. Advance the schedules, update a synced reference, and count tokens.
        for optimizer in self.optimizers.values():
            optimizer.steps += self.updates_per_step - len(updates)
            optimizer.has_moved = True  # even if all updates were skipped, the reference may change
        self.reference.after_step(number)
        self.num_tokens += batch.trunk_tokens
        # 2. Compute the metrics. Compare the sampler with the log-probs of the first pass.
        self._compare_sampler(number, sampling_metrics(updates[0].logps))
        first = LossMetrics.merged(updates[: self.config.minibatches])
        metrics = {
            **sampling_metrics(first.logps),
            **LossMetrics.merged(updates).result(),
            "grad_norm": sum(update.grad_norm for update in updates) / len(updates),
            "learning_rate": updates[-1].learning_rate,
            "num_tokens": float(self.num_tokens),
            "skipped_steps": float(self.optimizers["policy"].skipped),
            **clock.metrics(),
        }
        if self.critic is not None:
            metrics |= value_metrics(batch)
        return metrics

    def _compare_sampler(self, number: int, metrics: dict[str, float]) -> None:
        """Warn once if the log-probs of sampler and trainer differ before the first update."""
        apart = metrics.get("sampling/sampling_logp_difference/mean", 0.0)
        if apart > MOST_DIFFERENCE and not self.has_warned:
            self.has_warned = True
            log.warning(
                "step %d: the sampler's and the trainer's logps are %.2g nats apart per token "
                "(expected ≤ %g). Possible causes: old weights, another dtype, temperature or "
                "prompt, or tokens that top_k or top_p excluded. rollout.correct_sampling=true "
                "weights the loss by the ratio", number, apart, MOST_DIFFERENCE,
            )  # fmt: skip

    def forget_gradients(self) -> None:
        """Clear all gradients, which frees their memory."""
        for optimizer in self.optimizers.values():
            optimizer.adam.zero_grad()

    # ------------------------------------------------------------------------ State of the run
    @property
    def has_moved(self) -> bool:
        """True if weights may have changed since the state of the run was recorded."""
        return any(optimizer.has_moved for optimizer in self.optimizers.values())

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

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for a checkpoint, as plain data."""
        return {
            **{name: getattr(self, name) for name in COUNTERS},
            "optimizers": {who: x.state_dict() for who, x in self.optimizers.items()},
            **self.collector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict()`."""
        for name in COUNTERS:
            setattr(self, name, state[name])
        for who, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][who])
        self.collector.load_state_dict(state)

    def summary(self) -> dict[str, Any]:
        """Return totals of the run."""
        return {
            "before": self.before,
            "after": self.after,
            "steps": self.config.steps,
            "skipped_steps": self.optimizers["policy"].skipped,
            "num_tokens": self.num_tokens,
            "tokens_per_microbatch": self.budget,
        }
