"""Every kernel behind the packed attention that runs on a CPU against the definition."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from grpo_fast.attention import TreeLayout, dispatch
from grpo_fast.attention.kernels import explicit, flex, torch_cpu, tree
from grpo_fast.attention.kernels.kernel import Kernel
from grpo_fast.attention.kernels.reference import visible
from grpo_fast.attention.kernels.tree import attend
from grpo_fast.attention.spans import Rule
from tests.attention.layouts import two_levels

FLASH = Kernel("flash_cpu", torch_cpu.forward, torch_cpu.backward)
EXPLICIT = Kernel("explicit", explicit.forward, explicit.backward)
LAYOUTS = {
    "one segment": ([7], []),
    "packed: equal, similar and single-token segments": ([9, 13, 9, 2, 1, 17], []),
    "one group": ([6, 4, 1, 3], [3]),
    "groups and plain segments": ([9, 4, 5, 1, 3, 2, 7, 10], [3, 2]),
    "groups of similar shape": ([9, 8, 8, 4, 4, 4, 3, 5, 2], [2, 2, 2]),
    "equal completions, one call": ([5, 3, 3, 3], [3]),
    "a tree whose ancestors have no descendants at some distance": (
        [3, 2, 4, 1, 3, 2, 5, 2, 1, 3, 6],
        (-1, -1, 0, 0, 1, 2, 2, 4, 5, 5, -1),
    ),
    "a chain, five levels deep": ([4, 3, 1, 2, 5], (-1, 0, 1, 2, 3)),
    "longer than a block of flex": ([150, 140, 3, 130], [2]),
    "a tree longer than blocks of flex": ([140, 150, 130, 3, 260, 9], (-1, 0, 0, 1, 2, 3)),
}
RULES = [
    Rule(0.4),
    Rule(0.4, 1),
    Rule(0.4, 4),
    Rule(0.4, 64),
    Rule(0.4, None, 2.0),
    Rule(0.4, 4, 2.0),
]


def layout_of(name):
    lengths, sharing = LAYOUTS[name]
    return (
        TreeLayout.of(lengths, parents=sharing) if -1 in sharing else two_levels(lengths, sharing)
    )


@pytest.fixture(params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def layout(request):
    return layout_of(request.param)


def inputs_of(layout, dtype=torch.float64, heads=4, kv_heads=2, dim=8):
    generator = torch.Generator().manual_seed(3)
    shapes = [(layout.total, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    *qkv, grad = (
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes
    )
    return [x.requires_grad_() for x in qkv], grad


def definition(q, k, v, layout, rule):
    """Row by row from "sees its segment and its ancestors up to itself": shares no code with the
    package.
    """
    starts = torch.tensor([0, *layout.lengths]).cumsum(0).tolist()
    repeat = q.shape[1] // k.shape[1]
    rows, paths = [], {-1: []}
    for segment, parent in enumerate(layout.parents):
        paths[segment] = paths[parent] + list(range(starts[segment], starts[segment + 1]))
        for row in range(starts[segment], starts[segment + 1]):
            seen = paths[segment][: len(paths[parent]) + row + 1 - starts[segment]]
            seen = seen[-(rule.window or 10**9) :]
            heads = []
            for head in range(q.shape[1]):
                scores = (k[seen, head // repeat] @ q[row, head]) * rule.scale
                if rule.softcap:
                    scores = rule.softcap * torch.tanh(scores / rule.softcap)
                heads.append(scores.softmax(-1) @ v[seen, head // repeat])
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def results(function, qkv, grad, layout, rule):
    out = function(*qkv, layout, rule)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


@pytest.mark.parametrize("rule", RULES, ids=str)
# The definition goes row by row: not the longest.
@pytest.mark.parametrize("name", list(LAYOUTS)[:-2])
def test_explicit_merged_and_gathered_are_the_definition(name, rule):
    layout = layout_of(name)
    qkv, grad = inputs_of(layout)
    expected = results(definition, qkv, grad, layout, rule)
    for gather in (True, rule.window is not None) if layout.has_tree else (None,):
        got = results(partial(attend, kernel=EXPLICIT, gather=gather), qkv, grad, layout, rule)
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_dense_reference_is_explicit(layout, rule):
    qkv, grad = inputs_of(layout)
    both = [
        results(f, qkv, grad, layout, rule)
        for f in (dispatch.reference.attend, partial(attend, kernel=EXPLICIT))
    ]
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rule", [Rule(0.4), Rule(0.4, 4, 2.0)], ids=str)
@pytest.mark.parametrize("name", ["groups and plain segments", *list(LAYOUTS)[-2:]])
def test_flex_is_explicit(name, rule):
    """Forward only: flex_attention has no backward on a CPU."""
    layout = layout_of(name)
    qkv = [x.detach() for x in inputs_of(layout)[0]]
    got, expected = flex.attend(*qkv, layout, rule), attend(*qkv, layout, rule, kernel=EXPLICIT)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
def test_flash_cpu_is_explicit(layout, heads, poisoned_memory):
    qkv, grad = inputs_of(layout, heads=heads[0], kv_heads=heads[1])
    both = [
        results(partial(attend, kernel=kernel), qkv, grad, layout, Rule(0.4))
        for kernel in (FLASH, EXPLICIT)
    ]
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


def test_the_merge_in_pieces_changes_no_bit(monkeypatch):
    layout = two_levels([9, 4, 5, 1, 3, 2, 7, 10], [3, 2])
    qkv, grad = inputs_of(layout, torch.bfloat16)
    whole = results(partial(attend, kernel=FLASH), qkv, grad, layout, Rule(0.4))
    monkeypatch.setattr(tree, "MERGE_NUMBERS", 100)  # three rows of 32
    pieces = results(partial(attend, kernel=FLASH), qkv, grad, layout, Rule(0.4))
    assert all(torch.equal(x, y) for x, y in zip(whole, pieces, strict=True))


def test_flash_cpu_refuses_keys_in_front_of_the_queries():
    """Its causal order starts at the top left, so copied prompts would be seen wrongly."""
    layout = two_levels([3, 2, 2], [2])
    with pytest.raises(ValueError, match="as many keys as queries"):
        attend(*inputs_of(layout)[0], layout, Rule(0.4), kernel=FLASH, gather=True)


@pytest.mark.parametrize("kernel", [FLASH, EXPLICIT], ids=lambda kernel: kernel.name)
def test_strided_inputs(layout, kernel):
    """q, k and v as a fused projection leaves them, and a gradient that is an expanded scalar."""

    def backward(grad, *rest):
        assert grad.stride()[-2:] == (8, 1)  # FlashAttention takes nothing else
        return kernel.backward(grad, *rest)

    qkv, _ = inputs_of(layout)
    fused = torch.cat([x.detach() for x in qkv], dim=1).requires_grad_()
    out = attend(
        *fused.split([4, 2, 2], dim=1), layout, Rule(0.4), kernel=kernel._replace(backward=backward)
    )
    got = torch.autograd.grad(out.sum(), fused)[0]
    expected = torch.autograd.grad(attend(*qkv, layout, Rule(0.4), kernel=EXPLICIT).sum(), qkv)
    torch.testing.assert_close(got, torch.cat(expected, dim=1), rtol=0, atol=1e-13)


def test_explicit_chunks_change_nothing(monkeypatch):
    """Long prompts are cut into chunks of queries; what a chunk cannot see is not multiplied."""
    layout = two_levels([150, 140, 3, 130], [2])
    qkv, grad = inputs_of(layout)
    for rule in RULES:
        whole = results(partial(attend, kernel=EXPLICIT), qkv, grad, layout, rule)
        monkeypatch.setattr(explicit, "CHUNK_SCORES", 40_000)
        cut = results(partial(attend, kernel=EXPLICIT), qkv, grad, layout, rule)
        monkeypatch.undo()
        for x, y in zip(whole, cut, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
    block = torch.empty(1, 4, 150, 8)
    chunks = list(explicit._chunks(block, block, True, 20))
    assert len(chunks) == 8 and chunks[3].keys == slice(41, 80)


def test_explicit_under_autocast_stays_in_fp32():
    layout = two_levels([9, 4, 5], [2])
    qkv, grad = inputs_of(layout, torch.float32)
    plain = results(partial(attend, kernel=EXPLICIT), qkv, grad, layout, Rule(0.4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results(partial(attend, kernel=EXPLICIT), qkv, grad, layout, Rule(0.4))
    assert all(torch.equal(x, y) for x, y in zip(plain, cast, strict=True))


def test_blocks_of_flex_cover_what_is_visible(layout):
    """A block of keys is listed if and only if some query sees some key in it; a full one needs no
    mask.
    """
    for window in (None, 1, 4, 100, 128, 129, 200):
        number = -(-layout.total // flex.BLOCK)
        padded = torch.zeros(2 * [number * flex.BLOCK], dtype=torch.bool)
        padded[: layout.total, : layout.total] = visible(layout, window)
        blocks = padded.view(number, flex.BLOCK, number, flex.BLOCK)
        some, full = flex.block_map(layout, window)
        assert torch.equal(some, blocks.any(3).any(1))
        assert not (full & ~blocks.all(3).all(1)).any()
    assert TreeLayout.of([600]).total and flex.block_map(TreeLayout.of([600]), None)[1].sum() == 6
