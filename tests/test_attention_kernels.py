"""Every kernel behind the packed attention against its definition, and the calls of the CUDA kernels without a GPU."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_fast.attention import (
    PackedLayout,
    dispatch,
    flex,
    kernels_cpu,
    kernels_explicit,
    pack_groups,
    register,
    shared_prefix,
)
from grpo_fast.attention.dispatch import Kind
from grpo_fast.attention.kernel import Kernel
from grpo_fast.attention.reference import visible
from grpo_fast.attention.shared_prefix import attend
from grpo_fast.attention.spans import Rule, Spans
from tests.tiny import tiny_model

FLASH = Kernel("flash_cpu", kernels_cpu.forward, kernels_cpu.backward)
EXPLICIT = Kernel("explicit", kernels_explicit.forward, kernels_explicit.backward)
LAYOUTS = {
    "one segment": ([7], []),
    "packed: equal, similar and single-token segments": ([9, 13, 9, 2, 1, 17], []),
    "one group": ([6, 4, 1, 3], [3]),
    "groups and plain segments": ([9, 4, 5, 1, 3, 2, 7, 10], [3, 2]),
    "groups of similar shape": ([9, 8, 8, 4, 4, 4, 3, 5, 2], [2, 2, 2]),
    "equal completions, one call": ([5, 3, 3, 3], [3]),
    "longer than a block of flex": ([150, 140, 3, 130], [2]),
}
RULES = [Rule(0.4), Rule(0.4, 1), Rule(0.4, 4), Rule(0.4, 64), Rule(0.4, None, 2.0), Rule(0.4, 4, 2.0)]
PROVIDERS = {provider.name: provider for provider in dispatch.PROVIDERS}


def layout_of(name):
    lengths, sharing = LAYOUTS[name]
    return PackedLayout.of(lengths, sharing=sharing)


@pytest.fixture(params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def layout(request):
    return layout_of(request.param)


def inputs_of(layout, dtype=torch.float64, heads=4, kv_heads=2, dim=8):
    generator = torch.Generator().manual_seed(3)
    shapes = [(layout.total, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
    *qkv, grad = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return [x.requires_grad_() for x in qkv], grad


def definition(q, k, v, layout, rule):
    """Row by row from "sees its segment and its segment's prompt up to itself": shares no code with the package."""
    starts = torch.tensor([0, *layout.lengths]).cumsum(0).tolist()
    prompts = [None] * len(layout.sharing)
    prompts += [p for p, count in enumerate(layout.sharing) for _ in range(count)]
    prompts += [None] * (len(layout.lengths) - len(prompts))
    repeat = q.shape[1] // k.shape[1]
    rows = []
    for segment, prompt in enumerate(prompts):
        for row in range(starts[segment], starts[segment + 1]):
            seen = list(range(starts[prompt], starts[prompt + 1])) if prompt is not None else []
            seen = (seen + list(range(starts[segment], row + 1)))[-(rule.window or 10**9) :]
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
@pytest.mark.parametrize("name", list(LAYOUTS)[:-1])  # the definition goes row by row: not the longest
def test_explicit_merged_and_gathered_are_the_definition(name, rule):
    layout = layout_of(name)
    qkv, grad = inputs_of(layout)
    expected = results(definition, qkv, grad, layout, rule)
    for gather in (True, None) if layout.sharing else (None,):
        got = results(partial(attend, kernel=EXPLICIT, gather=gather), qkv, grad, layout, rule)
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_reference_and_flex_are_explicit(layout, rule):
    """The dense reference with its gradients; flex_attention forward only: it has no backward on a CPU."""
    qkv, grad = inputs_of(layout)
    expected = results(partial(attend, kernel=EXPLICIT), qkv, grad, layout, rule)
    for x, y in zip(results(dispatch.reference.attend, qkv, grad, layout, rule), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
    detached = [x.detach() for x in qkv]
    torch.testing.assert_close(flex.attend(*detached, layout, rule), expected[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
def test_flash_cpu_is_explicit(layout, heads, poisoned_memory):
    qkv, grad = inputs_of(layout, heads=heads[0], kv_heads=heads[1])
    both = [results(partial(attend, kernel=kernel), qkv, grad, layout, Rule(0.4)) for kernel in (FLASH, EXPLICIT)]
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


def test_the_merge_in_pieces_changes_no_bit(monkeypatch):
    layout = PackedLayout.of([9, 4, 5, 1, 3, 2, 7, 10], sharing=[3, 2])
    qkv, grad = inputs_of(layout, torch.bfloat16)
    whole = results(partial(attend, kernel=FLASH), qkv, grad, layout, Rule(0.4))
    monkeypatch.setattr(shared_prefix, "MERGE_NUMBERS", 100)  # three rows of 32
    pieces = results(partial(attend, kernel=FLASH), qkv, grad, layout, Rule(0.4))
    assert all(torch.equal(x, y) for x, y in zip(whole, pieces, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=4)), min_size=1, max_size=4),
    st.sampled_from(RULES),
)
def test_any_groups_give_the_same_shared_and_packed(sizes, rule):
    """Tokens with rows of their own in q, k and v: what predicts a completion token is the same in both layouts."""
    numbers = iter(range(10_000))
    groups = [([next(numbers) for _ in range(p)], [[next(numbers) for _ in range(c)] for c in cs]) for p, cs in sizes]
    generator = torch.Generator().manual_seed(5)
    tables = [torch.randn(next(numbers), heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    outputs = []
    for shared in (True, False):
        pack = pack_groups(groups, shared=shared)
        q, k, v = (table[pack.input_ids[0]] for table in tables)
        out = dispatch.packed_rows_attention(q, k, v, pack.layout, **rule._asdict())
        outputs.append(out[pack.predicting])
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-13)


def test_flash_cpu_refuses_keys_in_front_of_the_queries():
    """Its causal order starts at the top left, so copied prompts would be seen wrongly."""
    layout = PackedLayout.of([3, 2, 2], sharing=[2])
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
    out = attend(*fused.split([4, 2, 2], dim=1), layout, Rule(0.4), kernel=kernel._replace(backward=backward))
    got = torch.autograd.grad(out.sum(), fused)[0]
    expected = torch.autograd.grad(attend(*qkv, layout, Rule(0.4), kernel=EXPLICIT).sum(), qkv)
    torch.testing.assert_close(got, torch.cat(expected, dim=1), rtol=0, atol=1e-13)


def test_explicit_chunks_change_nothing(monkeypatch):
    """Long prompts are cut into chunks of queries; what a chunk cannot see is not multiplied."""
    layout = PackedLayout.of([150, 140, 3, 130], sharing=[2])
    qkv, grad = inputs_of(layout)
    for rule in RULES:
        whole = results(partial(attend, kernel=EXPLICIT), qkv, grad, layout, rule)
        monkeypatch.setattr(kernels_explicit, "CHUNK_SCORES", 40_000)
        cut = results(partial(attend, kernel=EXPLICIT), qkv, grad, layout, rule)
        monkeypatch.undo()
        for x, y in zip(whole, cut, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-13)
    chunks = list(kernels_explicit._chunks(layout.on_itself.blocks[0], True, 20, 4, torch.device("cpu")))
    assert len(chunks) == 8 and chunks[3].keys == slice(41, 80)


def test_explicit_under_autocast_stays_in_fp32():
    layout = PackedLayout.of([9, 4, 5], sharing=[2])
    qkv, grad = inputs_of(layout, torch.float32)
    plain = results(partial(attend, kernel=EXPLICIT), qkv, grad, layout, Rule(0.4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results(partial(attend, kernel=EXPLICIT), qkv, grad, layout, Rule(0.4))
    assert all(torch.equal(x, y) for x, y in zip(plain, cast, strict=True))


def test_blocks_of_flex_cover_what_is_visible(layout):
    """A block of keys is listed if and only if some query sees some key in it; a full one needs no mask."""
    for window in (None, 1, 4, 100, 128, 129, 200):
        number = -(-layout.total // flex.BLOCK)
        padded = torch.zeros(2 * [number * flex.BLOCK], dtype=torch.bool)
        padded[: layout.total, : layout.total] = visible(layout, window)
        blocks = padded.view(number, flex.BLOCK, number, flex.BLOCK)
        some, full = flex.block_map(layout, window)
        assert torch.equal(some, blocks.any(3).any(1))
        assert not (full & ~blocks.all(3).all(1)).any()
    assert PackedLayout.of([600]).total and flex.block_map(PackedLayout.of([600]), None)[1].sum() == 6


# ------------------------------------------------------------------------------------------------- CUDA without a GPU
@pytest.mark.parametrize("window", [None, 4])
def test_the_aten_calls_on_meta_tensors(monkeypatch, window):
    """A whole bf16 model, forward and backward, on shapes alone: what torch's kernels are given and give."""
    calls = []
    fields = {"sliding_window": window} if window else {}
    model = tiny_model("mistral" if window else "qwen2", **fields).to(torch.bfloat16).to("meta")
    model.set_attn_implementation(register())
    forward = dispatch.cuda.aten_forward

    def spy(q, k, v, spans, rule):
        calls.append((spans.causal, dispatch.cuda.window_of(spans, rule), spans.max_q, spans.max_k))
        assert spans.cu_q.dtype == spans.cu_k.dtype == torch.int32
        assert spans.cu_q.is_contiguous() and spans.cu_k.is_contiguous()
        out, lse = forward(q, k, v, spans, rule)
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32
        return out, lse

    kernel = Kernel("flash_aten", spy, dispatch.cuda.aten_backward)
    provider = PROVIDERS["flash_aten"]._replace(attend=partial(attend, kernel=kernel))
    monkeypatch.setattr(dispatch, "choose", lambda kind: provider)
    # transformers looks for packed sequences in the values of position_ids, to build a mask that we have no use for
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    pack = pack_groups([(range(9), [range(6), range(3)]), (range(4), [range(8), range(2), range(5)])], device="meta")
    logits = model(**pack.model_inputs).logits
    assert logits.shape == (1, pack.layout.total, 61) and logits.dtype == torch.bfloat16
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    # Two layers, each: every segment on itself, the completions on their prompt; with a window one call on copied keys.
    per_layer = [(True, (3, 0), 9, 10)] if window else [(True, (-1, 0), 9, 9), (False, (-1, -1), 12, 9)]
    assert calls == 2 * per_layer


def test_the_aten_kernels_have_the_signature_we_call():
    forward = torch.ops.aten._flash_attention_forward.default._schema
    backward = torch.ops.aten._flash_attention_backward.default._schema
    assert [a.name for a in forward.arguments][:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "return_debug_mask",
    ]  # fmt: skip
    assert [a.name for a in backward.arguments][:14] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal", "rng_state", "unused",
    ]  # fmt: skip
    for schema in (forward, backward):
        assert {"scale", "window_size_left", "window_size_right"} <= {a.name for a in schema.arguments}


def spans_of(cu_q, cu_k, causal):
    return Spans.of(cu_q.diff().tolist(), cu_k.diff().tolist(), causal=causal)


def rule_of(spans, scale, left, right, softcap):
    """What a package would make of its arguments; None counts as −1."""
    left, right = (-1 if x is None else x for x in (left, right))
    assert right == (0 if spans.causal and left >= 0 else right) and (spans.causal or left == right == -1)
    return Rule(scale, left + 1 if left >= 0 else None, softcap or None)


def check_gradient_inputs(q, k, lse, cu_q, cu_k, max_q, max_k):
    assert lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (max(2, int(cu_q.diff().max())), int(cu_k.diff().max())) and k.shape[0] == int(cu_k[-1])


def stand_in_fa2():
    """flash_attn.flash_attn_interface of flash-attn 2.8, its two private functions with their signatures."""

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, causal)
        rule = rule_of(spans, softmax_scale, window_size_left, window_size_right, softcap)
        out, lse = EXPLICIT.forward(q, k, v, spans, rule)
        return out, lse.contiguous(), torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None,
    ):  # fmt: skip
        check_gradient_inputs(q, k, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, causal)
        rule = rule_of(spans, softmax_scale, window_size_left, window_size_right, softcap)
        gradients = EXPLICIT.backward(dout, q, k, v, out, softmax_lse, spans, rule)
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)

    return {"flash_attn.flash_attn_interface": (_flash_attn_varlen_forward, _flash_attn_varlen_backward)}


def stand_in_fa3():
    """flash_attn_interface of FA3 (hopper), its two functions; arguments that we never pass are left out."""

    def _flash_attn_forward(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    ):  # fmt: skip
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, causal)
        rule = rule_of(spans, softmax_scale, window_size_left, window_size_right, softcap)
        out, lse = EXPLICIT.forward(q, k, v, spans, rule)
        return out, lse.contiguous(), torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        check_gradient_inputs(q, k, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, is_causal)
        rule = rule_of(spans, softmax_scale, window_size_left, window_size_right, softcap)
        gradients = EXPLICIT.backward(dout, q, k, v, out, softmax_lse, spans, rule)
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)

    return {"flash_attn_interface": (_flash_attn_forward, _flash_attn_backward)}


def stand_in_fa4():
    """flash_attn.cute.interface of flash-attn-4, its two functions; arguments that we never pass are left out."""

    def _flash_attn_fwd(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        causal=False, softcap=None, window_size_left=None, window_size_right=None, return_lse=False,
    ):  # fmt: skip
        assert return_lse
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, causal)
        out, lse = EXPLICIT.forward(
            q, k, v, spans, rule_of(spans, softmax_scale, window_size_left, window_size_right, 0)
        )
        return out, lse.contiguous()

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False,
    ):  # fmt: skip
        check_gradient_inputs(q, k, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, causal)
        rule = rule_of(spans, softmax_scale, window_size_left, window_size_right, 0)
        return EXPLICIT.backward(dout, q, k, v, out, lse, spans, rule)

    return {"flash_attn.cute.interface": (_flash_attn_fwd, _flash_attn_bwd)}


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
@pytest.mark.parametrize("has_window", [False, True])
def test_the_packages_are_called_by_their_signatures(monkeypatch, name, has_window):
    """Stand-ins for packages that do not install without a GPU: the documented signatures, over the explicit kernel."""
    for module_name, functions in {"fa2": stand_in_fa2, "fa3": stand_in_fa3, "fa4": stand_in_fa4}[name]().items():
        module = ModuleType(module_name)
        for function in functions:
            setattr(module, function.__name__, function)
        parts = module_name.split(".")
        for end in range(1, len(parts)):  # the packages around it
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(sys.modules, module_name, module)
    softcaps = [False] if name == "fa4" else [False, True]
    for has_softcap in softcaps:
        kind = Kind("cpu", torch.float64, 8, has_window, has_softcap)
        assert dispatch.self_test(PROVIDERS[name].attend, kind) < 1e-14
