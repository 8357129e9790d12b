"""GRPO with transformers' `Trainer`, on a data set whose rows contain precomputed advantages."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from transformers import Trainer

from grpo_fast import LossConfig
from grpo_fast.errors import require
from grpo_fast.integrations.causal_lm import check_head, policy_loss


class PolicyTrainer(Trainer):
    """transformers' `Trainer` with the GRPO loss.

    A row of the data set has input_ids, attention_mask and labels of shape (L,), and advantages of
    shape (). It may also have old_logps and ref_logps of shape (L-1,). The loss is divided by the
    number of labels in all accumulation steps and on all ranks.

    Args:
        *args: Positional arguments of `Trainer`.
        loss_config: Settings of the loss. The aggregation must be "token_mean_global".
        **kwargs: Keyword arguments of `Trainer`. `args.remove_unused_columns` must be False,
            because `Trainer` would remove the advantages.

    Raises:
        ValueError: The aggregation is not "token_mean_global", `args.remove_unused_columns` is
            True, or the LM head is not linear.
    """

    def __init__(self, *args: object, loss_config: LossConfig, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        by = loss_config.aggregation
        require(by == "token_mean_global", "aggregation", "'token_mean_global'", repr(by))
        came = "True (it would remove the advantages)"
        require(not self.args.remove_unused_columns, "remove_unused_columns", "False", came)
        check_head(self.model)
        self.loss_config = loss_config
        # With True, Trainer passes num_items_in_batch to `compute_loss`, and does not divide the
        # loss by the number of accumulation steps.
        self.model_accepts_loss_kwargs = True
        self.seen: dict[str, list[Tensor]] = defaultdict(list)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one micro-batch, divided by the number of tokens in the step."""
        output = policy_loss(
            model, inputs, inputs["advantages"].float(), self.loss_config,
            old_logps=inputs.get("old_logps"), ref_logps=inputs.get("ref_logps"),
            num_items_in_batch=num_items_in_batch,
        )  # fmt: skip
        for name, value in output.metrics.items():
            self.seen[name].append(value)
        loss = output.loss
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            # The loss is divided by the tokens of all ranks, so the gradients of the ranks must be
            # summed. DDP averages gradients. Multiply the loss by the number of ranks to get a sum.
            loss = loss * self.accelerator.num_processes
        return (loss, {"loss": loss, "logps": output.logps}) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: object, **kwargs: object) -> None:
        """Log the loss metrics, each averaged over this rank's micro-batches since the last log."""
        means = {name: float(torch.stack(values).mean()) for name, values in self.seen.items()}
        self.seen.clear()
        super().log({**means, **logs}, *args, **kwargs)
