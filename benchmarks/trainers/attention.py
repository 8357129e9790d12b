"""Speed of shared prompts compared with plain packing, for attention alone and for a model trunk.

    python -m benchmarks.trainers.attention [--quick] [--cases 2000,64,8 ...] [--json PATH]

A case P,C,G is one prompt of P tokens with G completions of C tokens. The shared layout stores the
prompt once, and the packed layout repeats it for each completion. Before the timing, the outputs
and all gradients of both layouts are compared. Forward and backward are timed in one process in
interleaved rounds, so the ratio is reliable even if the times vary. On a GPU, every installed
version of FlashAttention gets a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.exact import TOLERANCE, relative_l2
from benchmarks.trainers.options import Case, Defaults, new_parser, parsed_cases, save_cases, timed
from grpo_fast.attention import PackedGroups, PackedTree, dispatch, pack_groups, register
from grpo_fast.attention.dispatch import Attention, Kind
from grpo_fast.attention.spans import AttentionParams

Step = Callable[[], Any]  # returns the output and the gradients
# Cases, given as (prompt length, completion length, number of completions), with lengths in tokens.
CASES: dict[str, list[Case]] = {
    "quick": [(64, 8, 4)],
    "cpu": [(2000, 64, 8), (512, 64, 8), (150, 200, 8), (20, 32, 8)],
    "cuda": [(8192, 512, 16), (1500, 250, 16), (150, 200, 8)],
}


class Heads(NamedTuple):
    """Sizes of the attention and of the layers of a model.

    Attributes:
        name: name of the model.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: size of a head.
        intermediate: size of the MLP.
        layers: number of layers of the timed trunk. It has little effect on the ratio of the times.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int


CPU_MODELS = [Heads("gsm8k-tiny", 6, 3, 32, 512, 4)]
GPU_MODELS = [Heads("Qwen2.5-0.5B", 14, 2, 64, 4864, 2), Heads("Qwen2.5-7B", 28, 4, 128, 18944, 1)]


DEFAULTS = Defaults(threads=1, budget=(10.0, 0.2), rounds=(15, 15))


def main() -> None:
    """Time every case, print a table and write the report."""
    options = parsed_cases(new_parser(__doc__), DEFAULTS, "P,C,G", CASES)
    rows: list[dict[str, Any]] = []
    for case in options.cases:
        for model in CPU_MODELS if options.device == "cpu" else GPU_MODELS:
            rows += time_attention(case, model, options)
            rows += time_model(case, model, options)
    save_cases(options, "attention and trunk, shared against packed, forward + backward", rows)


def packs(case: Case, device: str) -> tuple[PackedGroups, PackedGroups, Tensor]:
    """Pack the group of a case in both layouts.

    Returns:
        The shared layout, the packed layout, and for each row of the packed layout the index of the
        row with the same token in the shared layout, (T,).
    """
    prompt, completion, group = case
    numbers = torch.arange(prompt + completion * group)
    groups = [(numbers[:prompt], list(numbers[prompt:].split(completion)))]
    shared, packed = (pack_groups(groups, shared=flag, device=device) for flag in (True, False))
    row_of = torch.empty_like(numbers).to(device)
    row_of[shared.input_ids[0]] = torch.arange(shared.layout.total, device=device)
    return shared, packed, row_of[packed.input_ids[0]]


# ---- attention alone ----


def time_attention(case: Case, model: Heads, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Verify and time both layouts with each attention kernel that supports the case."""
    shared, packed, origin = packs(case, options.device)
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (shared.layout.total, n, model.head_dim)
        for n in (model.heads, *[model.kv_heads] * 2, model.heads)
    ]
    random = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors = [x.to(options.device, options.dtype) for x in random]
    places = torch.arange(len(origin), device=origin.device)
    earliest = places.new_full((shared.layout.total,), len(origin))
    earliest.scatter_reduce_(0, origin, places, "amin")
    first = places == earliest[origin]
    copies = [x[origin] for x in tensors]
    # Set the upstream gradient to 0 in all copies of a prompt row but the first. Otherwise, the
    # gradients of the two layouts would differ.
    copies[3] = copies[3] * first[:, None, None]
    params = AttentionParams(model.head_dim**-0.5)
    kind = Kind(options.device, options.dtype, model.head_dim)
    rows = []
    for provider in dispatch.candidates(kind):
        if provider.name in ("explicit", "flex") and kind.device == "cuda":
            continue  # on a GPU, they only replace a missing FlashAttention
        steps = {
            "packed": attention_step(provider.attend, copies, packed, params),
            "shared": attention_step(provider.attend, tensors, shared, params),
        }
        error = attention_error(steps["shared"](), steps["packed"](), origin, first)
        label = Row("attention", case, model.name, provider.name)
        rows.append(row_of_times(label, steps, error, options))
    return rows


def attention_step(
    attention: Attention, tensors: list[Tensor], pack: PackedGroups, params: AttentionParams
) -> Step:
    leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]

    def step() -> tuple[Tensor, ...]:
        out = attention(*leaves, pack.layout, params)
        return out.detach(), *torch.autograd.grad(out, leaves, tensors[3])

    return step


def attention_error(
    shared: tuple[Tensor, ...], packed: tuple[Tensor, ...], origin: Tensor, first: Tensor
) -> float:
    """Return the largest relative L2 difference between the outputs and gradients of both layouts.

    The gradient of a row in the shared layout is compared with the sum over its copies in the
    packed layout.
    """
    wide = [x.double() for x in packed]
    sums = [
        torch.zeros_like(x, dtype=torch.float64).index_add_(0, origin, y)
        for x, y in zip(shared, wide, strict=True)
    ]
    sums[0] = torch.zeros_like(sums[0]).index_copy_(0, origin[first], wide[0][first])
    return max(relative_l2(x, y) for x, y in zip(shared, sums, strict=True))


# ---- a trunk ----


def time_model(case: Case, model: Heads, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Verify and time a random trunk, from token ids to the gradients of all weights."""
    prompt, completion, group = case
    shared, packed, _ = packs(case, options.device)
    vocabulary = max(2, prompt + completion * group)
    layouts = {"shared": shared, "packed": packed}
    steps, error = trunk_steps(layouts, model, vocabulary, prompt + completion, options)
    kernel = dispatch.choose(Kind(options.device, options.dtype, model.head_dim)).name
    named = Row("trunk", case, f"{model.name}, {model.layers} layers", kernel)
    return [row_of_times(named, steps, error, options)]


def trunk_steps(
    layouts: dict[str, Any], model: Heads, vocabulary: int, positions: int,
    options: argparse.Namespace,
) -> tuple[dict[str, Step], float]:  # fmt: skip
    """Build a random trunk. Return a step for each layout, and their results' difference."""
    from transformers import Qwen2Config, Qwen2Model

    config = Qwen2Config(
        vocab_size=vocabulary, max_position_embeddings=positions,
        hidden_size=model.heads * model.head_dim, intermediate_size=model.intermediate,
        num_hidden_layers=model.layers, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
    )  # fmt: skip
    torch.manual_seed(0)
    trunk = Qwen2Model(config).to(options.device, options.dtype)
    trunk.set_attn_implementation(register())
    first, *_ = layouts.values()
    grad = torch.randn(len(first.predicting), config.hidden_size).to(options.device, options.dtype)
    steps = {name: model_step(trunk, pack, grad) for name, pack in layouts.items()}
    results, expected = (step() for step in steps.values())
    pairs = zip(results, expected, strict=True)
    return steps, max(relative_l2(x, y) for x, y in pairs if y.abs().max() > 0)


def model_step(trunk: Any, pack: PackedTree, grad: Tensor) -> Step:
    # Exclude k_proj.bias from the comparison. Its exact gradient is 0, so its relative error is
    # undefined.
    parameters = [p for name, p in trunk.named_parameters() if "k_proj.bias" not in name]

    def step() -> tuple[Tensor, ...]:
        hidden = trunk(**pack.model_inputs).last_hidden_state[0].index_select(0, pack.predicting)
        return hidden.detach(), *torch.autograd.grad(hidden, parameters, grad)

    return step


# ---- timing ----


class Row(NamedTuple):
    """Label of a timed row.

    Attributes:
        what: "attention" or "trunk".
        case: prompt, completion and group.
        model: name of the model whose sizes are used.
        kernel: name of the attention kernel.
    """

    what: str
    case: Case
    model: str
    kernel: str


def row_of_times(
    named: Row, steps: dict[str, Step], error: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Time both steps if their results agree. Print and return the row of the report."""
    what, (prompt, completion, group), model, kernel = named
    row: dict[str, Any] = {"what": what, "model": model, "kernel": kernel, "difference": error}
    row |= {"prompt": prompt, "completion": completion, "group": group}
    row["tokens_ratio"] = group * (prompt + completion - 1) / (prompt + group * (completion - 1))
    label = f"{what:<10} P={prompt:<6} C={completion:<4} G={group:<3} {model:<24} {kernel:<10}"
    if not error <= TOLERANCE[options.dtype]:
        print(f"{label} WRONG: the layouts differ by {error:.2g}; not timed", flush=True)
        return row | {"wrong": True}
    row |= timed(steps, options)
    ms = {name: time["median_ms"] for name, time in row["times"].items()}
    row["ratio"] = ms["packed"] / ms["shared"]
    times = f"packed {ms['packed']:9.2f} ms  shared {ms['shared']:9.2f} ms"
    ratios = f"ratio {row['ratio']:5.2f} (tokens {row['tokens_ratio']:.2f})"
    print(f"{label} {times}  {ratios}  difference {error:.1g}", flush=True)
    return row


if __name__ == "__main__":
    main()
