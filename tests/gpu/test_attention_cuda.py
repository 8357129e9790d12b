"""Tests of the arguments that our code passes to CUDA attention kernels, without a GPU.

Fake functions with the documented signatures replace flash-attn and torch's CUDA kernels.
"""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch

from grpo_fast.attention import dispatch
from grpo_fast.attention.dispatch import Kind
from grpo_fast.attention.layout import AttentionParams, Spans
from grpo_fast.attention.spans import Saved
from tests.attention.layouts import ATTENTION

EXPLICIT = ATTENTION["explicit"].keywords["kernel"]


def spans_of(cu_q, cu_k, max_q, max_k, causal):
    """Convert the arguments of an attention package to the `Spans` of our explicit kernel.

    Also check that every span has keys, because the packages do not support queries without keys.
    """
    assert all(k > 0 for k in cu_k.diff().tolist())
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (max_q, max_k) == (max(2, int(cu_q.diff().max())), int(cu_k.diff().max()))
    return Spans.of(cu_q.diff().tolist(), cu_k.diff().tolist(), causal=causal)


def rule_of(spans, scale, left, right, softcap):
    """Convert the arguments of an attention package to `AttentionParams`.

    `left` and `right` are the numbers of visible tokens before and after a query. None and -1 mean
    no limit.
    """
    left, right = (-1 if x is None else x for x in (left, right))
    assert right == 0 if spans.causal and left >= 0 else spans.causal or left == right == -1
    return AttentionParams(scale, left + 1 if left >= 0 else None, softcap or None)


# Signatures of the attention functions that the fake packages replace. flash-attn 2.8 (private
# functions), FA3 (hopper) and FA4 cannot be installed without a GPU. Their signatures are therefore
# copied from their documentation, without the arguments that we never pass. The signatures of
# torch's CUDA kernels come from their schemas.
FA3_KEYS = "cu_seqlens_q=None, cu_seqlens_k=None, {}max_seqlen_q=None, max_seqlen_k=None, "
WINDOW = "window_size_left=-1, window_size_right=-1, softcap=0.0"
FA4_KEYS = "window_size_left=None, window_size_right=None"


def aten_signature(name: str) -> str:
    """Return the parameter list of a torch operator as Python source."""
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    words = [x.name + "=None" * x.has_default_value() for x in arguments]
    first = next(i for i, x in enumerate(arguments) if x.kwarg_only)
    return ", ".join([*words[:first], "*", *words[first:]])


SIGNATURES = {
    "fa2": (
        "flash_attn.flash_attn_interface._flash_attn_varlen_{}ward",
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
        f"softmax_scale, causal, {WINDOW}, alibi_slopes=None, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None",
        "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
        "max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, "
        "softcap, alibi_slopes, deterministic, rng_state=None",
    ),
    "fa3": (
        "flash_attn_interface._flash_attn_{}ward",
        f"q, k, v, {FA3_KEYS.format('')}softmax_scale=None, causal=False, {WINDOW}",
        f"dout, q, k, v, out, softmax_lse, {FA3_KEYS.format('sequed_q=None, sequed_k=None, ')}"
        f"dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, {WINDOW}, "
        "deterministic=False, sm_margin=0",
    ),
    "fa4": (
        "flash_attn.cute.interface._flash_attn_{}wd",
        f"q, k, v, {FA3_KEYS.format('')}softmax_scale=None, causal=False, softcap=None, {FA4_KEYS},"
        " return_lse=False",
        f"q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, {FA4_KEYS}, "
        f"{FA3_KEYS.format('')}deterministic=False",
    ),
    "flash_aten": (
        "_flash_attention_{}ward",
        aten_signature("_flash_attention_forward"),
        aten_signature("_flash_attention_backward"),
    ),
}
RENAMED = {
    "query": "q", "key": "k", "value": "v", "cum_seq_q": "cu_seqlens_q", "grad_out": "dout",
    "cum_seq_k": "cu_seqlens_k", "max_q": "max_seqlen_q", "max_k": "max_seqlen_k",
    "is_causal": "causal", "scale": "softmax_scale", "logsumexp": "lse", "softmax_lse": "lse",
}  # fmt: skip
# MORE contains the results that each fake forward function returns after (out, lse). STATE stands
# for the random state that torch's forward function returns, and that its backward function must
# receive.
STATE = torch.zeros(2, dtype=torch.uint64)
MORE = {"fa2": (torch.empty(0), torch.empty(2).long()), "fa3": (torch.empty(0), torch.empty(0)),
        "fa4": (), "flash_aten": (STATE, STATE[:0], STATE[:0])}  # fmt: skip


def stand_ins(name: str) -> tuple[Callable, Callable]:
    """Return fake forward and backward functions of an attention package.

    They have the signatures of the package and check their arguments. The explicit kernel computes
    their results, so they also run on a CPU.
    """

    def bound(parameters: str) -> Callable:
        bind = eval(f"lambda {parameters}: locals()")

        def read(*given, **named) -> tuple:
            x = SimpleNamespace(**{RENAMED.get(n, n): v for n, v in bind(*given, **named).items()})
            assert vars(x).get("dropout_p", 0.0) == 0.0 and vars(x).get("return_lse", True)
            assert not vars(x).get("return_debug_mask")
            offsets = x.cu_seqlens_q, x.cu_seqlens_k
            spans = spans_of(*offsets, x.max_seqlen_q, x.max_seqlen_k, x.causal)
            window = x.window_size_left, x.window_size_right
            softcap = vars(x).get("softcap") or None
            return x, spans, rule_of(spans, x.softmax_scale, *window, softcap)

        return read

    forward_arguments, backward_arguments = map(bound, SIGNATURES[name][1:])

    def forward(*given, **named):
        x, spans, rule = forward_arguments(*given, **named)
        out, lse = EXPLICIT.forward(x.q, x.k, x.v, spans, rule)
        return out, lse.contiguous(), *MORE[name]

    def backward(*given, **named):
        x, spans, rule = backward_arguments(*given, **named)
        assert x.lse.is_contiguous() and x.lse.shape == (x.q.shape[1], x.q.shape[0])
        assert len(x.k) == int(x.cu_seqlens_k[-1])
        assert name != "fa4" or 0 not in spans.queries  # early releases of FA4 do not support it
        if name == "flash_aten":
            assert (x.rng_state.shape, x.rng_state.dtype, x.unused.shape) == (
                (2,), torch.uint64, (0,)
            )  # fmt: skip
        gradients = EXPLICIT.backward(x.dout, Saved(x.q, x.k, x.v, x.out, x.lse), spans, rule)
        if name not in ("fa2", "fa3"):
            return gradients
        for target, gradient in zip((x.dq, x.dk, x.dv), gradients, strict=True):
            target.copy_(gradient)

    return forward, backward


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("has_window", [False, True])
def test_the_packages_are_called_by_their_signatures(monkeypatch, name, has_window):
    """Check that each attention package gets valid arguments and gives the right outputs."""
    path, *_ = SIGNATURES[name]
    module_name, _, function_name = path.rpartition(".")
    module = ModuleType(module_name or "aten")
    directions = ("for", "back") if path.endswith("ward") else ("f", "b")
    for direction, function in zip(directions, stand_ins(name), strict=True):
        setattr(module, function_name.format(direction), function)
    if module_name:
        parts = module_name.split(".")
        for end in range(1, len(parts)):  # parent packages
            around = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, around, ModuleType(around))
        monkeypatch.setitem(sys.modules, module_name, module)
    else:
        stand_in = SimpleNamespace(**vars(torch) | {"ops": SimpleNamespace(aten=module)})
        monkeypatch.setattr(dispatch.spans, "torch", stand_in)
    for has_softcap in (False, True) if name in ("fa2", "fa3") else (False,):
        kind = Kind("cpu", torch.float64, 8, has_window, has_softcap)
        assert dispatch.pair_of(ATTENTION[name], kind).gap() < 1e-14
