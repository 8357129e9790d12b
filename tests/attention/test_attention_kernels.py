"""Test every kernel of packed attention that runs on a CPU against the definition of attention."""

import pytest
import torch

from grpo_fast.attention import TreeLayout, dispatch, spans, tree
from grpo_fast.attention import layout as layout_module
from grpo_fast.attention.layout import AttentionParams
from tests.attention.layouts import ATTENTION, inputs, layout_of, results, two_levels

FLASH, EXPLICIT = ATTENTION["flash_cpu"], ATTENTION["explicit"]
LAYOUTS = {
    "one segment": ([7], []),
    "packed: equal, similar and single-token segments": ([9, 13, 9, 2, 1, 17], []),
    "groups and plain segments": ([9, 4, 5, 1, 3, 2, 7, 10], [3, 2]),
    "groups of similar shape": ([9, 8, 8, 4, 4, 4, 3, 5, 2], [2, 2, 2]),
    "a tree whose ancestors have no descendants at some distance": (
        [3, 2, 4, 1, 3, 2, 5, 2, 1, 3, 6],
        (-1, -1, 0, 0, 1, 2, 2, 4, 5, 5, -1),
    ),
    "a chain, five levels deep": ([4, 3, 1, 2, 5], (-1, 0, 1, 2, 3)),
    "longer than a block of flex": ([150, 140, 3, 130], [2]),
    "a tree longer than blocks of flex": ([140, 150, 130, 3, 260, 9], (-1, 0, 0, 1, 2, 3)),
}
RULES = [AttentionParams(0.4, window) for window in (None, 1, 4, 64)]
RULES += [AttentionParams(0.4, window, 2.0) for window in (None, 4)]


@pytest.fixture(params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def layout(request):
    return layout_of(*LAYOUTS[request.param])


def definition(q, k, v, layout, params):
    """Compute attention row by row from its definition, without code of the package.

    A query sees its segment and the ancestors of the segment, up to the query's position.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    out, start, paths = [], 0, {-1: []}
    for segment, (length, parent) in enumerate(zip(layout.lengths, layout.parents, strict=True)):
        paths[segment] = paths[parent] + list(range(start, start + length))
        for row in range(start, start + length):
            seen = paths[segment][: len(paths[parent]) + row + 1 - start]
            seen = seen[-(params.window or 10**9) :]
            scores = torch.einsum("hd,khd->hk", q[row], k[seen]) * params.scale
            if params.softcap:
                scores = params.softcap * torch.tanh(scores / params.softcap)
            if params.sinks is not None:  # one more key, whose value is 0
                scores = torch.cat([scores, params.sinks[:, None]], -1)
            weights = scores.softmax(-1)[:, : len(seen)]
            out.append(torch.einsum("hk,khd->hd", weights, v[seen]))
        start += length
    return torch.stack(out)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("params", RULES, ids=str)
def test_explicit_and_the_dense_reference_are_the_definition(layout, params):
    given = inputs(layout)
    expected = results(definition, given, layout, params)
    for attention in (dispatch.dense_attention, EXPLICIT):
        assert_equal(results(attention, given, layout, params), expected)


@pytest.mark.parametrize("params", RULES, ids=str)
def test_sinks(layout, params):
    """Check output and gradients, also those of the sinks, for every kernel that takes the rule."""
    *qkv, grad = inputs(layout)
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64)
    found = []
    kernels = [definition, dispatch.dense_attention, EXPLICIT]
    for attention in kernels if params[1:3] != (None, None) else [*kernels, FLASH]:
        leaves = [x.clone().requires_grad_() for x in (*qkv, sinks)]
        out = attention(*leaves[:3], layout, params._replace(sinks=leaves[3]))
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for others in found[1:]:
        assert_equal(others, found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_cpu_kernel_agrees_with_the_reference_with_sinks(dtype):
    kind = dispatch.Kind("cpu", dtype, 8, has_sinks=True)
    for provider in dispatch.candidates(kind):
        assert dispatch.pair_of(provider.attend, kind).difference() is None


SINK = AttentionParams(0.4, sinks=torch.linspace(-1, 2, 4, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("params", [AttentionParams(0.4), AttentionParams(0.4, 4, 2.0), SINK])
@pytest.mark.parametrize("name", ["groups and plain segments", *list(LAYOUTS)[-2:]])
def test_flex_is_explicit(name, params):
    """Check that flex_attention gives the same output as the explicit kernel.

    Only the forward pass is tested, because flex_attention has no backward pass on a CPU.
    """
    layout = layout_of(*LAYOUTS[name])
    *qkv, _ = inputs(layout)
    assert_equal([tree.attend_flex(*qkv, layout, params)], [EXPLICIT(*qkv, layout, params)])


def test_flex_trains_with_a_softcap_that_was_first_used_in_inference_mode():
    """Check the gradient of a soft cap that a rollout has used before, in inference mode."""
    score, cpu = torch.tensor(1.0, requires_grad=True), torch.device("cpu")
    with torch.inference_mode():
        tree._score_mod(1.75, cpu)
    tree._score_mod(1.75, cpu)(score, *[torch.tensor(0)] * 4).backward()
    expected = 1 - torch.tensor(1 / 1.75).tanh() ** 2
    torch.testing.assert_close(score.grad, expected)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
def test_flash_cpu_is_explicit(layout, heads, poisoned_memory):
    given = inputs(layout, heads)
    found, expected = (results(x, given, layout, AttentionParams(0.4)) for x in (FLASH, EXPLICIT))
    assert_equal(found, expected)


@pytest.mark.parametrize("attention", [FLASH, EXPLICIT], ids=["flash_cpu", "explicit"])
def test_batching_spans_of_equal_lengths_changes_no_bit(attention, monkeypatch):
    """Check batches of adjacent spans, batches of spans that are apart, and divided batches.

    The tests run in one thread. With several threads, the last bits of flash_cpu may differ.
    """
    found = []
    for limit, num_batches in ((1, [13, 3]), (8, [9, 3]), (512, [5, 2])):
        monkeypatch.setattr(layout_module, "BATCH_TOKENS", limit)
        layout = two_levels([9, 9, 5, 4, 3, 4, 3, 4, 4, 2, 2, 4, 3], [3, 3, 2])
        assert [len(call.spans.batches) for call in layout.calls] == num_batches
        given = inputs(layout, dtype=torch.float32)
        found.append(results(attention, given, layout, AttentionParams(0.4)))
    for others in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(others, found[0], strict=True))


def test_the_merge_in_pieces_changes_no_bit(monkeypatch):
    layout = two_levels([9, 4, 5, 1, 3, 2, 7, 10], [3, 2])
    given = inputs(layout, dtype=torch.bfloat16)
    whole = results(FLASH, given, layout, AttentionParams(0.4))
    monkeypatch.setattr(tree, "MERGE_NUMBERS", 100)  # three blocks of 32 rows
    pieces = results(FLASH, given, layout, AttentionParams(0.4))
    assert all(torch.equal(x, y) for x, y in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("attention", [FLASH, EXPLICIT], ids=["flash_cpu", "explicit"])
def test_strided_inputs(layout, attention):
    """Check that attention accepts strided q, k, v and gradients.

    q, k and v are slices of a fused projection, and the gradient of the output is an expanded
    scalar.
    """
    kernel = attention.keywords["kernel"]

    def backward(grad, *rest):
        assert grad.stride()[-2:] == (8, 1)  # FlashAttention requires this layout
        return kernel.backward(grad, *rest)

    *qkv, grad = inputs(layout)
    fused = torch.cat(qkv, dim=1).requires_grad_()
    q_k_v = fused.split([4, 2, 2], dim=1)
    out = attention(*q_k_v, layout, AttentionParams(0.4), kernel=kernel._replace(backward=backward))
    got = torch.autograd.grad(out.sum(), fused)
    expected = results(EXPLICIT, [*qkv, torch.ones_like(grad)], layout, AttentionParams(0.4))[1:]
    assert_equal(got, [torch.cat(expected, dim=1)])


@pytest.mark.parametrize("chosen", range(3), ids="qkv")
def test_numbers_of_a_head_need_not_be_adjacent(chosen, layout):
    """Check an input whose last dimension has a stride of 2, which torch's kernel would misread."""
    given = inputs(layout)
    expected = results(FLASH, given, layout, AttentionParams(0.4))
    given[chosen] = given[chosen].repeat_interleave(2, -1)[..., ::2]
    assert_equal(results(FLASH, given, layout, AttentionParams(0.4)), expected)


def test_explicit_chunks_change_nothing(monkeypatch):
    """Check that the explicit kernel gives the same results if it processes queries in chunks.

    A chunk must also skip the keys that none of its queries sees.
    """
    layout = two_levels([150, 140, 3, 130], [2])
    given = inputs(layout)
    for params in RULES:
        whole = results(EXPLICIT, given, layout, params)
        monkeypatch.setattr(spans, "CHUNK_SCORES", 40_000)
        cut = results(EXPLICIT, given, layout, params)
        monkeypatch.undo()
        assert_equal(cut, whole)
    block = torch.empty(1, 4, 150, 8)
    chunks = list(spans._chunks(block, block, True, 20))
    assert len(chunks) == 8 and chunks[3].keys == slice(41, 80)


def test_explicit_under_autocast_stays_in_fp32():
    layout = two_levels([9, 4, 5], [2])
    given = inputs(layout, dtype=torch.float32)
    plain = results(EXPLICIT, given, layout, AttentionParams(0.4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results(EXPLICIT, given, layout, AttentionParams(0.4))
    assert all(torch.equal(x, y) for x, y in zip(plain, cast, strict=True))


def test_blocks_of_flex_cover_what_is_visible(layout):
    """Check that flex's block map has a block if and only if a query in it sees one of its keys.

    In a block that is listed as full, every query must see every key, because no mask is applied.
    """
    for window in (None, 1, 4, 100, 128, 129, 200):
        number = -(-layout.total // tree.FLEX_BLOCK)
        padded = torch.zeros(2 * [number * tree.FLEX_BLOCK], dtype=torch.bool)
        padded[: layout.total, : layout.total] = layout.visible(window)
        blocks = padded.view(number, tree.FLEX_BLOCK, number, tree.FLEX_BLOCK)
        some, full = tree.block_map(layout, window)
        assert torch.equal(some, blocks.any(3).any(1))
        assert not (full & ~blocks.all(3).all(1)).any()
    assert TreeLayout.of([600]).total and tree.block_map(TreeLayout.of([600]), None)[1].sum() == 6
