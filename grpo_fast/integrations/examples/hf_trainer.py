"""GRPO in transformers' `Trainer`, by its `compute_loss`: rows as for SFT, an advantage each."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from grpo_fast import LossConfig
from grpo_fast.errors import require
from grpo_fast.integrations.causal_lm import check_head, metrics_of_ranks, policy_loss


class PolicyTrainer(Trainer):
    """`Trainer` on rows of input_ids, attention_mask, labels (L,), advantages () and, where given,
    old_logps and ref_logps (L-1,).

    The loss divides by the tokens of the whole step as `Trainer` counts them: `aggregation` is
    "token_mean_global". `args.remove_unused_columns` must be False.
    """

    def __init__(self, *args: Any, loss_config: LossConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        by = loss_config.aggregation
        require(by == "token_mean_global", "aggregation", "'token_mean_global'", repr(by))
        keeps, came = not self.args.remove_unused_columns, "True (it would remove the advantages)"
        require(keeps, "remove_unused_columns", "False", came)
        check_head(self.model)
        self.loss_config = loss_config
        # The loss is normalised for the whole step: Trainer divides no more.
        self.model_accepts_loss_kwargs = True
        self.seen: dict[str, list[Tensor]] = defaultdict(list)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        output = policy_loss(
            model, inputs, inputs["advantages"].float(), self.loss_config,
            old_logps=inputs.get("old_logps"), ref_logps=inputs.get("ref_logps"),
            num_items_in_batch=num_items_in_batch,
        )  # fmt: skip
        for name, value in output.metrics.items():
            self.seen[name].append(value)
        # num_items_in_batch then counts the tokens of all ranks, and their gradients are averaged.
        summed = num_items_in_batch is not None and self.args.average_tokens_across_devices
        loss = output.loss * self.accelerator.num_processes if summed else output.loss
        return (loss, {"loss": loss, "logps": output.logps}) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        means = {name: torch.stack(values).mean() for name, values in self.seen.items()}
        self.seen.clear()
        if means and self.accelerator.num_processes > 1:
            means = metrics_of_ranks(means, lambda values: self.accelerator.gather(values[None]))
        super().log({**{n: float(x) for n, x in means.items()}, **logs}, *args, **kwargs)
