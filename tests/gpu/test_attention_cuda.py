"""Tests of the arguments that our code passes to torch's CUDA attention kernels, without a GPU.

The kernels run on meta tensors, or fake functions with the operators' schemas replace them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.attention import dispatch, pack_groups, register
from grpo_fast.attention.dispatch import Kind
from grpo_fast.attention.kernels.kernel import Kernel, Saved
from grpo_fast.attention.kernels.tree import attend
from grpo_fast.attention.spans import AttentionParams, Spans
from tests.attention.layouts import ATTENTION
from tests.tiny import tiny_model

EXPLICIT = ATTENTION["explicit"].keywords["kernel"]


@pytest.mark.parametrize("window", [None, 4])
def test_the_aten_calls_on_meta_tensors(monkeypatch, window):
    """Check that a bf16 model calls torch's attention kernels with valid arguments.

    The model runs forward and backward on meta tensors, which have shapes but no values. The test
    checks the offsets of the sequences, the windows and the maximum lengths.
    """
    calls = []
    fields = {"sliding_window": window} if window else {}
    model = tiny_model("mistral" if window else "qwen2", **fields).to(torch.bfloat16).to("meta")
    model.set_attn_implementation(register())
    forward = dispatch.cuda.forward

    def spy(q, k, v, spans, rule):
        calls.append(
            (spans.causal, dispatch.cuda.window_of(spans, rule), *dispatch.cuda.longest(spans))
        )
        assert spans.cu_q.dtype == spans.cu_k.dtype == torch.int32
        assert spans.cu_q.is_contiguous() and spans.cu_k.is_contiguous()
        out, lse = forward(q, k, v, spans, rule)
        assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32
        return out, lse

    kernel = Kernel(spy, dispatch.cuda.backward)
    provider = dispatch.Provider("spy", lambda kind: True, partial(attend, kernel=kernel))
    monkeypatch.setattr(dispatch, "choose", lambda kind: provider)
    # transformers reads position_ids to find packed sequences, but meta tensors have no values.
    # Disable this, because only the attention mask depends on it, and our attention does not use
    # the mask.
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
    # Without a window, expect two calls in each of the two layers: one in which every segment
    # attends to itself, and one in which completions attend to their prompt. With a window, expect
    # one call with copied keys instead.
    per_layer = (
        [(True, (3, 0), 9, 10)] if window else [(True, (-1, 0), 9, 9), (False, (-1, -1), 12, 9)]
    )
    assert calls == 2 * per_layer


def spans_of(cu_q, cu_k, causal):
    """Convert the arguments of an operator to the `Spans` of our explicit kernel.

    Also check that every span has keys, because FlashAttention does not support queries without
    keys.
    """
    assert all(k > 0 for k in cu_k.diff().tolist())
    return Spans.of(cu_q.diff().tolist(), cu_k.diff().tolist(), causal=causal)


def rule_of(spans, scale, left, right):
    """Convert the arguments of an operator to `AttentionParams`.

    `left` and `right` are the numbers of visible tokens before and after a query, or -1.
    """
    assert right == 0 if spans.causal and left >= 0 else spans.causal or left == right == -1
    return AttentionParams(scale, left + 1 if left >= 0 else None)


def check_gradient_inputs(q, k, lse, cu_q, cu_k, max_q, max_k):
    assert lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (max(2, int(cu_q.diff().max())), int(cu_k.diff().max()))
    assert len(k) == int(cu_k[-1])


def aten_signature(name: str) -> str:
    """Return the parameter list of a torch operator as Python source."""
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    words = [x.name + "=None" * x.has_default_value() for x in arguments]
    first = next(i for i, x in enumerate(arguments) if x.kwarg_only)
    return ", ".join([*words[:first], "*", *words[first:]])


RENAMED = {
    "query": "q", "key": "k", "value": "v", "cum_seq_q": "cu_seqlens_q", "grad_out": "dout",
    "cum_seq_k": "cu_seqlens_k", "max_q": "max_seqlen_q", "max_k": "max_seqlen_k",
    "is_causal": "causal", "scale": "softmax_scale", "logsumexp": "lse",
}  # fmt: skip
# The random state that torch's forward function returns, and that its backward must receive.
STATE = torch.zeros(2, dtype=torch.uint64)


def bound(name: str) -> Callable:
    """Return a function that checks the arguments of a torch operator and converts them."""
    bind = eval(f"lambda {aten_signature(name)}: locals()")

    def read(*given, **named) -> tuple:
        x = SimpleNamespace(**{RENAMED.get(n, n): v for n, v in bind(*given, **named).items()})
        assert x.dropout_p == 0.0
        spans = spans_of(x.cu_seqlens_q, x.cu_seqlens_k, x.causal)
        return x, spans, rule_of(spans, x.softmax_scale, x.window_size_left, x.window_size_right)

    return read


def fake_forward(*given, **named):
    x, spans, rule = bound("_flash_attention_forward")(*given, **named)
    assert not x.return_debug_mask
    out, lse = EXPLICIT.forward(x.q, x.k, x.v, spans, rule)
    return out, lse.contiguous(), STATE, STATE[:0], STATE[:0]


def fake_backward(*given, **named):
    x, spans, rule = bound("_flash_attention_backward")(*given, **named)
    cu_q, cu_k = x.cu_seqlens_q, x.cu_seqlens_k
    check_gradient_inputs(x.q, x.k, x.lse, cu_q, cu_k, x.max_seqlen_q, x.max_seqlen_k)
    assert (x.rng_state.shape, x.rng_state.dtype, x.unused.shape) == ((2,), torch.uint64, (0,))
    return EXPLICIT.backward(x.dout, Saved(x.q, x.k, x.v, x.out, x.lse), spans, rule)


@pytest.mark.parametrize("has_window", [False, True])
def test_the_operators_are_called_by_their_schemas(monkeypatch, has_window):
    """Check that torch's operators receive valid arguments, and that the outputs are right."""
    aten = SimpleNamespace(
        _flash_attention_forward=fake_forward, _flash_attention_backward=fake_backward
    )
    stand_in = SimpleNamespace(
        ops=SimpleNamespace(aten=aten), empty=torch.empty, uint64=torch.uint64
    )
    monkeypatch.setattr(dispatch.cuda, "torch", stand_in)
    kind = Kind("cpu", torch.float64, 8, has_window)
    assert dispatch.self_test(ATTENTION["flash_aten"], kind) < 1e-14
