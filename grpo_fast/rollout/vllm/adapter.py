"""LoRA adapters of a policy, which vLLM loads at run time from folders in peft's format."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from grpo_fast.errors import require
from grpo_fast.rollout.vllm.answers import LoRAInfo
from grpo_fast.rollout.vllm.transfer import adapted_modules, checkpoint_tensors


def check(policy: Any, limits: LoRAInfo, url: str) -> None:
    """Check that vLLM would receive everything that is trained, and use all of it.

    vLLM itself refuses an adapter whose peft options it does not support.

    Args:
        policy: a policy with an adapter.
        limits: the LoRA settings of the server.
        url: the server, for the error message.

    Raises:
        ValueError: the rank is too large, vLLM would ignore a module, or weights outside of one
            adapter are trained.
    """
    where = f"rollout.vllm.urls: {url}"
    modules = adapted_modules(policy.lm)
    rank = max(max(module.r.values()) for module in modules.values())
    expected = f"a max_lora_rank of at least {rank}, the rank of the adapter"
    require(rank <= limits.max_lora_rank, where, expected, limits.max_lora_rank)
    targets = limits.target_modules
    leaves = sorted({name.rpartition(".")[2] for name in modules})
    ignored = [leaf for leaf in leaves if targets is not None and leaf not in targets]
    expected = f"lora_target_modules that include {', '.join(leaves)}"
    require(not ignored, where, expected, targets)
    active = {name for module in modules.values() for name in module.active_adapters}
    extras = [f"the adapters {', '.join(sorted(active))}"] * (len(active) > 1)
    trained = [n for n, p in policy.lm.named_parameters() if p.requires_grad and ".lora_" not in n]
    extras += [f"the trained weight {name}" for name in trained[:1]]
    # vLLM ignores the LoRA matrices of a module if its model has no module with the same name.
    names = checkpoint_tensors(policy.lm, merged=False).keys()
    unknown = [n for n, m in modules.items() if not m.lora_A or f"{n}.weight" not in names]
    extras += [f"the target module {name}" for name in unknown[:1]]
    expected = "one adapter of low-rank matrices (without --enable-lora, merged weights are sent)"
    require(not extras, where, expected, ", ".join(extras))


def write(policy: Any, folder: str, *, is_writer: bool = True) -> None:
    """Write the policy's adapter into a folder, in peft's format.

    If the weights are sharded, this is a collective call.

    Args:
        policy: the policy.
        folder: the folder from which vLLM loads the adapter. Earlier files are replaced.
        is_writer: False gathers sharded weights, but writes no files.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    name = next(iter(adapted_modules(policy.lm).values())).active_adapters[0]
    state = get_peft_model_state_dict(policy.model, adapter_name=name, save_embedding_layers=False)
    tensors = {
        key: (x.full_tensor() if hasattr(x, "full_tensor") else x).cpu().contiguous()
        for key, x in state.items()
    }
    if not is_writer:
        return
    save_file(tensors, Path(folder) / "adapter_model.safetensors")
    config = copy.copy(policy.lm.peft_config[name])
    # vLLM refuses kinds of initial values that change the base weights. Here it does receive the
    # changed base weights.
    config.init_lora_weights = True
    config.save_pretrained(folder)
