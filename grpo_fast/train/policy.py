"""The policy, a transformers causal language model with its tokenizer, and its reference model.

A policy is loaded from a folder, the hub or a configuration, also with LoRA. transformers
initializes missing weights with random numbers and only prints a table. `load_policy` raises a
ValueError instead. It also converts errors from damaged files to one-line ValueErrors.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from grpo_fast import Support, linear_logps
from grpo_fast.attention import (
    Head,
    PackedTree,
    check_rope,
    check_supported,
    check_tolerance,
    disable_dropout,
    fast_layers,
    head_of,
    hidden_by_samples,
    offload_checkpoints,
    register,
    split_recurrent_layers,
    tile_mlps,
)
from grpo_fast.attention.agree import LENGTH, in_fp32, packed_pair, starts_of, worst_gap
from grpo_fast.data.splits import Splits
from grpo_fast.data.tokenizer import build_bpe_tokenizer, build_symbol_tokenizer
from grpo_fast.errors import reason, require
from grpo_fast.rollout import SampledModel
from grpo_fast.train import ranks
from grpo_fast.train.config import LoraConfig, ModelConfig, ReferenceConfig, named_in

if TYPE_CHECKING:
    from peft import PeftModel
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Result = TypeVar("Result")
log = logging.getLogger(__name__)
BPE_TEXTS = 4000  # training examples from which a BPE tokenizer is built


class Policy(SampledModel):
    """Causal language model that is trained on packed rows.

    Args:
        model: a transformers causal language model, or a peft model that wraps one.
        tokenizer: tokenizer of the model.
        autocast: dtype of the trunk's computations if its weights are fp32, or None.

    Raises:
        ValueError: the model's RoPE depends on the length of the sequence.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, tokenizer, autocast=autocast)
        # Reason why every completion is computed alone, by the model's own forward. None if packed
        # rows are used, in which completions share the computation of their prompt.
        self.unshared: str | None = None
        check_rope(self.lm)
        disable_dropout(self.lm)
        try:
            check_supported(self.lm)
            split_recurrent_layers(self.lm.base_model)
            fast_layers(self.lm.base_model)
            self.lm.set_attn_implementation(register())
        except ValueError as error:
            self.compute_alone(str(error))
        self.is_sharded = self._is_inside = False

    def compute_alone(self, reason: str) -> None:
        """Stop using packed rows, and compute every completion by the model's own forward.

        Args:
            reason: why packed rows of this model would be wrong.
        """
        self.unshared = reason
        self.lm.set_attn_implementation(self.generation_attn)

    @property
    def device(self) -> torch.device:
        return head_of(self.lm).weight.device

    def inside(self, work: Callable[[], Result]) -> Result:
        """Call `work` inside the model's forward pass, where FSDP2 gathers the head's weights.

        Args:
            work: function without arguments. Its result must contain all tensors that depend on
                the model and need a backward pass, because FSDP2 attaches its backward hooks to the
                result.
        """
        if not self.is_sharded or self._is_inside:
            return work()
        self._is_inside = True
        try:
            return self.lm.inside(work)
        finally:
            self._is_inside = False
            # Normally the backward pass releases the gathered weights. Without gradients there is
            # no backward pass, so release them here.
            if not torch.is_grad_enabled():
                self.lm.reshard()

    def hidden(self, packed: PackedTree) -> Tensor:
        """Return the final hidden states of a packed row, shape (T, H)."""

        def hidden() -> Tensor:
            with self._autocast():
                if self.unshared is not None:
                    states = hidden_by_samples(self.lm, packed)
                else:
                    states = self.lm.base_model(**packed.model_inputs).last_hidden_state[0]
            return states if self.autocast is None else states.to(self.autocast)

        return self.inside(hidden)

    def logps(
        self,
        packed: PackedTree,
        temperature: float = 1.0,
        hidden: Tensor | None = None,
        support: Support | None = None,
    ) -> Tensor:
        """Return the log-probabilities of the completion tokens, fp32 of shape (R,).

        Args:
            packed: the packed row.
            temperature: temperature by which the logits are divided.
            hidden: result of `hidden(packed)`. None computes the hidden states.
            support: token ids that the sampler kept, in the format of `linear_logps`. None means
                the whole vocabulary.
        """

        def logps() -> Tensor:
            head = self.head
            states = self.hidden(packed) if hidden is None else hidden
            return linear_logps(
                states, head.weight, packed.target_ids, hidden_rows=packed.predicting,
                bias=head.bias, temperature=temperature, support=support, **head.logit_kwargs,
            )  # fmt: skip

        return self.inside(logps)

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the weights of the model over a device mesh with FSDP2.

        Raises:
            ValueError: the model computes every completion alone. Ranks would then run different
                numbers of forward passes and wait for each other forever.
        """
        expected = "ddp, because this model computes every completion alone"
        came = f"fsdp2 or hsdp: {self.unshared}"
        require(self.unshared is None, "distributed", expected, came)
        ranks.shard(self.lm, mesh)
        self.is_sharded = True

    def weights(self) -> dict[str, Tensor]:
        """Return the weights that a checkpoint stores, keyed by name.

        Tied weights appear once. If the base model can be loaded again from its path, only the
        weights of the adapter are returned. A sharded model returns the shards of this rank.
        """
        is_adapter = self.model is not self.lm and bool(self.lm.name_or_path)
        unique = dict[int, tuple[str, Tensor]]()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if tensor.requires_grad or not is_adapter:
                unique.setdefault(id(tensor), (name, tensor))
        return dict(unique.values())

    def frozen_copy(self) -> Policy:
        """Return a frozen copy of the policy for use as the reference. It shares no weights."""
        # Copy only the weights. The tokenizer and the settings are shared with the original.
        twin = copy.copy(self)
        twin.model = twin.lm = copy.deepcopy(self.lm).requires_grad_(False).eval()
        return twin

    def trainable_copy(self) -> Policy:
        """Return a copy of the policy that a critic can train.

        In the copy, the same parameters require grad as in the policy, except an untied LM head.
        """
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model)
        twin.lm = twin.model if self.model is self.lm else twin.model.get_base_model()
        head = twin.lm.get_output_embeddings()
        if head.weight is not twin.lm.get_input_embeddings().weight:
            head.requires_grad_(False)
        return twin

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def save(self, directory: str | Path) -> None:
        """Save the model and the tokenizer in transformers format. An adapter is merged."""
        # Merge the adapter into a copy, because merging changes the model's weights in place.
        model = self.lm
        if self.model is not self.lm:
            adapted = copy.deepcopy(self.model)
            # peft would also merge the adapter of an embedding into a head that is tied to it.
            head = adapted.get_output_embeddings()
            if hasattr(adapted.get_input_embeddings(), "base_layer"):
                head.weight = nn.Parameter(head.weight.detach().clone())
            model = adapted.merge_and_unload()
        with in_silence():
            model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)


class Reference:
    """Reference model of the KL divergence.

    It is a frozen copy of the policy, a copy that is synced with the policy, or the policy without
    its adapter. With `kind: none` there is no reference.

    Args:
        policy: the policy after the warm start and before the first training step.
        config: the section `reference`.
    """

    def __init__(self, policy: Policy, config: ReferenceConfig) -> None:
        self.policy = policy
        self.config = config
        # With LoRA, disabling the adapter restores the initial policy.
        is_copy = config.kind != "none" and policy.model is policy.lm
        self.copy = policy.frozen_copy() if is_copy else None

    @property
    def head(self) -> Head:
        return (self.copy or self.policy).head

    @torch.no_grad()
    def hidden(self, packed: PackedTree) -> Tensor:
        """Return the reference's hidden states that predict the completion tokens, shape (R, H)."""
        with self._switched():
            return (self.copy or self.policy).hidden(packed).index_select(0, packed.predicting)

    @torch.no_grad()
    def logps(
        self, packed: PackedTree, temperature: float, support: Support | None = None
    ) -> Tensor:
        """Return the reference's log-probabilities of the completion tokens, fp32 of shape (R,).

        Args:
            packed: the packed row that the policy trains on. Both models then round alike, because
                they compute tensors of the same shapes.
            temperature: temperature by which the logits are divided.
            support: token ids that the sampler kept, or None.
        """
        with self._switched():
            return (self.copy or self.policy).logps(packed, temperature, support=support)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Move a synced reference towards the policy if an update is due after this step."""
        if self.config.kind != "synced" or self.copy is None or step % self.config.sync_every:
            return
        copies = self.copy.model.parameters()
        for weight, current in zip(copies, self.policy.model.parameters(), strict=True):
            weight.lerp_(current.to(weight.dtype), self.config.mixing)

    # Without `copy`, the reference is the policy with its adapter disabled.
    def _switched(self) -> AbstractContextManager[None]:
        return nullcontext() if self.copy is not None else self.policy.model.disable_adapter()


# ------------------------------------------------------------------------------------------ Loading
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


def with_lora(model: PreTrainedModel, lora: LoraConfig) -> PeftModel:
    import peft

    settings = peft.LoraConfig(
        r=lora.r, lora_alpha=2 * lora.r, target_modules="all-linear", lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(model, settings)


def _load_model(config: ModelConfig) -> PreTrainedModel:
    """Load a model with transformers, and check that the files contained all weights."""
    from transformers import AutoModelForCausalLM

    path = str(config.path)
    files = [Path(path, name) for name in ("adapter_config.json", "config.json")]
    _refuse_adapter(path, [file.is_file() for file in files] == [True, False])
    with _reading(path, "a model's folder or hub id"):
        read_model_config(path, config.trust_remote_code)
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
        check_model_config(fields)
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


@contextmanager
def in_silence() -> Iterator[None]:
    """Disable the progress bars and warnings of transformers.

    The bars would interrupt the run's progress lines. The warnings are not needed, because missing
    weights raise an error.
    """
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()


# --------------------------------------------------------------------------------------- Self-check
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


# ------------------------------------------------------------------------ Checks of a model's files
# Names that architectures use in config.json for the number of layers.
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
MOST_LAYERS = 10_000


def check_model_config(fields: Mapping[str, object], allow_code: bool = False) -> None:
    """Check the fields of a model's config.json, including nested ones.

    Args:
        fields: the fields.
        allow_code: if True, allow attention kernels from the hub, which execute code.

    Raises:
        ValueError: the model has so many layers that they would fill the memory, or a field names a
            kernel from the hub.
    """
    for name, value in fields.items():
        if name in LAYERS and isinstance(value, int):
            require(0 <= value <= MOST_LAYERS, name, f"0 to {MOST_LAYERS} layers", value)
        fits = allow_code or "_implementation" not in name or "/" not in str(value)
        require(fits, name, "one of transformers' implementations", repr(value))
        if isinstance(value, dict):
            check_model_config(value, allow_code)


def read_model_config(path: str, allow_code: bool = False) -> dict[str, object]:
    """Return the checked fields of a model's config.json. See `check_model_config`.

    Raises:
        ValueError: a field is not allowed.
        OSError: transformers finds no model at the path.
    """
    from transformers import PreTrainedConfig

    fields = PreTrainedConfig.get_config_dict(path)[0]
    check_model_config(fields, allow_code)
    return fields
