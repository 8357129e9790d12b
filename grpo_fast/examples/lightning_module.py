"""LightningModule that trains a causal LM with GRPO.

    config = LossConfig(loss_type="grpo")
    module = GRPOModule(model, config, group_size=8, inner_iterations=2, rollout=rollout)
    # max_steps counts optimizer updates: 100 updates are 50 batches with inner_iterations=2.
    lightning.Trainer(max_steps=100).fit(module, prompts)

Under DDP, the loss is divided by the tokens or completions of all ranks. All completions of a
prompt must be on the same rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn

from grpo_fast import LossConfig, group_advantages
from grpo_fast.errors import require
from grpo_fast.integrations.causal_lm import check_head, policy_logps, policy_loss

Batch = dict[str, Tensor]


class GRPOModule(LightningModule):
    """LightningModule that trains a causal LM with GRPO, with manual optimization.

    Args:
        model: A transformers causal LM.
        config: Settings of the loss. If its beta is not 0, pass `reference`.
        group_size: Number of completions of each prompt, which must be adjacent in a batch.
        inner_iterations: Number of updates on one batch of completions.
        rollout: Function that turns a batch of the data loader into a dictionary with input_ids,
            attention_mask and labels of shape (B, L), and rewards of shape (B,). Labels are -100
            outside completions. None: the data loader already returns such dictionaries.
        reference: Reference model of the KL term. Its parameters are frozen.
        learning_rate: Learning rate of AdamW.
        max_grad_norm: Maximum norm of the gradient. A larger gradient is scaled down.

    Raises:
        ValueError: The LM head is not linear, beta is not 0 and `reference` is None, or beta is 0
            and `reference` is given.
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
        learning_rate: float = 1e-6,
        max_grad_norm: float = 1.0,
    ) -> None:
        super().__init__()
        expected = f"{'a model' if config.uses_reference else None} with beta = {config.beta}"
        fits = config.uses_reference == (reference is not None)
        require(fits, "reference", expected, type(reference).__name__)
        check_head(model)
        self.automatic_optimization = False
        self.model = model
        self.config = config
        self.group_size = group_size
        self.inner_iterations = inner_iterations
        self.rollout = rollout
        self.reference = None if reference is None else reference.requires_grad_(False).eval()
        self.learning_rate = learning_rate
        self.max_grad_norm = max_grad_norm

    def on_fit_start(self) -> None:
        """Raise a ValueError for strategies that shard the LM head, and for fp16 precision.

        With fp16, Lightning scales the loss, so clipping would compare a scaled gradient norm with
        `max_grad_norm`.
        """
        strategy = type(self.trainer.strategy).__name__
        is_sharded = any(name in strategy for name in ("FSDP", "DeepSpeed", "ModelParallel"))
        require(not is_sharded, "strategy", "one that does not shard the head (ddp)", strategy)
        precision = str(self.trainer.precision)
        expected = "32-true, bf16-true or bf16-mixed"
        require(not precision.startswith("16"), "precision", expected, precision)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an AdamW optimizer for the trainable parameters."""
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trainable, lr=self.learning_rate, weight_decay=0.0)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Make `inner_iterations` updates on one batch, and log the mean metrics."""
        # 1. Sample completions. Compute advantages and reference log-probabilities.
        if self.rollout is not None:
            with torch.no_grad():
                batch = self.rollout(batch)
        advantages = group_advantages(batch["rewards"].float(), group_size=self.group_size)
        ref_logps = None
        if self.reference is not None:
            ref_logps = policy_logps(self.reference, batch, self.config.temperature)
        # 2. Compute the numbers of tokens and completions by which the loss is divided. They are
        # means over the ranks, not sums, because DDP averages the gradients over the ranks.
        scored = batch["labels"][:, 1:] != -100
        counts = torch.stack([scored.sum(), scored.new_tensor(len(scored), dtype=torch.int64)])
        tokens, completions = self.all_gather(counts).view(-1, 2).float().mean(0)
        # 3. Update the model. The log-probabilities of the first update are the old
        # log-probabilities of the later updates.
        optimizer = self.optimizers()
        old_logps = None
        seen = []
        for _ in range(self.inner_iterations):
            output = policy_loss(
                self.model, batch, advantages, self.config, old_logps=old_logps,
                ref_logps=ref_logps, num_items_in_batch=tokens.clamp(min=1),
                num_completions_in_batch=completions,
            )  # fmt: skip
            optimizer.zero_grad()
            self.manual_backward(output.loss)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            optimizer.step()
            if old_logps is None:
                old_logps = output.logps
            seen.append({**output.metrics, "loss": output.loss.detach(), "grad_norm": norm})
        # 4. Log metrics, averaged over updates and ranks.
        metrics = {name: torch.stack([update[name] for update in seen]).mean() for name in seen[0]}
        self.log_dict({**metrics, "reward": batch["rewards"].float().mean()}, sync_dist=True)
