"""Test inputs with infinities and empty inputs that caused bugs in other libraries.

test_loss_parity.py covers bugs in slopes and weights.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import grpo_fast
from tests.loss_cases import BACKENDS, LOSS_LEVELS, make_case, options_for, reference_logps, run
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pairs(backend=BACKENDS, dtype=[torch.float32, torch.bfloat16], leading=[64, 127, 128, 1024],
       function=["linear", "logits"])  # fmt: skip
def test_trap_a_whole_leading_vocabulary_block_of_minus_infinity(function, leading, dtype, backend):
    """Check that columns with logit −inf have no influence, even if they fill the first block.

    Other libraries compute exp(−inf − (−inf)), which is NaN, for such a block.
    """
    options = options_for("reinforce", entropy_coef=0.1)
    part = make_case(74, V=40, dtype=dtype, **options)
    before = torch.ones(leading, 8, dtype=dtype)
    whole = part.but(ids=part.ids + leading, weight=torch.cat([before, part.weight]),
                     bias=torch.cat([before[:, 0] * -torch.inf, part.bias]))  # fmt: skip
    ours, expected = (run(function, x, backend=backend) for x in (whole, part))
    assert (ours.logps - expected.logps).abs().max() <= 2e-6
    assert (ours.entropy - expected.entropy)[part.mask].abs().max() <= 2e-6
    for name, grad in ours.grads.items():
        if name != "hidden":
            added = grad.movedim(-1, 0)[:leading] if name == "logits" else grad[:leading]
            assert (added == 0).all(), name
            grad = grad[..., leading:] if name == "logits" else grad[leading:]
        torch.testing.assert_close(grad, expected.grads[name], rtol=1e-5, atol=1e-6)


def of_unlikely_targets(case, gap):
    """Return a copy of the case in which all targets are unlikely.

    The bias makes the last vocabulary id very likely, and this id is never a target. The logps of
    the targets fall by roughly `gap` nats.
    """
    V, before = len(case.weight), reference_logps(case)[0]
    bias = case.bias.clone()
    bias[V - 1] += gap + 10
    far = case.but(ids=case.ids.clamp(max=V - 2), bias=bias)
    return far.but(ref=reference_logps(far)[0] + case.ref - before)


@pairs(function=["logps", "logits", "linear"], gap=[25.0, 90.0, 1e4], loss_type__level=LOSS_LEVELS)
def test_trap_old_logp_far_below_logp_stays_finite(loss_type, level, gap, function):
    """Check that results are finite if logp is far above or far below old_logp.

    In other libraries, the ratio becomes inf, and the gradient of a clipped row is 0·inf = NaN.
    """
    likely = make_case(25, **options_for(loss_type, level, beta=0.1))
    unlikely = of_unlikely_targets(likely, gap)
    for case, difference in ((likely, -gap), (unlikely, gap)):
        old = reference_logps(case)[0] + difference
        assert (old[case.mask] <= 0).all()
        result = run(function, case.but(old=old))
        assert torch.isfinite(result.loss)
        for name, grad in result.grads.items():
            assert torch.isfinite(grad).all(), name
        for name, metric in result.metrics.items():
            assert torch.isfinite(metric).all(), name


def packed_loss(config, logps, log_ratios, advantages, lengths):
    """Call `grpo_loss` on packed completions, and return its output and the gradient of `logps`."""
    logps = torch.tensor(logps, requires_grad=True)
    output = grpo_fast.grpo_loss(
        logps, torch.tensor(advantages), config,
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)]),
        old_logps=logps.detach() - torch.tensor(log_ratios),
    )  # fmt: skip
    output.loss.backward()
    return output, logps.grad


@pytest.mark.parametrize("loss_type", ["grpo", "gspo", "gspo_token"])
def test_the_overflow_guard_of_a_mean_ratio_leaves_its_tokens_alone(loss_type):
    """Check that the log ratios of tokens are not clamped before their mean is computed.

    The log ratios 40, -39 and -0.1 have the mean 0.3, which needs no clamp. If each log ratio were
    clamped to 20, the mean would be wrong.
    """
    level = {"importance_sampling_level": "sequence"} if loss_type == "grpo" else {}
    config = grpo_fast.LossConfig(loss_type=loss_type, epsilon_low=0.5, epsilon_high=0.5, **level)
    output, grad = packed_loss(config, [-1.0, -40.0, -2.0], [40.0, -39.0, -0.1], [2.0], [3])
    expected = -2 * math.exp(0.3)
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(grad, torch.full((3,), expected / 3), rtol=1e-5, atol=0)


@pytest.mark.parametrize("length", [8, 500])
def test_the_overflow_guard_of_a_summed_ratio(length):
    """Check that a completion's ratio is clamped to e^20 if each token's logp rose by 4 nats.

    The gradient must remain positive, so that the step decreases the logps.
    """
    config = grpo_fast.LossConfig(loss_type="grpo", importance_sampling_level="sequence_sum")
    output, grad = packed_loss(config, [-1.0] * length, [4.0] * length, [-1.0], [length])
    assert output.loss.item() == pytest.approx(math.exp(20.0), rel=1e-5)
    torch.testing.assert_close(grad, torch.full((length,), math.exp(20.0)), rtol=1e-5, atol=0)
    assert all(torch.isfinite(metric).all() for metric in output.metrics.values())


@pytest.mark.parametrize("loss_type", ["unclipped", "grpo", "dual_clip"])
def test_the_overflow_guard_of_the_ratio_keeps_the_slope(loss_type):
    """Check that the ratio is exp(min(log ratio, 20)), and that its gradient is not set to 0.

    For a negative advantage A the gradient must still be −r·A, so that the step decreases logp.
    """
    options = options_for(loss_type, "token", "token_mean_local")
    case = make_case(25, **options)
    logps, _ = reference_logps(case)
    case = case.but(old=logps - 30.0, advantages=-torch.ones(5))
    grad = run("logps", case).grads["logps"][case.mask]
    if loss_type == "dual_clip":
        assert (grad == 0).all()  # a ratio above c gives the constant loss −A·c
    else:
        torch.testing.assert_close(
            grad, torch.full_like(grad, math.exp(20.0) / case.mask.sum().item()), rtol=1e-5, atol=0
        )
