"""Packed attention in C++ against the explicit kernel in fp64: sizes at the edges of tiles, of
blocks and of registers; strides, NaN, bits that depend on a row's own segment alone, refusals.
"""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch

from grpo_fast.attention import TreeLayout, dispatch
from grpo_fast.attention.dispatch import Kind
from grpo_fast.attention.kernels import csrc, explicit, torch_cpu
from grpo_fast.attention.kernels.kernel import Kernel
from grpo_fast.attention.kernels.tree import attend
from grpo_fast.attention.spans import Rule, Spans
from grpo_fast.kernels.cpu import loader
from tests.attention.layouts import two_levels

REASON = loader.load("attention")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"C++ kernels: {REASON}")

CSRC = Kernel("csrc", csrc.forward, csrc.backward)
FLASH = Kernel("flash_cpu", torch_cpu.forward, torch_cpu.backward)
EXPLICIT = Kernel("explicit", explicit.forward, explicit.backward)
LAYOUTS = {  # lengths of segments; of the first ones, how many completions look on each; or parents
    "single tokens": ([1, 1, 1], [1]),
    "around a tile": ([15, 16, 17, 31, 32, 33], [3]),
    "around the blocks": ([127, 128, 129, 130, 2], [2]),
    "plain": ([260, 7, 64], []),
    "a tree": ([17, 130, 40, 1, 9, 150, 3], (-1, -1, 0, 0, 1, 2, 4)),
}
HEADS = [(4, 4, 32), (4, 2, 20), (6, 1, 64), (7, 1, 131)]  # of queries, of keys, D
RULE = Rule(0.3)
ROUNDING = 4 * 2**-23


def inputs(layout, heads=(4, 2, 32), seed=0):
    g = torch.Generator().manual_seed(seed)
    of_q, of_k, depth = heads
    return [torch.randn(layout.total, n, depth, generator=g) for n in (of_q, of_k, of_k, of_q)]


def results(kernel, given, layout, dtype=torch.float32, **options):
    *qkv, grad = (x.to(dtype) for x in given)
    qkv = [x.requires_grad_() for x in qkv]
    out = attend(*qkv, layout, RULE, kernel=kernel, **options)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, qkv, grad))]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_against_fp64(name, heads, poisoned_memory):
    """At most twice the error of torch's own kernel in the same dtype (gradients: three times),
    beside the rounding of a dot product of D terms, as some of these rows are very few.
    """
    lengths, sharing = LAYOUTS[name]
    of_tree = -1 in sharing
    layout = TreeLayout.of(lengths, parents=sharing) if of_tree else two_levels(lengths, sharing)
    given = inputs(layout, heads)
    exact = results(EXPLICIT, given, layout, torch.float64)
    of_torch = results(FLASH, given, layout)
    for gather in (None, True) if sharing else (None,):
        found = results(CSRC, given, layout, gather=gather)
        for i, (x, y, z) in enumerate(zip(found, exact, of_torch, strict=True)):
            allowed = (3 if i else 2) * (z - y).abs().max() + ROUNDING * heads[2] ** 0.5
            assert (x - y).abs().max() <= allowed, ("out", "dq", "dk", "dv")[i]


def test_a_segment_has_the_same_bits_beside_any_others_and_on_any_threads():
    layout = TreeLayout.of([40, 9, 70, 33])
    given = inputs(layout)
    own = slice(49, 119)
    alone = results(CSRC, [x[own] for x in given], TreeLayout.of([70]))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        whole = results(CSRC, given, layout)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x[own], y) for x, y in zip(whole, alone, strict=True))


def test_views_of_a_fused_projection_and_an_expanded_gradient():
    layout = two_levels([9, 5, 6], [2])
    *qkv, _ = inputs(layout)
    fused = torch.cat(qkv, dim=1).requires_grad_()
    loss = attend(*fused.split([4, 2, 2], dim=1), layout, RULE, kernel=CSRC).sum()
    (found,) = torch.autograd.grad(loss, fused)
    expected = results(EXPLICIT, [*qkv, torch.ones(20, 4, 32)], layout)
    torch.testing.assert_close(found, torch.cat(expected[1:], 1).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
def test_nan_stays_in_its_segment_and_is_seen_behind_it(which):
    layout = TreeLayout.of([20, 20, 20])
    given = inputs(layout)
    given[which][25, 0, 3] = torch.nan
    out, *_ = results(CSRC, given, layout)
    hit = out.isnan().any(-1).any(-1)
    assert not hit[:20].any() and not hit[40:].any() and hit[25]
    assert which == 0 or hit[25:40].all()


def test_large_scores_leave_one_key():
    layout = TreeLayout.of([40])
    given = [1e3 * x for x in inputs(layout)]
    for x, y in zip(
        results(CSRC, given, layout)[:1], results(EXPLICIT, given, layout, torch.float64)[:1],
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name, change",
    [
        ("q", lambda x: x | {"q": x["q"].double()}),
        ("k", lambda x: x | {"k": x["k"][..., :8]}),
        ("v", lambda x: x | {"v": x["v"][:3]}),
        ("cu_q", lambda x: x | {"spans": Spans.of([5], [5], causal=True)}),
        ("cu_k", lambda x: x | {"spans": Spans.of([4, 2], [2, 4], causal=True)}),
    ],
)
def test_refusals_name_the_argument(name, change):
    q, k, v, _ = inputs(TreeLayout.of([6]))
    given = {"q": q, "k": k, "v": v, "spans": Spans.of([4, 2], [4, 2], causal=True), "rule": RULE}
    csrc.forward(**given)
    with pytest.raises(RuntimeError, match=rf"\b{name}\b"):
        csrc.forward(**change(given))


def test_without_a_compiler_torch_does_it(monkeypatch, caplog):
    dispatch.choose.cache_clear()
    monkeypatch.setattr(dispatch.loader, "load", lambda name: "no C++ compiler")
    try:
        with caplog.at_level(logging.INFO, logger="grpo_fast"):
            assert dispatch.choose(Kind("cpu", torch.float32, 32)).name == "flash_cpu"
    finally:
        dispatch.choose.cache_clear()


def test_it_is_chosen_and_differentiable_once():
    q, k, v, _ = (x.requires_grad_() for x in inputs(TreeLayout.of([6])))
    layout = TreeLayout.of([6])
    assert dispatch.choose(Kind("cpu", torch.float32, 32)).name == "csrc"
    out = dispatch.packed_rows_attention(q, k, v, layout, scale=0.3)
    torch.testing.assert_close(out, partial(attend, kernel=EXPLICIT)(q, k, v, layout, RULE))
