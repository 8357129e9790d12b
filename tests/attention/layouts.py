"""Layouts, random inputs and function calls for the tests of packed attention."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_fast.attention import TreeLayout, dispatch
from grpo_fast.attention.layout import AttentionParams

# ATTENTION maps each provider name to its function (q, k, v, layout, params) → output.
ATTENTION: dict[str, Callable] = {p.name: p.attend for p in dispatch.PROVIDERS}


def two_levels(
    lengths: Sequence[int], sharing: Sequence[int] = (), device: str = "cpu"
) -> TreeLayout:
    """Build a layout of two levels, prompts and completions.

    Args:
        lengths: Number of tokens of each sequence. The prompts are first. The completions are next,
            in the order of their prompts. Sequences that belong to no prompt are last.
        sharing: For each prompt, the number of its completions.
        device: Device of the layout.
    """
    parents = [-1] * len(sharing) + [p for p, count in enumerate(sharing) for _ in range(count)]
    parents += [-1] * (len(lengths) - len(parents))
    return TreeLayout.of(lengths, device, parents=parents)


def layout_of(lengths: Sequence[int], shape: Sequence[int]) -> TreeLayout:
    """Build a layout from `lengths` and `shape`.

    If `shape` contains a root (-1), it is the list of parents. Otherwise it is passed to
    `two_levels` as `sharing`.
    """
    return TreeLayout.of(lengths, parents=shape) if -1 in shape else two_levels(lengths, shape)


def inputs(
    layout: TreeLayout, heads: tuple[int, int] = (4, 2), dim: int = 8, dtype=torch.float64
) -> list[Tensor]:
    """Return random tensors q, k, v and the gradient of the output, on the CPU.

    Args:
        layout: Layout that determines the number of tokens.
        heads: Numbers of query heads and of key heads.
        dim: Head dimension.
        dtype: Dtype of the tensors.
    """
    generator = torch.Generator().manual_seed(3)
    shapes = [(layout.total, n, dim) for n in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def results(
    attention: Callable,
    given: Sequence[Tensor],
    layout: TreeLayout,
    params: AttentionParams,
    dtype=None,
) -> list[Tensor]:
    """Run an attention function on the tensors of `inputs`.

    Args:
        attention: Function (q, k, v, layout, params) → output.
        given: q, k, v and the gradient of the output.
        layout: Layout of the tokens.
        params: Scale, window and softcap.
        dtype: Dtype of the computation, or None for the dtype of the inputs.

    Returns:
        The output, dq, dk and dv.
    """
    *qkv, grad = (x.to(dtype or x.dtype) for x in given)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attention(*leaves, layout, params)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
