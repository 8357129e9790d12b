"""Functions that load a policy from a folder, the hub or a configuration, also with LoRA.

transformers initializes missing weights with random numbers and only prints a table. This module
raises a ValueError instead. It also converts errors from damaged files to one-line ValueErrors.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_fast.attention import PackedTree, check_tolerance, offload_checkpoints, tile_mlps
from grpo_fast.attention.agree import LENGTH, in_fp32, packed_pair, starts_of, worst_gap
from grpo_fast.data.hub import check_fields, read_fields
from grpo_fast.data.splits import Splits
from grpo_fast.data.tokenizer import build_bpe_tokenizer, build_symbol_tokenizer
from grpo_fast.errors import reason, require
from grpo_fast.train.config import LoraConfig, ModelConfig, named_in
from grpo_fast.train.models.policy import Policy, in_silence

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

BPE_TEXTS = 4000  # training examples from which a BPE tokenizer is built


def load_policy(config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> Policy:
    """Return the policy that a configuration describes.

    Args:
        config: the section `model`. Random weights depend on torch's global seed.
        tokenizer: the tokenizer. None loads the tokenizer of the model.

    Raises:
        ValueError: the model does not exist, is incomplete, or is not supported.
    """
    # 1. Load or build the model.
    device = _device(config.device)
    if config.path is not None:
        model = _load_model(config)
    else:
        model = _from_config(dict(config.config or {}), tokenizer)
        model.to(getattr(torch, config.dtype))
    # 2. Apply the memory options before peft, because peft wraps the layers and renames them.
    model.to(device)
    apply_options(model, config)
    if config.lora is not None:
        model = with_lora(model, config.lora)
    # 3. Build the policy. Then compare its log-probs with the model's logits on random tokens.
    tokenizer = tokenizer or load_tokenizer(config)
    autocast = None if config.autocast is None else getattr(torch, config.autocast)
    policy = Policy(model, tokenizer, autocast=autocast)
    _check_vocabulary(policy)
    log.info("self-check: packed logps within %.2g nats of the model's own", self_check(policy))
    return policy


@torch.no_grad()
def self_check(policy: Policy) -> float:
    """Compare log-probabilities of packed rows with the model's logits on random tokens.

    The check finds models that packed training does not support: heads that transform the logits in
    an unknown way, attention that ignores the packed layout, experts that are chosen at random in
    training mode, and position limits that packed rows would exceed.

    If packed rows of the model are wrong, the check switches the policy to computing each
    completion alone, and compares again. Every causal LM passes then, unless its head is unknown or
    it chooses experts at random.

    Returns:
        The largest difference of a log-probability in nats.

    Raises:
        ValueError: the difference exceeds the tolerance of the dtype, or logits are NaN.
    """
    fits = policy.positions >= LENGTH
    require(fits, "max_position_embeddings", f"at least {LENGTH}", policy.positions)
    if policy.unshared is None:
        try:
            return packed_gap(policy)
        except ValueError as error:
            policy.compute_alone(str(error))
    return packed_gap(policy)


def packed_gap(policy: Policy) -> float:
    """Compare once, with packed rows or with each completion alone (see `self_check`)."""
    lm = policy.lm
    kind = f"model_type {lm.config.model_type}"
    training = lm.training
    shared = policy.unshared is None

    def ours(pack: PackedTree) -> Tensor:
        lm.train()  # training mode reveals a random choice of experts
        is_gpu = policy.device.type == "cuda"
        state = partial(torch.cuda.get_rng_state, policy.device) if is_gpu else torch.get_rng_state
        before = state()
        logps = policy.logps(pack)
        same = torch.equal(before, state())
        require(same, kind, "a forward pass without random numbers", "some in training mode")
        return logps

    def theirs(rows: list[list[int]], starts: Sequence[int]) -> Tensor:
        with policy.generation():
            return policy.model_logps(rows, starts)

    # The model's own forward is right at every position.
    starts = starts_of(lm, policy.positions) if shared else ()
    try:
        with in_fp32(policy):
            bar = check_tolerance(policy.autocast or policy.head.weight.dtype)
            pair_at = partial(packed_pair, lm, ours, theirs, bar, shared=shared, in_nats=True)
            gap = worst_gap(lm, pair_at, starts, uses_random=policy.autocast is None)
    except (AttributeError, KeyError, TypeError) as error:  # from models that require a mask
        raise ValueError(f"{kind}: packed attention fails: {error}") from error
    finally:
        lm.train(training)
    require(not math.isnan(gap), kind, "weights with finite logits", "NaN")
    if gap > bar:
        what = "packed attention" if shared else "each sequence alone"
        raise ValueError(
            f"{kind}: {what} with the fused head differs from its own logits by {gap:.3g} nats "
            f"(expected ≤ {bar}); its head, attention or training mode does something that this "
            "trainer does not support"
        )
    return gap


def _check_vocabulary(policy: Policy) -> None:
    """Raise a ValueError if the model's embedding has no row for a token id of the tokenizer.

    Special tokens are exempt, for example the image token of Gemma 3. Prompts that contain such a
    token are rejected later.
    """
    tokenizer = policy.tokenizer
    rows = policy.lm.get_input_embeddings().weight.shape[0]
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
    largest = max([policy.pad_id, *(i for i in tokenizer.get_vocab().values() if i not in special)])
    expected = f"token ids below {rows}, the rows of the model's embedding"
    came = f"{largest}: tokenizer and model do not belong together"
    require(largest < rows, "tokenizer", expected, came)


def _load_model(config: ModelConfig) -> PreTrainedModel:
    """Load a model with transformers, and check that the files contained all weights."""
    from transformers import AutoModelForCausalLM

    path = str(config.path)
    files = [Path(path, name) for name in ("adapter_config.json", "config.json")]
    _refuse_adapter(path, [file.is_file() for file in files] == [True, False])
    with _reading(path, "a model's folder or hub id"):
        read_fields(path, config.trust_remote_code)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, config.dtype),
            ignore_mismatched_sizes=True,  # `_check_keys` raises a clearer error
            output_loading_info=True,
            trust_remote_code=config.trust_remote_code,
        )
    _refuse_adapter(path, getattr(model, "_hf_peft_config_loaded", False))
    _check_keys(path, report)
    return model


def _refuse_adapter(path: str, is_adapter: bool) -> None:
    merge = "merge it into its base model with peft's merge_and_unload, and save the result"
    require(not is_adapter, "model.path", "a complete model", f"a LoRA adapter in {path}; {merge}")


def _check_keys(path: str, report: dict[str, Any]) -> None:
    """Raise a ValueError if transformers reports that weights are missing or have a wrong shape.

    Weights that the model does not use are only logged.
    """
    wrong = [
        f"{name} is {tuple(stored)} in place of {tuple(expected)}"
        for name, stored, expected in report["mismatched_keys"]
    ]
    wrong += report["missing_keys"]
    came = f"none or others for {len(wrong)} of them: {_listed(wrong)}"
    require(not wrong, "model.path", f"every weight that {path}/config.json asks for", came)
    extras = report["unexpected_keys"]
    if extras:
        names = _listed(extras)
        log.warning("%s: %d weights have no place in the model: %s", path, len(extras), names)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model."""
    from transformers import AutoTokenizer

    path = str(config.path)
    with _reading(path, "a model with a tokenizer (tokenizer.json)"):
        return AutoTokenizer.from_pretrained(
            path, padding_side="left", trust_remote_code=config.trust_remote_code
        )


def build_tokenizer(model: ModelConfig, splits: Splits) -> PreTrainedTokenizerBase | None:
    """Build a tokenizer from the training examples. Return None if the model has a tokenizer."""
    if model.tokenizer == "symbols":
        return build_symbol_tokenizer(splits.symbols())
    if model.tokenizer is None:
        return None
    chosen = itertools.islice(splits.train, BPE_TEXTS)
    texts = [f"{e.prompt} {e.solution or e.answer or ''}" for e in chosen]
    return build_bpe_tokenizer(texts, model.vocab_size)


def _from_config(fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a model with random weights from the fields of a transformers config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    complete = {
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **fields,
    }
    try:
        check_fields(fields)
        # A transformers config accepts any keyword. To find misspelled fields, compare with the
        # attributes of a default config.
        plain = AutoConfig.for_model(fields["model_type"])
        unknown = [name for name in fields if not hasattr(plain, name)]
        if not unknown:
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**complete))
    except Exception as error:  # exception classes differ between architectures
        kind = fields["model_type"]
        raise ValueError(f"model.config: {kind} refuses it: {reason(error)}") from error
    raise ValueError(f"model.config: {fields['model_type']} has no field {', '.join(unknown)}")


def _device(name: str) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(name if name != "auto" else "cuda" if gpus else "cpu")
    is_here = device.type == "cpu" or (device.index or 0) < gpus
    expected = f"auto, cpu or a GPU of this machine (it has {gpus})"
    require(is_here, "model.device", expected, name)
    return device


@contextmanager
def _reading(path: str, expected: str) -> Iterator[None]:
    """Silence transformers while it reads a model, and convert its errors to a ValueError."""
    try:
        with in_silence():
            yield
    except Exception as error:  # readers and model classes raise many kinds of errors
        why = reason(error)
        if not Path(path).exists():
            why = "no such folder" + ("" if Path(path).is_absolute() else f" here, and {why}")
        if "custom code" in why:
            why = "its custom code runs only with model.trust_remote_code=true (eval: --allow-code)"
        raise ValueError(f"model.path: expected {expected}, got {path!r}: {why}") from error


def _listed(names: Any) -> str:
    """Format the first three names in sorted order, followed by an ellipsis if there are more."""
    first = sorted(names)[:3]
    return ", ".join(first) + (", …" if len(names) > len(first) else "")


def with_lora(model: PreTrainedModel, lora: LoraConfig) -> PeftModel:
    import peft

    settings = peft.LoraConfig(
        r=lora.r, lora_alpha=2 * lora.r, target_modules="all-linear", lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(model, settings)


# ----------------------------------------------------------------------------------- Memory options
# Arguments of `torch.utils.checkpoint`. The state of the random generator need not be saved for the
# recomputation, because dropout is off everywhere in the trainer.
RECOMPUTE: dict[str, bool] = {"use_reentrant": False, "preserve_rng_state": False}


def apply_options(model: PreTrainedModel, config: ModelConfig) -> None:
    """Enable gradient checkpointing and tiled MLPs if the section `model` requests them."""
    if config.gradient_checkpointing:
        enable_checkpointing(model, config.gradient_checkpointing == "offload")
    if config.tiled_mlp is not None:
        with named_in("model"):  # errors refer to the setting `model.tiled_mlp`
            tile_mlps(model, config.tiled_mlp)


def enable_checkpointing(model: PreTrainedModel, offload: bool = False) -> None:
    """Recompute every layer in the backward pass instead of storing its activations.

    Args:
        model: a transformers model.
        offload: store the inputs of the layers in host memory. The corresponding option of
            transformers is not used, because it requires pinned memory and therefore a GPU.
    """
    newer = getattr(model, "activation_checkpointing_enable", None)  # since transformers 5.23
    (newer or model.gradient_checkpointing_enable)(RECOMPUTE)
    if offload:
        offload_checkpoints(model)
