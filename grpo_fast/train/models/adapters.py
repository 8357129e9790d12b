"""Functions that find, check and add LoRA adapters, which are either new or saved by peft."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_fast.data import hub, reason
from grpo_fast.errors import require
from grpo_fast.train.config import LoraConfig, ModelConfig

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

FILE = "adapter_config.json"
FRESH = "add model.lora={r: 16} to merge it and train a new one"


def adapter_at(path: str) -> PeftConfig | None:
    """Return the peft configuration of the adapter in a folder or at a hub id.

    Returns:
        The configuration, or None if there is no adapter at the path.

    Raises:
        ValueError: the adapter is not a LoRA adapter, or names no base model.
    """
    folder = Path(path)
    is_adapter = (folder / FILE).is_file() if folder.is_dir() else _is_on_hub(path)
    if not is_adapter:
        return None
    import peft

    try:
        found = peft.PeftConfig.from_pretrained(path)
        kind = found.peft_type.value
    except Exception as error:  # peft raises many classes for damaged files
        raise ValueError(f"model.path: expected {FILE} in {path}, got {reason(error)}") from error
    base = found.base_model_name_or_path
    require(kind == "LORA", "model.path", "a LoRA adapter", f"{kind} in {path}")
    require(base and base != path, "model.path", f"base_model_name_or_path in {FILE}", repr(base))
    return found


@functools.cache  # a run calls this three times for the same model at its start
def _is_on_hub(path: str) -> bool:
    """Return True if the path is the hub id of an adapter, and False otherwise."""
    from transformers.utils.peft_utils import find_adapter_config_file

    hub.is_offline()  # if the hub is unreachable, this makes its client use the cache
    try:
        return find_adapter_config_file(path) is not None
    except (OSError, ValueError):
        return False


def check_trainable(found: PeftConfig, path: str) -> None:
    """Raise a ValueError if an adapter has parts that cannot be trained further.

    These parts are DoRA, biases and complete modules (`modules_to_save` in peft).
    """
    is_plain = not (found.use_dora or found.modules_to_save or found.bias != "none")
    came = f"use_dora, modules_to_save or bias in {path}; {FRESH}"
    require(is_plain, "model.path", "an adapter of low-rank matrices alone", came)


def with_saved(
    model: PreTrainedModel, found: PeftConfig, config: ModelConfig, empty: bool
) -> PreTrainedModel | PeftModel:
    """Add a saved adapter to a base model.

    Args:
        model: the base model.
        found: configuration of the adapter.
        config: the section `model`. If its key `lora` requests a new adapter, the adapter at `path`
            is merged into the weights. Otherwise it is trained further.
        empty: True if the model is on the meta device. Sharding later copies the weights of rank 0.

    Raises:
        UserWarning: a weight of the adapter is missing.
    """
    import peft

    goes_on = config.lora is None
    if empty:
        return peft.get_peft_model(model, found) if goes_on else model
    # peft only warns about missing weights and leaves them random, so raise an error instead.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        adapted = peft.PeftModel.from_pretrained(model, str(config.path), is_trainable=goes_on)
    return adapted if goes_on else adapted.merge_and_unload(safe_merge=True)


def with_new(model: PreTrainedModel | PeftModel, lora: LoraConfig) -> PeftModel:
    import peft

    settings = peft.LoraConfig(
        r=lora.r, lora_alpha=2 * lora.r, target_modules="all-linear", lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(model, settings)
