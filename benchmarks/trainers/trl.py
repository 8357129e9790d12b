"""Trainers of TRL: a function that builds them, and providers of a GRPO step that use them."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.trainers.step_providers import Padded, StepProblem, adam


def make_trainer(
    cls: Any, model: Any, tokenizer: Any, prompts: list[str], reward: Callable[..., Any],
    device: str, **settings: Any,
) -> Any:  # fmt: skip
    """Build a trainer that does not log, with a copy of the model.

    `cls` is the class of the trainer. `settings` are further arguments of `GRPOConfig`.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from transformers.utils import logging as logging_of_transformers
    from trl import GRPOConfig

    logging_of_transformers.disable_progress_bar()
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), report_to=[], bf16=False, save_strategy="no",
        gradient_checkpointing=False, use_cpu=device == "cpu", **settings,
    )  # fmt: skip
    return cls(
        model=copy.deepcopy(model), reward_funcs=reward, args=arguments, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip


class InTrl(Padded):
    """A trainer of TRL, whose methods compute the old logps and the loss.

    Args:
        model: the model.
        problem: the batch.
        options: options of the benchmark.
        is_fast: use FastGRPOTrainer instead of TRL's GRPOTrainer.
        has_fast_head: replace TRL's LM head by ours, with TRL's padded forward pass. It shows how
            much of the speedup of FastGRPOTrainer comes from the head.
    """

    def __init__(
        self, model: Any, problem: StepProblem, options: Any, *, is_fast: bool = False,
        has_fast_head: bool = False,
    ) -> None:  # fmt: skip
        from trl import GRPOTrainer

        from grpo_fast.data.tokenizer import build_bpe_tokenizer
        from grpo_fast.integrations.trl import FastGRPOTrainer
        from grpo_fast.integrations.trl.head import use_fast_head

        super().__init__(model, problem, options)
        self.trainer = make_trainer(
            FastGRPOTrainer if is_fast else GRPOTrainer, self.model,
            build_bpe_tokenizer(["What is 12 + 30? 42"], 260), ["What is 12 + 30?"],
            lambda **_: [], options.device, per_device_train_batch_size=len(self.ids),
            num_generations=problem.group_size, max_completion_length=self.length,
            loss_type=problem.loss.loss_type, epsilon=problem.loss.epsilon_low,
            epsilon_high=problem.loss.epsilon_high,
        )  # fmt: skip
        self.trainer.current_gradient_accumulation_steps = 1
        self.model = self.trainer.model.to(options.device).train()
        self.optimizer = adam(self.model)
        if has_fast_head:
            use_fast_head(self.trainer)

    def logps_of(self, rows: slice) -> Tensor:
        batch = self.ids[rows], self.mask[rows], self.length
        return self.trainer._get_per_token_logps_and_entropies(self.model, *batch)[0]

    def metrics(self, rows: slice, old: Tensor, mask: Tensor) -> dict[str, Tensor]:
        batch = {
            "prompt_ids": self.ids[rows, : self.prompt],
            "prompt_mask": self.mask[rows, : self.prompt],
            "completion_ids": self.ids[rows, self.prompt :], "completion_mask": mask.long(),
            "advantages": self.problem.samples.advantages[rows].to(old.device),
            "old_per_token_logps": old, "num_items_in_batch": torch.tensor(self.items),
        }  # fmt: skip
        loss = self.trainer._compute_loss(self.model, batch)
        self.trainer._metrics["train"].clear()
        return {"loss": loss}
