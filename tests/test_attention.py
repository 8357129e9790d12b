"""Packed attention against the model's own forward on one sequence at a time: logits and gradients, every family."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from grpo_fast.attention import PackedLayout, check_supported, dispatch, register
from grpo_fast.attention.dispatch import segment_attention
from grpo_fast.train.policy import enable_checkpointing
from tests.tiny import FAMILIES, tiny_model

LENGTHS = (9, 13, 9, 2, 1, 17)  # two buckets and more: equal, similar, short and single-token segments


def sequences(vocab_size, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, vocab_size, (n,), generator=generator) for n in lengths]


def one_by_one(model, ids):
    # transformers' eager attention takes the softmax in fp32 even of fp64 scores; sdpa does not, but has no softcap
    model.set_attn_implementation("eager" if model.config.model_type == "gemma2" else "sdpa")
    return torch.cat([model(input_ids=s[None], use_cache=False).logits[0] for s in ids])


def packed(model, ids):
    model.set_attn_implementation(register())
    layout = PackedLayout.of([len(s) for s in ids])
    return model(
        input_ids=torch.cat(ids)[None], position_ids=layout.position_ids, use_cache=False, packed_layout=layout
    ).logits[0]


def gradients(model, logits):
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype)
    model.zero_grad()
    (logits * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_by_one(family):
    model = tiny_model(family).double()
    ids = sequences(61)
    expected, got = one_by_one(model, ids), packed(model, ids)
    # see one_by_one; cohere takes RoPE in fp32
    tolerance = 1e-5 if family in ("gemma2", "cohere") else 1e-9
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    expected_grad, got_grad = gradients(model, one_by_one(model, ids)), gradients(model, packed(model, ids))
    for name, gradient in expected_grad.items():
        assert (got_grad[name] - gradient).norm() <= tolerance * (1 + gradient.norm()), name


def test_a_segment_does_not_see_the_others():
    model = tiny_model("llama").double()
    ids = sequences(61)
    before = packed(model, ids)
    changed = [ids[0], (ids[1] + 1) % 61, *ids[2:]]
    after = packed(model, changed)
    same = torch.ones(len(before), dtype=torch.bool)
    same[9:22] = False
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[~same], after[~same])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradient_checkpointing_changes_nothing(family):
    model = tiny_model(family)
    ids = sequences(61)
    plain = gradients(model.train(), packed(model, ids))
    enable_checkpointing(model)
    checkpointed = gradients(model.train(), packed(model, ids))
    for name, gradient in plain.items():
        assert torch.equal(gradient, checkpointed[name]), name


@pytest.mark.parametrize("window", [None, 1, 4, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_window_and_softcap_against_the_formula(window, softcap):
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    q = torch.randn(total, 4, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(total, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    got = segment_attention(q, k, v, PackedLayout.of(LENGTHS), scale=0.4, window=window, softcap=softcap)
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(total)
    distance = place[:, None] - place[None]
    visible = (segment[:, None] == segment[None]) & (distance >= 0) & (distance < (window or total))
    kk, vv = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, kk) * 0.4
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), vv)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


def test_flash_aten_wiring(monkeypatch):
    """The autograd function around torch's CUDA kernels, with a CPU stand-in that has their signatures."""

    def per_segment(function, q, k, v, cu):
        bounds = list(zip(cu.tolist(), cu.tolist()[1:], strict=False))
        return torch.cat([function(q[a:b], k[a:b], v[a:b]) for a, b in bounds])

    def attend(q, k, v):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True, scale=0.3).transpose(0, 1)

    def forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, window_size_left, window_size_right
    ):
        assert (max_q, max_k, dropout, causal, debug, scale) == (17, 17, 0.0, True, False, 0.3)
        assert (window_size_left, window_size_right) == (-1, 0) and cu_q.dtype == torch.int32
        lse = torch.zeros(q.shape[1], q.shape[0])
        state = torch.zeros(2, dtype=torch.uint64)
        return per_segment(attend, q, k, v, cu_q), lse, state, state[:0], state[:0]

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *, scale,
                 window_size_left, window_size_right):  # fmt: skip
        assert grad.is_contiguous() and lse.shape == (4, sum(LENGTHS)) and rng.dtype == torch.uint64
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(per_segment(attend, *leaves, cu_q), leaves, grad)

    ops = SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
    monkeypatch.setattr(torch.ops, "aten", ops, raising=False)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(sum(LENGTHS), h, 8, generator=generator, requires_grad=True) for h in (4, 2, 2))
    layout = PackedLayout.of(LENGTHS)
    weight = torch.randn(q.shape, generator=generator)
    results = []
    for kernel in ("flash_aten", "sdpa"):
        monkeypatch.setattr(dispatch, "choose", lambda *_, kernel=kernel: kernel)
        out = segment_attention(q, k, v, layout, scale=0.3)
        results.append([out, *torch.autograd.grad((out * weight).sum(), [q, k, v])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "softcap", "kernel"),
    [
        ("cpu", torch.float32, 64, False, "sdpa"),
        ("cpu", torch.bfloat16, 64, True, "dense"),
        ("cuda", torch.bfloat16, 64, False, "flash_aten"),
        ("cuda", torch.bfloat16, 60, False, "sdpa"),
        ("cuda", torch.float32, 64, False, "sdpa"),
        ("cuda", torch.float16, 512, False, "sdpa"),
        ("cuda", torch.bfloat16, 64, True, "dense"),
    ],
)
def test_the_choice_of_kernel(monkeypatch, device, dtype, head_dim, softcap, kernel):
    monkeypatch.setattr(dispatch, "_flash_attn_package", lambda: None)
    assert dispatch.choose.__wrapped__(device, dtype, head_dim, softcap) == kernel


def test_refusals():
    model = tiny_model("llama")
    model.set_attn_implementation(register())
    ids = torch.arange(2, 8)[None]
    layout = PackedLayout.of([2, 4])
    call = {"input_ids": ids, "position_ids": layout.position_ids, "use_cache": False}
    with pytest.raises(ValueError, match="packed_layout: expected a PackedLayout"):
        model(**call)
    with pytest.raises(ValueError, match="attention_mask"):
        model(**call, packed_layout=layout, attention_mask=torch.ones_like(ids))
    with pytest.raises(ValueError, match="holds 5 tokens"):
        model(**call, packed_layout=PackedLayout.of([2, 3]))
    with pytest.raises(ValueError, match="one row"):
        model(input_ids=ids.repeat(2, 1), use_cache=False, packed_layout=layout)
    with pytest.raises(ValueError, match="lengths"):
        PackedLayout.of([3, 0])
    dropping = tiny_model("llama", attention_dropout=0.1).train()
    dropping.set_attn_implementation(register())
    with pytest.raises(ValueError, match="dropout: expected 0"):
        dropping(**call, packed_layout=layout)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, "mrope_section"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ],
)
def test_models_that_cannot_be_packed(fields, message):
    config = SimpleNamespace(model_type="some", **fields)
    with pytest.raises(ValueError, match=message):
        check_supported(SimpleNamespace(config=config))
    with pytest.raises(ValueError, match="recurrent state"):
        check_supported(SimpleNamespace(config=SimpleNamespace(model_type="mamba"), _is_stateful=True))
