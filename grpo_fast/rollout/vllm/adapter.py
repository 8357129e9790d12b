"""LoRA adapters of a policy, which vLLM loads at run time from folders in peft's format."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from grpo_fast.errors import require
from grpo_fast.rollout.vllm.transfer import adapted_modules, checkpoint_tensors

# Fields of peft's LoraConfig that vLLM does not support. If one is set, an adapter is more than two
# low-rank matrices for each module.
UNSUPPORTED = (
    "use_dora", "lora_bias", "modules_to_save", "target_parameters", "trainable_token_indices",
    "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config",
)  # fmt: skip
FIELDS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")


def _active_config(policy: Any) -> tuple[str, Any]:
    """Return the name and the configuration of the policy's first active adapter."""
    name = next(iter(adapted_modules(policy.lm).values())).active_adapters[0]
    return name, policy.lm.peft_config[name]


def check(policy: Any, max_rank: int, targets: Sequence[str] | None, argument: str) -> None:
    """Check that vLLM can apply the policy's adapter, and that only the adapter is trained.

    Args:
        policy: a policy with an adapter.
        max_rank: vLLM's `max_lora_rank`.
        targets: vLLM's `lora_target_modules`, or None for all modules.
        argument: the setting that enabled LoRA in vLLM, for the error message.

    Raises:
        ValueError: the rank is too large, vLLM would ignore a module, or the adapter is not a
            plain LoRA adapter.
    """
    modules = adapted_modules(policy.lm)
    rank = max(max(module.r.values()) for module in modules.values())
    expected = f"a max_lora_rank of at least {rank}, the rank of the adapter"
    require(rank <= max_rank, argument, expected, max_rank)
    leaves = sorted({name.rpartition(".")[2] for name in modules})
    ignored = [leaf for leaf in leaves if targets is not None and leaf not in targets]
    expected = f"lora_target_modules that include {', '.join(leaves)}"
    require(not ignored, argument, expected, targets)
    _, config = _active_config(policy)
    extras = [name for name in UNSUPPORTED if getattr(config, name, None)]
    extras += ["bias"] * (config.bias != "none")
    active = {name for module in modules.values() for name in module.active_adapters}
    extras += [f"the adapters {', '.join(sorted(active))}"] * (len(active) > 1)
    trained = [n for n, p in policy.lm.named_parameters() if p.requires_grad and ".lora_" not in n]
    extras += [f"the trained weight {name}" for name in trained[:1]]
    # vLLM ignores the LoRA matrices of a module if its model has no module with the same name.
    names = checkpoint_tensors(policy.lm, merged=False).keys()
    unknown = [n for n, m in modules.items() if not m.lora_A or f"{n}.weight" not in names]
    extras += [f"the target module {name}" for name in unknown[:1]]
    expected = "one adapter of low-rank matrices (without LoRA in vLLM, merged weights are sent)"
    require(not extras, argument, expected, ", ".join(extras))


class AdapterFolder:
    """Temporary folder from which vLLM loads the newest version of the policy's adapter."""

    @functools.cached_property
    def path(self) -> str:
        self._folder = TemporaryDirectory(prefix="grpo_fast-lora-")
        return self._folder.name

    def write(self, policy: Any, *, is_writer: bool = True) -> None:
        """Replace the files in the folder with the policy's adapter, in peft's format.

        If the weights are sharded, this is a collective call.

        Args:
            policy: the policy.
            is_writer: False gathers sharded weights, but writes no files.
        """
        from safetensors.torch import save_file

        active, config = _active_config(policy)
        tensors = _tensors(policy.lm, active)
        if not is_writer:
            return
        fields = {field: getattr(config, field) for field in FIELDS}
        fields["target_modules"] = sorted({key.split(".")[-3] for key in tensors})
        save_file(tensors, Path(self.path) / "adapter_model.safetensors")
        settings = json.dumps({"peft_type": "LORA", **fields})
        (Path(self.path) / "adapter_config.json").write_text(settings)


def _tensors(lm: Any, adapter: str) -> dict[str, Tensor]:
    """Return an adapter's matrices on the CPU, keyed by their names in peft's files."""
    tensors = {}
    for name, tensor in lm.state_dict().items():
        plain = name.removesuffix(f".{adapter}.weight")
        if plain.endswith((".lora_A", ".lora_B")):
            value = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            tensors[f"base_model.model.{plain}.weight"] = value.cpu().contiguous()
    return tensors
