"""Tests that the self-tests pass on this machine, and that each self-test finds a planted fault."""

from dataclasses import replace

import pytest
import torch

from grpo_fast.attention import Head, model
from grpo_fast.attention.dispatch import Provider
from grpo_fast.doctor import selftest
from grpo_fast.doctor.selftest import checked, table

CPU = torch.device("cpu")
VALUES, GRADIENTS = "loss and logps against fp64", "loss and gradients against fp64"
AGAIN, ALONE = "same bits again", "same bits alone"


def checks_of(*starts: str) -> dict[str, tuple[bool, str]]:
    """Run the self-tests whose names have one of these prefixes. Return the results by name."""
    return {entry[0]: checked(*entry) for entry in table(CPU) if entry[0].startswith(starts)}


def failed(*starts: str) -> list[str]:
    return [name for name, (ok, _) in checks_of(*starts).items() if not ok]


def test_kernels_of_this_machine():
    checks = checks_of(*selftest.BACKENDS)
    assert all(ok for ok, _ in checks.values())
    ran = {name for name, (_, line) in checks.items() if line.startswith("ok ")}
    for dtype in ("float32", "bfloat16"):
        assert {f"torch {dtype}: {x}" for x in (VALUES, GRADIENTS, AGAIN, ALONE)} <= ran
    assert checked("x", 0.0, "no compiler") == (True, "skipped  x no compiler")
    assert checked("x", 0.0, lambda: 0.0)[0]
    assert not checked("x", 1.0, lambda: float("nan"))[0] and not checked("x", 1.0, lambda: 2.0)[0]


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
    lines = {name: line for name, (ok, line) in checks_of("torch").items() if not ok}
    assert [*lines] == [f"torch float32: {name}" for name in expected]
    if kind == "raises":
        assert [*lines.values()][0].endswith(") RuntimeError: no such kernel second line")


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
    assert failed("packed rows") == []
    correct = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *x, **y: 0.5 * correct(*x, **y))
    assert failed("packed rows") == ["packed rows and our loop: logps against the model's"]


@pytest.mark.parametrize("name", ["packed_gap", "gap_of"])
def test_a_nan_of_packed_rows_or_of_our_loop_fails(monkeypatch, name):
    monkeypatch.setattr(selftest, name, lambda *_: float("nan"))
    assert failed("packed rows") == ["packed rows and our loop: logps against the model's"]
