"""Recurrent layers of packed rows, where each segment begins with the state of its parent.

Hybrid models mix attention with layers that carry a state from token to token: Gated DeltaNet
(Qwen3.5, Qwen3-Next, OLMo Hybrid), Kimi Delta Attention, Mamba 2 (Nemotron-H, Granite 4, Bamba,
Falcon-H1), Mamba 1 (Jamba) and short convolutions (LFM2). transformers calls all of them alike, as
layer(hidden_states, cache, mask). The layer reads and writes two tensors of the cache: the window
of its convolution and its recurrent state.

`split_recurrent_layers` replaces the forward of these layers. On a packed row, the layer's own
forward then runs on batches of segments, from the roots to the leaves. A `StateCache` gives every
segment the state at the end of its parent. A shared prompt is computed once, and the gradients of
its completions flow through its state.

The layout reaches the layers as their mask. Keyword arguments do not reach every layer (Jamba drops
them), and hooks on a layer do not run again when gradient checkpointing recomputes it.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_fast.attention.layout import TreeLayout
from grpo_fast.kernels.agree import Pair, draw

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_fast.attention.packing import PackedTree

# Methods of a transformers cache. Recurrent layers call STORES. A layer that also calls ATTENDS
# stores keys, so it needs more than a state.
STORES = {"update_conv_state", "update_recurrent_state"}
ATTENDS = {"update", "update_indexer"}
# Names of the argument that is the cache. transformers 5.24 calls it `cache` in all layers.
CACHES = "cache", "cache_params", "past_key_values"
# Layer types whose masks a hybrid model accepts in a dictionary.
MASKS = "full_attention", "sliding_attention", "linear_attention", "conv", "hybrid"
# Segments share a batch if padding adds at most this share of their tokens, plus LOOSE tokens.
PADDING = 0.25
LOOSE = 64
# Largest relative difference between a layer that continues from a state and the same layer on the
# whole sequence. The limit is large, because the products may use bf16, or TF32 on a GPU.
BAR = 0.03
CPU_FP32_BAR = 1e-3


class State(NamedTuple):
    """State at the end of a segment, or of S segments. A layer may lack one of the tensors."""

    conv: Tensor | None = None  # (S, channels, width of the convolution)
    recurrent: Tensor | None = None  # (S, …)

    @classmethod
    def stack(cls, states: Iterable[State]) -> State:
        """Stack the states of single segments."""
        parts = zip(*states, strict=True)
        return cls(*(None if x[0] is None else torch.stack(x) for x in parts))

    def unstack(self) -> Iterator[State]:
        """Yield the state of each segment."""
        count = next(len(x) for x in self if x is not None)
        parts = ([None] * count if x is None else x.unbind() for x in self)
        yield from map(State._make, zip(*parts, strict=True))

    def take(self, rows: Tensor) -> State:
        return State(*(None if x is None else x.index_select(0, rows) for x in self))


class StateCache:
    """The part of a transformers cache that one call of one recurrent layer uses.

    The caches of transformers write into their tensors. This one does not, so several segments can
    begin with the same state, and gradients flow through it.

    Attributes:
        state: before the call, the state in front of its first tokens; after the call, the
            state after its last tokens.
    """

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.state.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # otherwise the layer updates the window of its convolution in place

    # transformers 5.17 reads cache.layers[layer_idx].conv_states[0] in place of `get_conv_state`.
    record_past = True

    @property
    def layers(self) -> dict[int, StateCache]:
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> list[Tensor | None]:
        return [self.state.conv]

    @property
    def recurrent_states(self) -> list[Tensor | None]:
        return [self.state.recurrent]

    def has_previous_state(self, layer_idx: int = 0, state_idx: int = 0) -> bool:
        return any(x is not None for x in self.state)

    def update_conv_state(
        self, new: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        before = self.state.conv
        seen = new if before is None else torch.cat([before.to(new.dtype), new], -1)
        window = F.pad(seen, (max(0, conv_kernel_size - seen.shape[-1]), 0))
        self.state = self.state._replace(conv=window[..., -conv_kernel_size:])
        return seen

    def update_recurrent_state(self, new: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.state = self.state._replace(recurrent=new)
        return new


Run = Callable[[Tensor, StateCache | None], Tensor]  # a layer's forward on (B, L, H)


def _run_of(module: nn.Module, name: str) -> Run:
    """Return a function that calls the forward of a layer's class.

    The function passes the cache as the argument `name`.
    """
    return lambda hidden, cache: type(module).forward(module, hidden, **{name: cache})


class Batch(NamedTuple):
    """Segments that one call of a layer computes. Shorter ones are padded at the end."""

    segments: list[int]
    rows: Tensor  # (B, L) int64: rows of the packed row; padding repeats the last one
    wanted: Tensor  # (n,) int64: places of the segments' rows in the flattened (B, L)
    begins: bool = False  # whether the segments begin with the states of their parents
    ends: bool = False  # whether the states at their ends are needed


class Plan(NamedTuple):
    """Batches that compute all segments of a packed row."""

    batches: list[Batch]
    order: Tensor  # (T,) int64: index of each row in the joined results of all batches

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the packed row (T, H) of the batches' outputs (B, L, H)."""
        pairs = zip(outputs, self.batches, strict=True)
        rows = [out.flatten(0, 1).index_select(0, batch.wanted) for out, batch in pairs]
        return torch.cat(rows).index_select(0, self.order)


def plan_states(layout: TreeLayout, *, all_end: bool = False) -> Plan:
    """Plan the batches of a layout for layers that can begin with a state.

    Segments whose state is needed are batched only with segments of equal length, because the state
    at the end of a padded sequence would be wrong.

    Args:
        layout: the layout.
        all_end: whether the states at the ends of all segments are needed.
    """
    parents = set(range(len(layout.parents)) if all_end else layout.parents)
    depths: list[int] = []
    for parent in layout.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    batches = []
    for level in range(max(depths) + 1):
        segments = [s for s, depth in enumerate(depths) if depth == level]
        for ends in (True, False):
            chosen = [s for s in segments if (s in parents) == ends]
            for some in similar(chosen, layout.lengths, exact=ends):
                paths = [layout.paths[s][layout.prefixes[s] :] for s in some]
                # A layer that begins with a state computes a single token by its decoding kernel,
                # which has no backward in fla. Padding to two tokens avoids this kernel.
                rows, wanted = _padded(paths, [0] * len(paths), least=1 if ends else 2)
                batches.append(Batch(some, rows, wanted, begins=level > 0, ends=ends))
    return _plan(batches, layout)


def plan_paths(layout: TreeLayout, *, exact: bool = False) -> Plan:
    """Plan the batches of a layout for layers that cannot begin with a state.

    Each segment is computed after copies of its ancestors' rows, whose results are dropped.

    Args:
        layout: the layout.
        exact: whether all sequences of a batch have equal lengths, so that none is padded.
    """
    batches = []
    for some in similar(range(len(layout.paths)), [len(x) for x in layout.paths], exact=exact):
        paths = [layout.paths[s] for s in some]
        batches.append(Batch(some, *_padded(paths, [layout.prefixes[s] for s in some])))
    return _plan(batches, layout)


def hidden_by_samples(model: PreTrainedModel, packed: PackedTree) -> Tensor:
    """Compute the hidden states (T, H) of a packed row without packed attention.

    Each segment is computed after copies of its ancestors' rows by the model's own forward pass.
    Only sequences of equal length are in one batch, so no mask is needed. This is exact for every
    causal model, but nothing is shared. The result is the input of the LM head, because some models
    transform the last hidden states before it (BERT).

    Args:
        model: a transformers causal LM.
        packed: the packed row.
    """
    ids = packed.input_ids[0]
    plan = packed.layout.cached("samples", lambda: plan_paths(packed.layout, exact=True))
    found: list[Tensor] = []

    def record(head: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        found.append(args[0])
        return (args[0][:, :1],)  # compute the logits of one row only

    hook = model.get_output_embeddings().register_forward_pre_hook(record)
    try:
        for batch in plan.batches:
            model(input_ids=ids[batch.rows], use_cache=False)
    finally:
        hook.remove()
    return plan.join(found)


def _padded(
    paths: Sequence[Tensor], skipped: Sequence[int], least: int = 1
) -> tuple[Tensor, Tensor]:
    """Return `Batch.rows` and `Batch.wanted` of sequences, without their first `skipped` rows."""
    longest = max(least, *map(len, paths))
    rows = torch.stack([torch.cat([x, x[-1:].expand(longest - len(x))]) for x in paths])
    first = torch.tensor(skipped)[:, None]
    size = torch.tensor([len(path) for path in paths])[:, None]
    at = torch.arange(longest)
    return rows, ((at >= first) & (at < size)).flatten().nonzero()[:, 0]


def _plan(batches: Sequence[Batch], layout: TreeLayout) -> Plan:
    device = layout.cu_seqlens.device
    order = torch.cat([batch.rows.flatten()[batch.wanted] for batch in batches]).argsort()
    moved = [b._replace(rows=b.rows.to(device), wanted=b.wanted.to(device)) for b in batches]
    return Plan(moved, order.to(device))


def similar(segments: Iterable[int], lengths: Sequence[int], *, exact: bool) -> Iterator[list[int]]:
    """Yield groups of segments with similar lengths, or with equal lengths if `exact`."""
    batch: list[int] = []
    total = 0
    for segment in sorted(segments, key=lambda s: -lengths[s]):
        total += lengths[segment]
        most = total if exact else (1 + PADDING) * total + LOOSE
        if batch and (len(batch) + 1) * lengths[batch[0]] > most:
            yield batch
            batch = []
            total = lengths[segment]
        batch.append(segment)
    if batch:
        yield batch


def _cache_name(kind: type[nn.Module]) -> str | None:
    """Return the name of the cache argument of a recurrent layer's class, or None for others."""
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    names = set(code.co_names) if code else set()
    if not STORES & names or ATTENDS & names:
        return None
    arguments = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in arguments), None)


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that read a state from a cache and can therefore be split."""
    return [module for module in model.modules() if _cache_name(type(module))]


def split_recurrent_layers(model: PreTrainedModel) -> None:
    """Make the recurrent layers of a base model compute packed rows by segments.

    Calling the function again has no effect. Without a packed row, the layers compute what they did
    before. The base model passes the layout to its layers, so it needs a forward pre-hook.
    """
    layers = recurrent_layers(model)
    for module in layers:
        if not isinstance(vars(module).get("forward"), types.MethodType):
            name = str(_cache_name(type(module)))
            width = model.get_input_embeddings().weight.shape[-1]
            forward = partial(_forward, name, can_continue(module, name, width))
            module.forward = types.MethodType(forward, module)
    if layers and layout_as_masks not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(layout_as_masks, with_kwargs=True)


def layout_as_masks(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass the layout of a packed row, or the cache of a rollout, to all layers as their mask.

    This is a forward pre-hook. A padding mask stays, so that the attention can refuse it.
    """
    mask = kwargs.get("rollout_cache")
    if mask is None and kwargs.get("attention_mask") is None:
        mask = kwargs.get("packed_layout")
    if mask is not None:
        kwargs = {**kwargs, "attention_mask": dict.fromkeys(MASKS, mask)}
    return args, kwargs


def _forward(
    name: str,
    continues: bool,
    module: nn.Module,
    hidden_states: Tensor,
    *args: Any,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Compute a recurrent layer. This function replaces the forward of a split layer."""
    run = _run_of(module, name)
    if isinstance(attention_mask, TreeLayout):
        return by_segments(run, continues, hidden_states, attention_mask)[0]
    if hasattr(attention_mask, "recurrent_layer"):  # the cache of a rollout
        split = partial(by_segments, run, continues)
        return attention_mask.recurrent_layer(module, partial(step, run), split, hidden_states)
    forward = type(module).forward
    return forward(module, hidden_states, *args, attention_mask=attention_mask, **kwargs)


def step(run: Run, hidden: Tensor, state: State) -> tuple[Tensor, State]:
    """Compute a layer on new tokens (B, L, H) that continue B sequences."""
    cached = StateCache(state)
    return run(hidden, cached), cached.state


def by_segments(
    run: Run, continues: bool, hidden: Tensor, layout: TreeLayout, *, all_end: bool = False
) -> tuple[Tensor, State | None]:
    """Compute a layer on a packed row.

    Args:
        run: the layer's forward.
        continues: whether the layer can begin with a state.
        hidden: (1, T, H).
        layout: the layout of the row.
        all_end: whether the states of all segments are returned.

    Returns:
        The output (1, T, H), and the states of all segments if `all_end`.
    """
    inner = {s for s in layout.parents if s >= 0 and layout.parents[s] >= 0}
    # A segment of one token with a parent and children would need the decoding kernel.
    if layout.has_tree and (not continues or any(layout.lengths[s] == 1 for s in inner)):
        plan = layout.cached("paths", lambda: plan_paths(layout))
    else:
        plan = layout.cached(("states", all_end), lambda: plan_states(layout, all_end=all_end))
    outputs = []
    states: dict[int, State] = {}
    for batch in plan.batches:
        begin = None
        if batch.begins:
            begin = State.stack(states[layout.parents[s]] for s in batch.segments)
        cached = StateCache(begin) if batch.begins or batch.ends else None
        x = hidden[0].index_select(0, batch.rows.flatten()).unflatten(0, batch.rows.shape)
        outputs.append(run(x, cached))
        if batch.ends and cached is not None:
            states.update(zip(batch.segments, cached.state.unstack(), strict=True))
    ends = State.stack(states[s] for s in range(len(layout.lengths))) if all_end else None
    return plan.join(outputs)[None], ends


_continues: dict[tuple[type[nn.Module], str], bool] = {}  # results of `can_continue`


@torch.no_grad()
def can_continue(module: nn.Module, name: str, width: int) -> bool:
    """Return whether a layer can continue a sequence correctly from the state of its prefix.

    The layer gets random weights, and its results are compared with those on the whole sequence.

    Mamba 1 layers of transformers ignore their recurrent state if they compute several tokens,
    which changes their results by 10% with the random weights of this comparison.

    Args:
        module: the layer.
        name: name of its cache argument.
        width: size of the hidden states.

    Raises:
        ValueError: the layer needs other arguments than hidden states and a cache.
    """
    weights = next(module.parameters()).device
    device = torch.device("cpu") if weights.type == "meta" else weights
    key = type(module), device.type
    if key not in _continues:
        generator = torch.Generator().manual_seed(0)
        twin = copy.deepcopy(module)
        twin = twin.to_empty(device="cpu").float() if weights.type == "meta" else twin.float().cpu()
        for parameter in twin.parameters():
            std = 0.3 if parameter.dim() < 2 else parameter[0].numel() ** -0.5
            parameter.normal_(std=std, generator=generator)
        run = _run_of(twin.to(device), name)

        def in_parts(x: Tensor) -> Tensor:
            _, state = step(run, x[:, :5], State())
            return step(run, x[:, 5:], state)[0]

        def agrees(dtype: torch.dtype) -> bool:
            twin.to(dtype)
            x = draw(2, 9, width, seed=1).to(device, dtype)
            bar = CPU_FP32_BAR if (device.type, dtype) == ("cpu", torch.float32) else BAR
            return Pair(in_parts, lambda x: run(x, None)[:, 5:], [x], bar).gap() <= bar

        try:
            with torch.autocast(device.type, enabled=False):
                try:
                    _continues[key] = agrees(torch.float32)
                # Kernels of fla and causal_conv1d may take only 16-bit inputs.
                except (AssertionError, RuntimeError, ValueError):
                    _continues[key] = agrees(torch.bfloat16)
        except (TypeError, AttributeError, RuntimeError) as error:
            kind = type(module).__name__
            raise ValueError(f"{kind}: this recurrent layer cannot be split: {error}") from error
    return _continues[key]
