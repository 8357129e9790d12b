"""Tests that the self-tests pass on this machine, and that each self-test finds a planted fault."""

from dataclasses import replace

import pytest
import torch

from grpo_fast.attention import Head, model
from grpo_fast.attention.dispatch import Provider
from grpo_fast.doctor import selftest
from grpo_fast.doctor.selftest import Check, checked, table

CPU = torch.device("cpu")
VALUES, GRADIENTS = "loss and logps against fp64", "loss and gradients against fp64"
AGAIN, ALONE = "same bits again", "same bits alone"


def checks_of(*starts: str) -> list[Check]:
    """Run the self-tests whose names have one of these prefixes."""
    return [checked(*entry) for entry in table(CPU) if entry[0].startswith(starts)]


def failed(*starts: str) -> list[str]:
    return [check.name for check in checks_of(*starts) if not check.ok]


def test_kernels_of_this_machine():
    checks = checks_of(*selftest.BACKENDS)
    assert all(check.ok for check in checks)
    ran = {check.name for check in checks if check.error is not None}
    for dtype in ("float32", "bfloat16"):
        assert {f"torch {dtype}: {x}" for x in (VALUES, GRADIENTS, AGAIN, ALONE)} <= ran
    assert all(check.note for check in checks if check.error is None)
    assert Check("x", None, 0.0).ok and Check("x", 0.0, 0.0).ok
    assert not Check("x", float("nan"), 1.0).ok and not Check("x", 2.0, 1.0).ok


def no_kernel(*_):
    raise RuntimeError("no such kernel\nsecond line")


# For each fault: the field of the loss function's result that becomes wrong, a function that gets
# (correct value, number of the call, weight) and returns the wrong value, and the self-tests that
# must fail.
FAULTS = {
    "logps": ("logps", lambda x, *_: x + 1e-4, [VALUES]),
    "loss": ("loss", lambda x, *_: x + 1e-4, [VALUES, GRADIENTS]),
    "NaN": ("logps", lambda x, *_: x * torch.nan, [VALUES, ALONE]),
    "gradients": ("loss", lambda x, _, w: x + 1e-3 * (w - w.detach()).sum(), [GRADIENTS]),
    "bits that depend on the batch": ("logps", lambda x, *_: x + 2**-22 * len(x), [ALONE]),
    "bits that depend on the call": ("loss", lambda x, n, _: x * (1 + 2**-23 * (n % 2)), [AGAIN]),
    "raises": ("loss", no_kernel, [VALUES, GRADIENTS, AGAIN, ALONE]),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_kernel_that_is_wrong(monkeypatch, kind):
    field, fault, expected = FAULTS[kind]
    correct = selftest.linear_grpo_loss
    calls = []

    def loss(hidden, weight, *rest, **options):
        out = correct(hidden, weight, *rest, **options)
        if hidden.dtype == torch.float64:  # the fp64 reference must stay correct
            return out
        calls.append(kind)
        wrong = fault(getattr(out, field), len(calls), weight)
        return replace(out, **{field: wrong})

    monkeypatch.setattr(selftest, "BACKENDS", ("torch",))
    monkeypatch.setattr(selftest, "DTYPES", (torch.float32,))
    monkeypatch.setattr(selftest, "linear_grpo_loss", loss)
    checks = [check for check in checks_of("torch") if not check.ok]
    assert [check.name for check in checks] == [f"torch float32: {name}" for name in expected]
    if kind == "raises":
        assert checks[0].note == "RuntimeError: no such kernel second line"


def test_attention_of_this_machine_and_a_kernel_that_is_wrong(monkeypatch):
    monkeypatch.setattr(selftest, "DTYPES", (torch.float32,))
    assert failed("attention") == []
    wrong = Provider("own", None, lambda q, k, v, layout, rule: q * k.sum() * v.sum())
    monkeypatch.setattr(selftest, "candidates", lambda kind: [wrong])
    expected = [f"attention own float32{x}" for x in ("", ", window", ", softcap")]
    assert failed("attention") == expected


@pytest.mark.parametrize(
    ("module", "name"), [(model, "packed_rows_attention"), (Head, "logits_of")]
)
def test_a_small_model_and_layers_that_are_wrong(monkeypatch, module, name):
    """Check that wrong attention and wrong logits of our loop fail."""
    assert failed("packed rows", "rollout") == []
    correct = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *x, **y: 0.5 * correct(*x, **y))
    assert failed("packed rows") == ["packed rows and our loop: logps against the model's"]


@pytest.mark.parametrize("name", ["packed_gap", "gap_of"])
def test_a_nan_of_packed_rows_or_of_our_loop_fails(monkeypatch, name):
    monkeypatch.setattr(selftest, name, lambda *_: float("nan"))
    assert failed("packed rows") == ["packed rows and our loop: logps against the model's"]
