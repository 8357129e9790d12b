"""Weights of models and moments of optimizers to files and back, without a change in any bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_fast.train.models.policy import Policy, without_bars
from grpo_fast.train.ranks.distributed import is_main, whole
from grpo_fast.train.ranks.sharding import part
from grpo_fast.train.update.optimizer import Optimizer

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

        mine = peft.get_peft_model_state_dict(policy.model)
        saved = load_file(folder / ADAPTER, device=str(policy.device))
        saved = {name: part(value, mine[name]) for name, value in saved.items()}
        peft.set_peft_model_state_dict(policy.model, saved)
        return
    dtype = policy.lm.get_input_embeddings().weight.dtype
    with without_bars():
        saved = policy.kind.from_pretrained(folder, dtype=dtype)
    load_parts(policy.lm, saved.state_dict())


def load_parts(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Whole tensors into a model that is, or is not, sharded."""
    mine = model.state_dict()
    model.load_state_dict({n: part(x, mine[n]) if n in mine else x for n, x in state.items()})


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Its counters, and the moments of every parameter by number and name.

    Of shards rank 0 gets the whole, and all ranks call.
    """
    tensors = {}
    for number, state in optimizer.adam.state_dict()["state"].items():
        for name, value in state.items():
            found = whole(value.detach())
            if is_main():
                tensors[f"{number}/{name}"] = found.cpu().contiguous()
    return optimizer.counters(), tensors


def save_moments(moments: dict[str, Tensor], file: Path) -> None:
    """The tensors of `optimizer_state`."""
    from safetensors.torch import save_file

    save_file(moments, file)


def load_optimizer(
    optimizer: Optimizer, counters: dict[str, int], tensors: dict[str, Tensor]
) -> None:
    """What `optimizer_state` gave goes on; rates and decay are the configuration's."""
    moments: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition("/")
        like = optimizer.parameters[int(number)]
        is_moment = value.shape == like.shape  # a count of steps is a number
        moments.setdefault(int(number), {})[name] = part(value, like) if is_moment else value
    groups: Any = optimizer.adam.state_dict()["param_groups"]
    optimizer.adam.load_state_dict({"state": moments, "param_groups": groups})
    optimizer.load_counters(counters)
