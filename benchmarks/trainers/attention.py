"""Speed of the attention with shared prompts, compared with plain packing.

    python -m benchmarks.trainers.attention [--quick] [--cases 2000,64,8 ...] [--json PATH]

A case P,C,G is one prompt of P tokens with G completions of C tokens. The shared layout stores the
prompt once, and the packed layout repeats it for each completion. The outputs and all gradients of
both layouts are compared before they are timed. Forward and backward are timed in one process in
interleaved rounds, so the ratio is reliable even if the times vary. On a GPU, every installed
version of FlashAttention gets a row. trees.py compares the same layouts for the trunk of a model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.exact import relative_l2
from benchmarks.trainers import options as cli
from benchmarks.trainers.options import Case
from grpo_fast.attention import PackedGroups, dispatch, pack_groups
from grpo_fast.attention.dispatch import Attention, Kind
from grpo_fast.attention.layout import AttentionParams

Step = Callable[[], Any]  # returns the output and the gradients
# The cases: prompt length and completion length in tokens, and number of completions.
CASES: dict[str, list[Case]] = {
    "quick": [(64, 8, 4)],
    "cpu": [(2000, 64, 8), (512, 64, 8), (150, 200, 8), (20, 32, 8)],
    "cuda": [(8192, 512, 16), (1500, 250, 16), (150, 200, 8)],
}


class Heads(NamedTuple):
    """Sizes of a model.

    Attributes:
        name: name of the model.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: size of a head.
        intermediate: size of the MLP.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


CPU_MODELS = [Heads("gsm8k-tiny", 6, 3, 32, 512)]
GPU_MODELS = [Heads("Qwen2.5-0.5B", 14, 2, 64, 4864), Heads("Qwen2.5-7B", 28, 4, 128, 18944)]


DEFAULTS = cli.Defaults(threads=1, budget=(10.0, 0.2), rounds=(15, 15))


def main() -> None:
    options = cli.parsed_cases(cli.new_parser(__doc__), DEFAULTS, "P,C,G", CASES)
    rows: list[dict[str, Any]] = []
    for case in options.cases:
        for model in CPU_MODELS if options.device == "cpu" else GPU_MODELS:
            rows += time_attention(case, model, options)
    title = "attention, shared against packed, forward + backward"
    cli.save(options, title, {"dtype": str(options.dtype)}, cases=rows)


def packs(case: Case, device: str) -> tuple[PackedGroups, PackedGroups, Tensor]:
    """Pack the prompt and the completions of a case in both layouts.

    Returns:
        The shared layout, the packed layout, and a tensor (T,). For each row of the packed layout,
        it has the index of the row with the same token in the shared layout.
    """
    prompt, completion, group = case
    numbers = torch.arange(prompt + completion * group)
    groups = [(numbers[:prompt], list(numbers[prompt:].split(completion)))]
    shared, packed = (pack_groups(groups, shared=flag, device=device) for flag in (True, False))
    row_of = torch.empty_like(numbers).to(device)
    row_of[shared.input_ids[0]] = torch.arange(shared.layout.total, device=device)
    return shared, packed, row_of[packed.input_ids[0]]


def time_attention(case: Case, model: Heads, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Verify and time both layouts with every attention kernel that supports the case."""
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
    # Set the upstream gradient of a prompt row to 0 in all copies but the first. Otherwise, the
    # gradients of the two layouts would differ.
    copies[3] = copies[3] * first[:, None, None]
    params = AttentionParams(model.head_dim**-0.5)
    kind = Kind(options.device, options.dtype, model.head_dim)
    common: dict[str, Any] = {"what": "attention", "model": model.name}
    common |= dict(zip(("prompt", "completion", "group"), case, strict=True))
    common["tokens_ratio"] = packed.layout.total / shared.layout.total
    rows = []
    for provider in dispatch.candidates(kind):
        if provider.name in ("explicit", "flex") and kind.device == "cuda":
            continue  # on a GPU, they only replace a missing FlashAttention
        steps = {
            "packed": attention_step(provider.attend, copies, packed, params),
            "shared": attention_step(provider.attend, tensors, shared, params),
        }
        error = attention_error(steps["shared"](), steps["packed"](), origin, first)
        row = common | {"kernel": provider.name, "difference": error}
        rows.append(row | cli.compared(steps, error, options))
        print(f"{case} {model.name:<14} {provider.name:<10} {cli.described(rows[-1])}", flush=True)
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

    The gradient of a row in the shared layout is compared with the sum of the gradients of its
    copies in the packed layout.
    """
    wide = [x.double() for x in packed]
    sums = [
        torch.zeros_like(x, dtype=torch.float64).index_add_(0, origin, y)
        for x, y in zip(shared, wide, strict=True)
    ]
    sums[0] = torch.zeros_like(sums[0]).index_copy_(0, origin[first], wide[0][first])
    return max(relative_l2(x, y) for x, y in zip(shared, sums, strict=True))


if __name__ == "__main__":
    main()
