"""A LightningModule that trains a causal LM with GRPO.

    config = LossConfig(loss_type="grpo")
    module = GRPOModule(model, config, group_size=8, inner_iterations=2, rollout=rollout)
    lightning.Trainer(max_steps=100).fit(module, prompts)  # it counts updates: 50 batches here

Under DDP a step is that of one process with the rows of all ranks. Only `token_mean_local` and
`top_entropy_quantile` look at the rank's own tokens. A group is on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from grpo_fast import LossConfig, group_advantages
from grpo_fast.errors import conflict, require
from grpo_fast.integrations.causal_lm import (
    check_config,
    check_head,
    metrics_of_ranks,
    policy_logps,
    policy_loss,
)

Batch = dict[str, Tensor]


class GRPOModule(LightningModule):
    """GRPO with Lightning's manual optimization.

    Args:
        model: a transformers causal LM.
        config: the loss; with `beta != 0` it needs `reference`.
        group_size: G; the completions of a batch lie group by group.
        inner_iterations: μ, the updates on one batch of completions.
        rollout: a batch of the data loader → input_ids, attention_mask, labels (B, L), rewards
            (B,); labels are -100 where no completion token stands. None: the data loader gives
            them.
        reference: the frozen model of the KL term.
        advantages: a mode of `group_advantages`.
        learning_rate, max_grad_norm: of AdamW, and of the clipping of the gradient (0: none).
    """

    def __init__(
        self,
        model: nn.Module,
        config: LossConfig,
        *,
        group_size: int,
        inner_iterations: int = 1,
        rollout: Callable[[Any], Batch] | None = None,
        reference: nn.Module | None = None,
        advantages: str = "normalized",
        learning_rate: float = 1e-6,
        max_grad_norm: float = 1.0,
    ) -> None:
        """Raises ValueError for options that exclude each other, or a head that is not linear."""
        super().__init__()
        check_config(config)
        require(inner_iterations >= 1, "inner_iterations", "a number >= 1", inner_iterations)
        if config.uses_reference != (reference is not None):
            why = "pass a model" if config.uses_reference else "there is no KL; pass None"
            raise conflict(f"reference, {type(reference).__name__},", f"beta={config.beta}", why)
        check_head(model)
        self.automatic_optimization = False
        self.model, self.config, self.rollout, self.mode = model, config, rollout, advantages
        self.group_size, self.inner_iterations = group_size, inner_iterations
        self.learning_rate, self.max_grad_norm = learning_rate, max_grad_norm
        self.reference = None if reference is None else reference.requires_grad_(False).eval()

    def on_fit_start(self) -> None:
        """Refuse what the step cannot honour: a sharded head, and gradients scaled for fp16."""
        strategy, precision = type(self.trainer.strategy).__name__, str(self.trainer.precision)
        is_sharded = any(name in strategy for name in ("FSDP", "DeepSpeed", "ModelParallel"))
        expected = "one that keeps the head whole (auto, ddp)"
        require(not is_sharded, "strategy", expected, strategy)
        expected = "32-true, bf16-true or bf16-mixed"
        require(not precision.startswith("16"), "precision", expected, precision)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.learning_rate, weight_decay=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """μ updates on one batch; logs the means of their metrics, returns the last loss."""
        if self.rollout is not None:
            with torch.no_grad():
                batch = self.rollout(batch)
        count, expected = batch["rewards"].shape[0], f"groups of {self.group_size}"
        require(count % self.group_size == 0, "rewards", expected, f"{count} rewards")
        rewards, ours = self._of_all_ranks(batch["rewards"].float())
        advantages = group_advantages(rewards, self.mode, group_size=self.group_size)[ours]
        ref_logps = None
        if self.reference is not None:
            ref_logps = policy_logps(self.reference, batch, self.config.temperature)
        optimizer, totals, old_logps, seen = self.optimizers(), self._totals(batch), None, []
        for _ in range(self.inner_iterations):
            output = policy_loss(
                self.model, batch, advantages, self.config, old_logps=old_logps,
                ref_logps=ref_logps, **totals,
            )  # fmt: skip
            optimizer.zero_grad()
            self.manual_backward(output.loss)
            trained = [p for p in self.model.parameters() if p.grad is not None]
            norm = nn.utils.clip_grad_norm_(trained, self.max_grad_norm or float("inf"))
            optimizer.step()
            old_logps = output.logps if old_logps is None else old_logps
            seen.append({"loss": output.loss.detach(), "grad_norm": norm, **output.metrics})
        metrics = {name: torch.stack([update[name] for update in seen]).mean() for name in seen[0]}
        if self.trainer.world_size > 1:
            metrics = metrics_of_ranks(metrics, self.all_gather)
        groups = rewards.view(-1, self.group_size)
        deviation = groups.std(1, correction=int(self.group_size > 1)).mean()
        self.log_dict(metrics | {"reward": rewards.mean(), "reward_std": deviation})
        return output.loss.detach()

    def _of_all_ranks(self, x: Tensor) -> tuple[Tensor, slice]:
        """(n,) numbers of every rank, one after the other, and where this rank's stand."""
        if self.trainer.world_size == 1:
            return x, slice(None)
        counts = self.all_gather(torch.tensor(x.shape[0], device=x.device)).tolist()
        # `all_gather` takes one shape from all ranks.
        padded = nn.functional.pad(x, (0, max(counts) - x.shape[0]))
        parts = [part[:count] for part, count in zip(self.all_gather(padded), counts, strict=True)]
        start = sum(counts[: self.trainer.global_rank])
        return torch.cat(parts), slice(start, start + x.shape[0])

    def _totals(self, batch: Batch) -> dict[str, Any]:
        """Totals that the loss divides by where ranks share a step (DDP averages losses)."""
        ranks = self.trainer.world_size
        if ranks == 1:
            return {}
        lengths, _ = self._of_all_ranks((batch["labels"][:, 1:] != -100).sum(1))
        tokens = lengths.sum().clamp(min=1)
        completions = lengths.shape[0] / ranks
        return {"num_items_in_batch": tokens / ranks, "num_completions_in_batch": completions}
