"""The calls of the CUDA attention kernels without a GPU: on meta tensors, and against stand-ins for
the packages.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from grpo_fast.attention import dispatch, pack_groups, register
from grpo_fast.attention.dispatch import Kind
from grpo_fast.attention.kernels import explicit
from grpo_fast.attention.kernels.kernel import Kernel, Saved
from grpo_fast.attention.kernels.tree import attend
from grpo_fast.attention.spans import Rule, Spans
from tests.tiny import tiny_model

EXPLICIT = Kernel("explicit", explicit.forward, explicit.backward)
PROVIDERS = {provider.name: provider for provider in dispatch.PROVIDERS}


@pytest.mark.parametrize("window", [None, 4])
def test_the_aten_calls_on_meta_tensors(monkeypatch, window):
    """A whole bf16 model, forward and backward, on shapes alone: what torch's kernels are given and
    give.
    """
    calls = []
    fields = {"sliding_window": window} if window else {}
    model = tiny_model("mistral" if window else "qwen2", **fields).to(torch.bfloat16).to("meta")
    model.set_attn_implementation(register())
    forward = dispatch.cuda.aten_forward

    def spy(q, k, v, spans, rule):
        calls.append(
            (spans.causal, dispatch.cuda.window_of(spans, rule), *dispatch.cuda.longest(spans))
        )
        assert spans.cu_q.dtype == spans.cu_k.dtype == torch.int32
        assert spans.cu_q.is_contiguous() and spans.cu_k.is_contiguous()
        out, lse = forward(q, k, v, spans, rule)
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32
        return out, lse

    kernel = Kernel("flash_aten", spy, dispatch.cuda.aten_backward)
    provider = PROVIDERS["flash_aten"]._replace(attend=partial(attend, kernel=kernel))
    monkeypatch.setattr(dispatch, "choose", lambda kind: provider)
    # transformers looks for packed sequences in the values of position_ids, to build a mask that we
    # have no use for
    monkeypatch.setattr(
        "transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None
    )
    pack = pack_groups(
        [(range(9), [range(6), range(3)]), (range(4), [range(8), range(2), range(5)])],
        device="meta",
    )
    logits = model(**pack.model_inputs).logits
    assert logits.shape == (1, pack.layout.total, 61) and logits.dtype == torch.bfloat16
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())
    # Two layers, each: every segment on itself, the completions on their prompt; with a window one
    # call on copied keys.
    per_layer = (
        [(True, (3, 0), 9, 10)] if window else [(True, (-1, 0), 9, 9), (False, (-1, -1), 12, 9)]
    )
    assert calls == 2 * per_layer


def test_the_aten_kernels_have_the_signature_we_call():
    forward = torch.ops.aten._flash_attention_forward.default._schema
    backward = torch.ops.aten._flash_attention_backward.default._schema
    assert [a.name for a in forward.arguments][:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p",
        "is_causal", "return_debug_mask",
    ]  # fmt: skip
    assert [a.name for a in backward.arguments][:14] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q",
        "max_k", "dropout_p", "is_causal", "rng_state", "unused",
    ]  # fmt: skip
    for schema in (forward, backward):
        assert {"scale", "window_size_left", "window_size_right"} <= {
            a.name for a in schema.arguments
        }


def spans_of(cu_q, cu_k, causal):
    """What a package would read; keys without queries are allowed, the reverse is not."""
    assert all(k > 0 for k in cu_k.diff().tolist())
    return Spans.of(cu_q.diff().tolist(), cu_k.diff().tolist(), causal=causal)


def rule_of(spans, scale, left, right, softcap):
    """What a package would make of its arguments; None counts as −1."""
    left, right = (-1 if x is None else x for x in (left, right))
    assert right == (0 if spans.causal and left >= 0 else right) and (
        spans.causal or left == right == -1
    )
    return Rule(scale, left + 1 if left >= 0 else None, softcap or None)


def check_gradient_inputs(q, k, lse, cu_q, cu_k, max_q, max_k):
    assert lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (max(2, int(cu_q.diff().max())), int(cu_k.diff().max())) and k.shape[
        0
    ] == int(cu_k[-1])


def stand_in_fa2():
    """flash_attn.flash_attn_interface of flash-attn 2.8, its two private functions with their
    signatures.
    """

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, causal)
        rule = rule_of(spans, softmax_scale, window_size_left, window_size_right, softcap)
        out, lse = EXPLICIT.forward(q, k, v, spans, rule)
        return out, lse.contiguous(), torch.empty(0), torch.empty(2, dtype=torch.int64)

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        check_gradient_inputs(
            q, k, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        )
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, causal)
        rule = rule_of(spans, softmax_scale, window_size_left, window_size_right, softcap)
        gradients = EXPLICIT.backward(dout, Saved(q, k, v, out, softmax_lse), spans, rule)
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)

    return {
        "flash_attn.flash_attn_interface": (_flash_attn_varlen_forward, _flash_attn_varlen_backward)
    }


def stand_in_fa3():
    """flash_attn_interface of FA3 (hopper), its two functions; arguments that we never pass are
    left out.
    """

    def _flash_attn_forward(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    ):  # fmt: skip
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, causal)
        rule = rule_of(spans, softmax_scale, window_size_left, window_size_right, softcap)
        out, lse = EXPLICIT.forward(q, k, v, spans, rule)
        return out, lse.contiguous(), torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None,
        sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
        deterministic=False, sm_margin=0,
    ):  # fmt: skip
        check_gradient_inputs(
            q, k, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        )
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, is_causal)
        rule = rule_of(spans, softmax_scale, window_size_left, window_size_right, softcap)
        gradients = EXPLICIT.backward(dout, Saved(q, k, v, out, softmax_lse), spans, rule)
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)

    return {"flash_attn_interface": (_flash_attn_forward, _flash_attn_backward)}


def stand_in_fa4():
    """flash_attn.cute.interface of flash-attn-4, its two functions; arguments that we never pass
    are left out.
    """

    def _flash_attn_fwd(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, softcap=None, window_size_left=None,
        window_size_right=None, return_lse=False,
    ):  # fmt: skip
        assert return_lse
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, causal)
        out, lse = EXPLICIT.forward(
            q, k, v, spans, rule_of(spans, softmax_scale, window_size_left, window_size_right, 0)
        )
        return out, lse.contiguous()

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0,
        window_size_left=None, window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False,
    ):  # fmt: skip
        check_gradient_inputs(q, k, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        spans = spans_of(cu_seqlens_q, cu_seqlens_k, causal)
        assert 0 not in spans.queries  # its first releases cannot
        rule = rule_of(spans, softmax_scale, window_size_left, window_size_right, 0)
        return EXPLICIT.backward(dout, Saved(q, k, v, out, lse), spans, rule)

    return {"flash_attn.cute.interface": (_flash_attn_fwd, _flash_attn_bwd)}


@pytest.mark.parametrize("has_window", [False, True])
def test_the_aten_kernels_are_called_by_their_signatures(monkeypatch, has_window):
    """The same for torch's own CUDA kernels: every value that they are given, and what the merge
    makes of theirs.
    """

    def _flash_attention_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        return_debug_mask, *, scale, window_size_left, window_size_right,
    ):  # fmt: skip
        assert (dropout_p, return_debug_mask) == (0.0, False)
        spans = spans_of(cum_seq_q, cum_seq_k, is_causal)
        out, lse = EXPLICIT.forward(
            query,
            key,
            value,
            spans,
            rule_of(spans, scale, window_size_left, window_size_right, None),
        )
        state = torch.zeros(2, dtype=torch.uint64)
        return out, lse.contiguous(), state, state[:0], state[:0]

    def _flash_attention_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
        is_causal, rng_state, unused, *, scale, window_size_left, window_size_right,
    ):  # fmt: skip
        check_gradient_inputs(query, key, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k)
        assert (dropout_p, rng_state.shape, rng_state.dtype, unused.shape) == (
            0.0,
            (2,),
            torch.uint64,
            (0,),
        )
        spans = spans_of(cum_seq_q, cum_seq_k, is_causal)
        rule = rule_of(spans, scale, window_size_left, window_size_right, None)
        return EXPLICIT.backward(grad_out, Saved(query, key, value, out, logsumexp), spans, rule)

    aten = SimpleNamespace(
        _flash_attention_forward=_flash_attention_forward,
        _flash_attention_backward=_flash_attention_backward,
    )
    stand_in = SimpleNamespace(
        ops=SimpleNamespace(aten=aten), empty=torch.empty, uint64=torch.uint64
    )
    monkeypatch.setattr(dispatch.cuda, "torch", stand_in)
    assert (
        dispatch.self_test(
            PROVIDERS["flash_aten"].attend, Kind("cpu", torch.float64, 8, has_window)
        )
        < 1e-14
    )


@pytest.mark.parametrize("name", ["fa2", "fa3", "fa4"])
@pytest.mark.parametrize("has_window", [False, True])
def test_the_packages_are_called_by_their_signatures(monkeypatch, name, has_window):
    """Stand-ins for packages that do not install without a GPU: the documented signatures, over the
    explicit kernel.
    """
    for module_name, functions in {"fa2": stand_in_fa2, "fa3": stand_in_fa3, "fa4": stand_in_fa4}[
        name
    ]().items():
        module = ModuleType(module_name)
        for function in functions:
            setattr(module, function.__name__, function)
        parts = module_name.split(".")
        for end in range(1, len(parts)):  # the packages around it
            monkeypatch.setitem(
                sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end]))
            )
        monkeypatch.setitem(sys.modules, module_name, module)
    softcaps = [False] if name == "fa4" else [False, True]
    for has_softcap in softcaps:
        kind = Kind("cpu", torch.float64, 8, has_window, has_softcap)
        assert dispatch.self_test(PROVIDERS[name].attend, kind) < 1e-14
