"""LoRA adapters: a new one on a model, or one that peft has saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from grpo_fast.data import hub, reason
from grpo_fast.train.config import LoraConfig, require

FILE = "adapter_config.json"
FRESH = "add model.lora={r: 16} to merge it and train a new one"


def adapter_at(path: str) -> Any | None:
    """Return the peft configuration of the adapter in a folder or at a hub id; None without one.

    Raises ValueError for an adapter that is not LoRA, or that names no base model.
    """
    from transformers.utils.peft_utils import find_adapter_config_file

    folder = Path(path)
    if folder.is_dir():
        is_adapter = (folder / FILE).is_file()
    else:
        hub.is_offline()  # if so, the hub's client looks into its cache only, without retries
        try:
            is_adapter = find_adapter_config_file(path) is not None
        except (OSError, ValueError):
            is_adapter = False  # neither a folder nor a hub id: loading the model says so
    if not is_adapter:
        return None
    import peft

    try:
        found = peft.PeftConfig.from_pretrained(path)
        kind = found.peft_type.value
    except Exception as error:  # damaged JSON, other types, fields of a newer peft
        raise ValueError(f"model.path: expected {FILE} in {path}, got {reason(error)}") from error
    base = found.base_model_name_or_path
    require(kind == "LORA", "model.path", "a LoRA adapter", f"{kind} in {path}")
    require(base and base != path, "model.path", f"base_model_name_or_path in {FILE}", repr(base))
    return found


def check_trainable(found: Any, path: str) -> None:
    """Raise a ValueError for an adapter with more than low-rank matrices."""
    is_plain = not (found.use_dora or found.modules_to_save or found.bias != "none")
    came = f"use_dora, modules_to_save or bias in {path}; {FRESH}"
    require(is_plain, "model.path", "an adapter of low-rank matrices alone", came)


def with_saved(model: Any, path: str, found: Any, lora: LoraConfig | None, empty: bool) -> Any:
    """Return a base model with a saved adapter, to be trained; with `lora`, merged into it.

    Raises UserWarning for an adapter that lacks a weight.
    """
    import peft

    if empty:
        # The weights come from rank 0.
        return model if lora is not None else peft.get_peft_model(model, found)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        adapted = peft.PeftModel.from_pretrained(model, path, is_trainable=lora is None)
    return adapted if lora is None else adapted.merge_and_unload(safe_merge=True)


def with_new(model: Any, lora: LoraConfig) -> Any:
    import peft

    settings = peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, target_modules="all-linear", lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(model, settings)
