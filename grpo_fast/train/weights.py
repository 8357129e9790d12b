"""Weights of models and moments of optimizers to files and back, without a change in any bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_fast.train.optimizer import Optimizer
from grpo_fast.train.policy import Policy, without_bars

ADAPTER = "adapter_model.safetensors"  # as peft names it


def save_weights(policy: Policy, folder: Path) -> None:
    """A model that transformers loads; with LoRA the adapter that peft does, without its base."""
    if policy.model is policy.lm:
        policy.save(folder)
    else:
        policy.model.save_pretrained(folder, save_embedding_layers=False)


@torch.no_grad()
def load_weights(policy: Policy, folder: Path) -> None:
    """Put the saved weights into a policy of the same configuration."""
    from safetensors.torch import load_file

    if policy.model is not policy.lm:
        import peft

        saved = load_file(folder / ADAPTER, device=str(policy.device))
        peft.set_peft_model_state_dict(policy.model, saved)
        return
    dtype = policy.lm.get_input_embeddings().weight.dtype
    with without_bars():
        saved = type(policy.lm).from_pretrained(folder, dtype=dtype)
    policy.lm.load_state_dict(saved.state_dict())


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Its counters, and the moments of every parameter by number and name."""
    moments = optimizer.adam.state_dict()["state"]
    tensors = {
        f"{number}/{name}": value.detach().cpu().contiguous()
        for number, state in moments.items()
        for name, value in state.items()
    }
    return optimizer.counters(), tensors


def load_optimizer(
    optimizer: Optimizer, counters: dict[str, int], tensors: dict[str, Tensor]
) -> None:
    """What `optimizer_state` gave goes on; rates and decay are the configuration's."""
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition("/")
        moments.setdefault(int(number), {})[name] = value
    groups: Any = optimizer.adam.state_dict()["param_groups"]
    optimizer.adam.load_state_dict({"state": moments, "param_groups": groups})
    optimizer.load_counters(counters)
