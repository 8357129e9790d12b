"""Test packed attention in C++ against the explicit kernel in fp64.

The tests cover sizes at the borders of tiles, blocks and registers, strides, NaN, and errors. The
bits of a row must not depend on other segments.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast.attention import TreeLayout
from grpo_fast.attention.kernels import csrc
from grpo_fast.attention.layout import AttentionParams, Spans
from grpo_fast.kernels.cpu import loader
from tests.attention.layouts import ATTENTION, inputs, layout_of, results, two_levels

REASON = loader.unavailable("attention")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"C++ kernels: {REASON}")

CSRC, EXPLICIT = ATTENTION["csrc"], ATTENTION["explicit"]
LAYOUTS = {  # lengths of segments, then completions per prompt or the parent of each segment
    "single tokens": ([1, 1, 1], [1]),
    "around a tile": ([15, 16, 17, 31, 32, 33], [3]),
    "around the blocks": ([127, 128, 129, 130, 2], [2]),
    "plain": ([260, 7, 64], []),
    "a tree": ([17, 130, 40, 1, 9, 150, 3], (-1, -1, 0, 0, 1, 2, 4)),
}
HEADS = [((4, 4), 32), ((4, 2), 20), ((6, 1), 64), ((7, 1), 131)]  # ((query heads, key heads), D)
RULE = AttentionParams(0.3)
ROUNDING = 4 * 2**-23


def given_of(layout, heads=(4, 2), depth=32):
    return inputs(layout, heads, depth, torch.float32)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_against_fp64(name, heads, poisoned_memory):
    """Check that errors are at most a small multiple of those of torch's fp32 kernel.

    The factor is 2 for the output and 3 for gradients. The tolerance also includes the rounding of
    a dot product of D terms, because some rows have very few terms.
    """
    layout = layout_of(*LAYOUTS[name])
    given = given_of(layout, *heads)
    exact = results(EXPLICIT, given, layout, RULE, torch.float64)
    of_torch = results(ATTENTION["flash_cpu"], given, layout, RULE)
    found = results(CSRC, given, layout, RULE)
    for i, (x, y, z) in enumerate(zip(found, exact, of_torch, strict=True)):
        allowed = (3 if i else 2) * (z - y).abs().max() + ROUNDING * heads[1] ** 0.5
        assert (x - y).abs().max() <= allowed, ("out", "dq", "dk", "dv")[i]


def test_a_segment_has_the_same_bits_beside_any_others_and_on_any_threads():
    layout = TreeLayout.of([40, 9, 70, 33])
    given = given_of(layout)
    own = slice(49, 119)
    alone = results(CSRC, [x[own] for x in given], TreeLayout.of([70]), RULE)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        whole = results(CSRC, given, layout, RULE)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(x[own], y) for x, y in zip(whole, alone, strict=True))


def test_views_of_a_fused_projection_and_an_expanded_gradient():
    layout = two_levels([9, 5, 6], [2])
    *qkv, grad = given_of(layout)
    fused = torch.cat(qkv, dim=1).requires_grad_()
    loss = CSRC(*fused.split([4, 2, 2], dim=1), layout, RULE).sum()
    (found,) = torch.autograd.grad(loss, fused)
    expected = results(EXPLICIT, [*qkv, torch.ones_like(grad)], layout, RULE)
    torch.testing.assert_close(found, torch.cat(expected[1:], 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", range(3), ids=["q", "k", "v"])
def test_nan_stays_in_its_segment_and_is_seen_behind_it(which):
    layout = TreeLayout.of([20, 20, 20])
    given = given_of(layout)
    given[which][25, 0, 3] = torch.nan
    out, *_ = results(CSRC, given, layout, RULE)
    hit = out.isnan().any(-1).any(-1)
    assert not hit[:20].any() and not hit[40:].any() and hit[25]
    assert which == 0 or hit[25:40].all()


def test_large_scores_leave_one_key():
    layout = TreeLayout.of([40])
    given = [1e3 * x for x in given_of(layout)]
    found, *_ = results(CSRC, given, layout, RULE)
    exact, *_ = results(EXPLICIT, given, layout, RULE, torch.float64)
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "name, change",
    [
        ("q", lambda x: x | {"q": x["q"].double()}),
        ("k", lambda x: x | {"k": x["k"][..., :8]}),
        ("v", lambda x: x | {"v": x["v"][:3]}),
        ("cu_q", lambda x: x | {"spans": Spans.of([5], [5], causal=True)}),
        ("cu_k", lambda x: x | {"spans": Spans.of([4, 2], [2, 4], causal=True)}),
        ("cu_k", lambda x: x | {"spans": Spans.of([2, 4], [6, 0], causal=False)}),
    ],
)
def test_refusals_name_the_argument(name, change):
    q, k, v, _ = given_of(TreeLayout.of([6]))
    given = {"q": q, "k": k, "v": v, "spans": Spans.of([4, 2], [4, 2], causal=True), "params": RULE}
    csrc.forward(**given)
    with pytest.raises(RuntimeError, match=rf"\b{name}\b"):
        csrc.forward(**change(given))
