"""Tests that the self-tests pass on this machine, and that each self-test finds a planted fault."""

from dataclasses import replace

import pytest
import torch

from grpo_fast.attention import model
from grpo_fast.attention.dispatch import Provider
from grpo_fast.doctor import selftest
from grpo_fast.doctor.selftest import Check, attention_checks, kernel_checks
from grpo_fast.rollout.own import decode
from grpo_fast.train.checkpoint import Checkpoints

CPU = torch.device("cpu")
VALUES, GRADIENTS, BITS = selftest.ERRORS


def failed(checks) -> list[str]:
    return [check.name for check in checks if not check.ok]


def test_kernels_of_this_machine():
    checks = list(kernel_checks(CPU))
    assert failed(checks) == []
    ran = {check.name for check in checks if check.error is not None}
    for dtype in ("float32", "bfloat16"):
        assert {f"torch {dtype}: {x}" for x in selftest.ERRORS} <= ran
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
    "NaN": ("logps", lambda x, *_: x * torch.nan, [VALUES, BITS]),
    "gradients": ("loss", lambda x, _, w: x + 1e-3 * (w - w.detach()).sum(), [GRADIENTS]),
    "bits that depend on the batch": ("logps", lambda x, *_: x + 2**-22 * len(x), [BITS]),
    "bits that depend on the call": ("loss", lambda x, n, _: x * (1 + 2**-23 * (n % 2)), [BITS]),
    "raises": ("loss", no_kernel, [VALUES, GRADIENTS, BITS]),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_kernel_that_is_wrong(monkeypatch, kind):
    field, fault, expected = FAULTS[kind]
    correct = selftest.linear_grpo_loss
    calls = []

    def loss(**arguments):
        out = correct(**arguments)
        if arguments["hidden"].dtype == torch.float64:  # the fp64 reference must stay correct
            return out
        calls.append(kind)
        wrong = fault(getattr(out, field), len(calls), arguments["lm_head_weight"])
        return replace(out, **{field: wrong})

    monkeypatch.setattr(selftest, "BACKENDS", ("torch",))
    monkeypatch.setattr(selftest, "DTYPES", (torch.float32,))
    monkeypatch.setattr(selftest, "linear_grpo_loss", loss)
    checks = list(kernel_checks(CPU))
    assert failed(checks) == [f"torch float32: {name}" for name in expected]
    if kind == "raises":
        assert checks[0].note == "RuntimeError: no such kernel second line"


def test_attention_of_this_machine_and_a_kernel_that_is_wrong(monkeypatch):
    monkeypatch.setattr(selftest, "DTYPES", (torch.float32,))
    assert failed(attention_checks(CPU)) == []
    wrong = Provider("own", None, lambda q, k, v, layout, rule: q * k.sum() * v.sum())
    monkeypatch.setattr(selftest, "candidates", lambda kind: [wrong])
    expected = [f"attention own float32{x}" for x in ("", ", window", ", softcap")]
    assert failed(attention_checks(CPU)) == expected


@pytest.mark.parametrize(
    ("module", "name", "wrong"), [(model, "packed_rows_attention", 2), (decode, "logits_of", 1)]
)
def test_a_small_model_and_layers_that_are_wrong(monkeypatch, module, name, wrong):
    """Check that wrong attention fails both checks, and that wrong logits of the loop fail one."""
    assert failed(selftest.model_checks(CPU)) == []
    correct = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *x, **y: 0.5 * correct(*x, **y))
    checks = ["packed rows: logps against the model's", "our loop: logps against the model's"]
    assert failed(selftest.model_checks(CPU)) == checks[-wrong:]


@pytest.mark.usefixtures("no_pictures")
def test_a_rollout_and_a_checkpoint(monkeypatch):
    checks = list(selftest.run_checks(CPU))
    assert failed(checks) == [] and [c.error for c in checks][1] == 0
    resume = Checkpoints.resume

    def without_moments(self, *arguments):
        resume(self, *arguments)
        for state in self.run.optimizer.adam.state.values():
            state["exp_avg"].zero_()

    monkeypatch.setattr(Checkpoints, "resume", without_moments)
    assert selftest.resumed_differences() > 0
