"""On a real GPU: every available attention kernel against the dense reference, alone and inside of
a model.

Run by `benchmarks/gpu_session.sh --part attention`; skipped where there is no GPU. Needs no
package: torch's built-in FlashAttention is the default, an installed flash-attn (FA2, FA3, FA4) is
tested beside it.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast.attention import dispatch, pack_groups, plan_packs, register
from grpo_fast.attention.dispatch import Kind
from grpo_fast.attention.kernels import reference
from grpo_fast.attention.spans import Rule
from tests.attention.layouts import two_levels
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Relative L2 error of output and of each gradient against fp64 on the same inputs.
BARS = {BF16: 1e-2, FP16: 1.5e-3, FP32: 2e-5}
LAYOUTS = {
    "packed": ([257, 64, 1, 640, 129], []),
    "shared": ([300, 1, 64, 1, 128, 200, 3, 129, 333], [3, 4]),
    "single tokens": ([1, 1, 1, 1], [2]),
    "long prompt": ([2048, 64, 63, 1, 64, 64, 64, 64, 5], [8]),
}
KINDS = [
    Kind("cuda", BF16, 64),
    Kind("cuda", FP16, 64),
    Kind("cuda", BF16, 128),
    Kind("cuda", BF16, 256),
    Kind("cuda", BF16, 96),
    Kind("cuda", BF16, 64, has_window=True),
    Kind("cuda", BF16, 64, has_softcap=True),
    Kind("cuda", BF16, 64, has_window=True, has_softcap=True),
    Kind("cuda", BF16, 60),
    Kind("cuda", FP32, 64),
]


def providers(kind):
    """All but flex, which compiles for a quarter of a minute:
    tests/gpu/test_attention_flex_gpu.py.
    """
    return [provider for provider in dispatch.candidates(kind) if provider.name != "flex"]


def inputs(layout, kind, heads, kv_heads):
    generator = torch.Generator().manual_seed(3)
    shapes = [(layout.total, n, kind.head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=generator).to("cuda", kind.dtype) for s in shapes]


def forward_backward(attention, tensors, layout, rule, dtype):
    *qkv, grad = (x.to(dtype) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attention(*leaves, layout, rule)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_provider_is_the_dense_reference(kind):
    """Ragged layouts from one token, grouped heads, window, softcap: forward and backward. Reports
    all that fail.

    A provider that raises is passed over, as `choose` would do, and printed (pytest -rP shows it).
    """
    wrong = []
    for name, (lengths, sharing) in LAYOUTS.items():
        layout = two_levels(lengths, sharing, "cuda")
        rule = Rule(
            kind.head_dim**-0.5, 100 if kind.has_window else None, 5.0 if kind.has_softcap else None
        )
        for heads, kv_heads in ((4, 4), (6, 2)):
            tensors = inputs(layout, kind, heads, kv_heads)
            expected = forward_backward(reference.attend, tensors, layout, rule, torch.float64)
            for provider in providers(kind):
                try:
                    got = forward_backward(provider.attend, tensors, layout, rule, kind.dtype)
                except Exception as problem:
                    assert provider.name not in ("flash_aten", "explicit"), (provider.name, name)
                    print(f"{provider.name} cannot take {kind}, {name}: {problem}")
                    continue
                errors = [
                    float((x.double() - y).norm() / y.norm())
                    for x, y in zip(got, expected, strict=True)
                ]
                if not max(errors) <= BARS[kind.dtype]:
                    wrong.append((provider.name, name, heads, kv_heads, errors))
    assert not wrong, wrong


@pytest.mark.parametrize("kind", KINDS[:6], ids=str)
def test_a_provider_is_chosen_and_says_so(kind, caplog):
    caplog.set_level("INFO")
    dispatch.choose.cache_clear()
    chosen = dispatch.choose(kind)
    lines = [record.getMessage() for record in caplog.records if "attention" in record.name]
    assert lines[-1].startswith(f"packed attention on {kind}: {chosen.name}")
    print("\n".join(lines))


def test_packed_without_a_window_never_leaves_flash_attention():
    """What a user gets without any package: FlashAttention, not a fallback."""
    flash = {"fa4", "fa3", "fa2", "flash_aten"}
    for kind in KINDS[:6]:
        assert dispatch.choose(kind).name in flash, kind


def test_deterministic_where_asked_for():
    kind = Kind("cuda", BF16, 64)
    layout = two_levels([2048, *[64] * 8], [8], "cuda")
    tensors = inputs(layout, kind, 6, 2)
    torch.use_deterministic_algorithms(True)
    try:
        for window in (None, 100):
            rule, attention = (
                Rule(0.125, window),
                dispatch.choose(kind._replace(has_window=window is not None)).attend,
            )
            first, second = (
                forward_backward(attention, tensors, layout, rule, BF16) for _ in range(2)
            )
            assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])  # gemma2 may need flex
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_bf16_model_shared_packed_and_split(family, checkpointing):
    """Logits and gradients of the three layouts differ no more than bf16 differs from the fp32
    answer on the CPU.
    """
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(2, 61, (n,), generator=generator)

    groups = [(ids(200), [ids(n) for n in (30, 1, 64, 17)]), (ids(90), [ids(n) for n in (5, 40)])]
    model = tiny_model(family, head_dim=16, hidden_size=64)
    weight = torch.randn(157, 61, generator=generator)

    def logits_of(chosen, shared, device):
        pack = pack_groups(chosen, shared=shared, device=device)
        return model(**pack.model_inputs).logits[0].index_select(0, pack.predicting)

    def gradients(logits, weight):
        model.zero_grad()
        (logits.float() * weight.to(logits.device)).sum().backward()
        return torch.cat([p.grad.flatten().float().cpu() for p in model.parameters()])

    model.set_attn_implementation(register())
    truth = logits_of(groups, True, "cpu")
    gradient_truth = gradients(truth, weight)
    model = model.to("cuda", BF16).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    errors = []
    for shared in (True, False):
        logits = logits_of(groups, shared, "cuda")
        errors.append(((logits.float().cpu() - truth).norm() / truth.norm()).item())
        gradient = gradients(logits, weight)
        errors.append(((gradient - gradient_truth).norm() / gradient_truth.norm()).item())
    plan = plan_packs([(len(p), [len(c) for c in cs]) for p, cs in groups], 260)
    assert len(plan) > 2
    rows = torch.arange(157).split([len(c) for _, cs in groups for c in cs])
    starts, total = (0, 4), 0
    for shares in plan:
        mine = torch.cat([rows[starts[s.group] + i] for s in shares for i in s.completions])
        total = total + gradients(
            logits_of([s.of(groups) for s in shares], True, "cuda"), weight[mine]
        )
    errors.append(((total - gradient_truth).norm() / gradient_truth.norm()).item())
    shared_logits, shared_grad, packed_logits, packed_grad, split_grad = errors
    assert shared_logits <= 1.3 * packed_logits + 1e-3 and packed_logits < 0.1
    assert max(shared_grad, split_grad) <= 1.3 * packed_grad + 1e-3 and packed_grad < 0.3
