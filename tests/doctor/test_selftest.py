"""The self-tests pass here, and each sees the fault that it is for."""

from dataclasses import replace

import pytest
import torch

from grpo_fast.attention.dispatch import Provider
from grpo_fast.doctor import selftest
from grpo_fast.doctor.selftest import Check, attention_checks, kernel_checks
from grpo_fast.train.runs import build

CPU = torch.device("cpu")
VALUES, GRADIENTS = "loss and logps against fp64", "gradients against fp64"
BITS = "same bits again, and alone"


def failed(checks) -> list[str]:
    return [check.name for check in checks if not check.ok]


def test_kernels_of_this_machine():
    checks = list(kernel_checks(CPU))
    assert failed(checks) == []
    ran = {check.name for check in checks if check.error is not None}
    for dtype in ("float32", "bfloat16"):
        assert {f"torch {dtype}: {x}" for x in (VALUES, GRADIENTS)} <= ran
    assert all(c.note for c in checks if c.error is None)
    assert Check("x", None, 0.0).ok and Check("x", 0.0, 0.0).ok
    assert not Check("x", float("nan"), 1.0).ok and not Check("x", 2.0, 1.0).ok


def faulty(kind: str):
    """`linear_grpo_loss` with a fault."""
    plain, calls = selftest.linear_grpo_loss, [0]

    def loss(hidden, weight, *arguments, **options):
        calls[0] += 1
        out = plain(hidden, weight, *arguments, **options)
        if kind == "logps":
            return replace(out, logps=out.logps + 1e-4)
        if kind == "NaN":
            return replace(out, logps=out.logps * torch.nan)
        if kind == "gradients":  # of the weight, by a thousandth of its own value
            return replace(out, loss=out.loss + 1e-3 * (weight - weight.detach()).sum())
        if kind == "runs":
            return replace(out, loss=out.loss * (1 + 2**-23 * (calls[0] % 2)))
        if kind == "raises":
            raise RuntimeError("no such kernel\nsecond line")
        return replace(out, logps=out.logps + 2**-22 * len(hidden))  # a row's bits know its batch

    return loss


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("logps", [VALUES]),
        ("NaN", [VALUES, BITS]),
        ("gradients", [GRADIENTS]),
        ("batch", [BITS]),
        ("runs", [BITS]),
        ("raises", [VALUES]),
    ],
)
def test_a_kernel_that_is_wrong(monkeypatch, kind, seen):
    monkeypatch.setattr(selftest, "BACKENDS", ("torch",))
    monkeypatch.setattr(selftest, "DTYPES", (torch.float32,))
    monkeypatch.setattr(selftest, "linear_grpo_loss", faulty(kind))
    checks = list(kernel_checks(CPU))
    assert failed(checks) == [f"torch float32: {name}" for name in seen]
    if kind == "raises":
        assert checks[0].note == "RuntimeError: no such kernel second line"


def test_a_divergence_that_does_not_vanish_or_never_speaks(monkeypatch):
    made, plain = selftest.problem(torch.float32, CPU), selftest.linear_divergence
    assert selftest.own_divergence(made, "torch") == 0
    for add, factor in ((1e-6, 1.0), (0.0, 0.0)):

        def other(*given, add=add, factor=factor, **options):
            out = plain(*given, **options)
            return out._replace(values=out.values * factor + add)

        monkeypatch.setattr(selftest, "linear_divergence", other)
        assert selftest.own_divergence(made, "torch") > 0


def test_attention_of_this_machine_and_a_kernel_that_is_wrong(monkeypatch):
    monkeypatch.setattr(selftest, "DTYPES", (torch.float32,))
    assert failed(attention_checks(CPU)) == []

    def wrong(q, k, v, layout, rule):
        return q * k.sum() * v.sum()

    monkeypatch.setattr(selftest, "candidates", lambda kind: [Provider("own", None, wrong)])
    assert failed(attention_checks(CPU)) == [
        f"attention own float32{x}" for x in ("", ", window", ", softcap")
    ]


@pytest.mark.usefixtures("no_pictures")
def test_a_rollout_and_a_checkpoint(monkeypatch):
    checks = list(selftest.run_checks(CPU))
    assert failed(checks) == [] and [c.error for c in checks][1] == 0
    resume = build.resume

    def without_moments(start, saver):
        resume(start, saver)
        if start.checkpoint is not None:
            saver.trainer.optimizer.adam.state.clear()

    monkeypatch.setattr(build, "resume", without_moments)
    assert selftest.resumed_differences() > 0
