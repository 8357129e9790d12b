"""`FastGRPOTrainer.keep_groups`: completions of one prompt in one micro-batch, so that they can
share it.

TRL shuffles a generation batch before it cuts it into micro-batches. With gradient accumulation the
completions of a prompt then meet by chance only. Within one optimizer step the order adds nothing:
sums over the step stay the same whichever micro-batch a completion is in, for every normaliser but
those that are local to a micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_fast.integrations.trl_options import NORMALISERS

Batch = dict[str, Any]


def window_of(trainer: Any) -> int:
    """Micro-batches among which completions may change places: those of one optimizer step.

    Raises ValueError, naming the option, where that would change the gradient.
    """
    local = {
        "loss_type='bnpo' divides by the tokens of the micro-batch": NORMALISERS.get(
            trainer.loss_type
        )
        == "tokens",
        "entropy_coef is a mean over the micro-batch": trainer._entropy_bonus_enabled,
        "top_entropy_quantile is of the micro-batch": trainer.top_entropy_quantile < 1,
        "the forward pass is TRL's": not trainer._packs,
    }
    for reason, holds in local.items():
        if holds:
            raise ValueError(f"keep_groups: {reason}")
    steps, accumulation = (
        trainer.args.steps_per_generation,
        trainer.args.gradient_accumulation_steps,
    )
    if max(steps, accumulation) % min(steps, accumulation):
        raise ValueError(
            f"keep_groups: expected steps_per_generation ({steps}) and "
            f"gradient_accumulation_steps ({accumulation}) "
            "to divide one another"
        )
    return min(steps, accumulation)


def regroup(batches: list[Batch], window: int) -> list[Batch]:
    """The same rows in micro-batches of the same sizes, those of one prompt together within each
    window.
    """
    regrouped: list[Batch] = []
    for start in range(0, len(batches), window):
        part = batches[start : start + window]
        sizes = [batch["prompt_ids"].shape[0] for batch in part]
        order = _by_prompt(part).split(sizes)
        regrouped += [{name: _rows(name, part, rows) for name in part[0]} for rows in order]
    return regrouped


def _by_prompt(batches: list[Batch]) -> Tensor:
    """Rows of all batches, prompt by prompt, in the order in which prompts first appear."""
    prompts = torch.cat([torch.cat([b["prompt_ids"], b["prompt_mask"]], 1) for b in batches]).cpu()
    first: dict[bytes, int] = {}
    group = [first.setdefault(row.numpy().tobytes(), len(first)) for row in prompts]
    return torch.tensor(group).argsort(stable=True)


def _rows(name: str, batches: list[Batch], rows: Tensor) -> Any:
    values = [batch[name] for batch in batches]
    if isinstance(values[0], Tensor) and values[0].dim():
        return torch.cat(values)[rows.to(values[0].device)]
    if isinstance(values[0], (list, tuple)):
        flat = [item for value in values for item in value]
        return [flat[row] for row in rows.tolist()]
    return values[0]  # of the whole generation batch: num_items_in_batch
