"""Tests of divergences on a real GPU against fp64 on the CPU, for every kind and dtype."""

from __future__ import annotations

import pytest
import torch

from grpo_fast import TeacherHead, TeacherTopK, linear_divergence
from tests.pairs import pairs

pytestmark = pytest.mark.gpu


@pairs(kind=["forward_kl", "reverse_kl", "jsd"], dtype=[torch.float32, torch.bfloat16],
       vocab=[1000, 32001])  # fmt: skip
def test_against_fp64(kind, dtype, vocab):
    g = torch.Generator().manual_seed(0)
    h, t = (torch.randn(100, 64, generator=g).to(dtype) for _ in range(2))
    w, u = ((torch.randn(vocab, 64, generator=g) / 4).to(dtype) for _ in range(2))
    top, ids = (t.float() @ u.float().T).log_softmax(-1).topk(20)
    values_bar, bar = (1e-3, 1e-2) if dtype == torch.bfloat16 else (1e-4, 2e-3)
    for topk in (False, True):
        found = []
        for device, as_dtype in (("cpu", torch.float64), ("cuda", dtype)):
            leaves = [x.to(device, as_dtype).detach().requires_grad_() for x in (h, w)]
            head = TeacherHead(t.to(device, as_dtype), u.to(device, as_dtype), softcap=20.0)
            teacher = TeacherTopK(ids.to(device), top.to(device)) if topk else head
            out = linear_divergence(*leaves, teacher, kind, temperature=0.8)
            out.loss.backward()
            found.append(
                [x.detach().cpu().double() for x in (out.values, *(y.grad for y in leaves))]
            )
        for name, true, x in zip(("values", "dH", "dW"), *found, strict=True):
            off = ((x - true).norm() / true.norm()).item()
            assert off < (values_bar if name == "values" else bar), (name, topk, off)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_it_is_zero_at_the_teacher_itself(kind):
    h, w = torch.randn(64, 32, device="cuda"), torch.randn(5000, 32, device="cuda")
    leaf = h.clone().requires_grad_()
    out = linear_divergence(leaf, w, TeacherHead(h, w), kind)
    out.loss.backward()
    assert not out.values.any() and not leaf.grad.any()
