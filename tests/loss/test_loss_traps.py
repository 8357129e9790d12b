"""Test inputs with infinities and empty inputs that caused bugs in other libraries.

test_loss_parity.py covers bugs in slopes and weights.
"""

from __future__ import annotations

import pytest
import torch

from tests.loss_cases import (
    BACKENDS,
    LOSS_LEVELS,
    check,
    make_case,
    options_for,
    reference_logps,
    run,
)
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
def test_trap_old_logp_far_from_logp(loss_type, level, gap, function):
    """Check that results are finite and correct if logp is far above or far below old_logp.

    In other libraries, the ratio becomes inf, and the gradient of a clipped row is 0·inf = NaN. A
    ratio is clamped to e^20, but its gradient must not be set to 0: the step must still bring logp
    back to old_logp. If tokens differ in both directions, their log ratios must not be clamped
    before their mean or sum is computed. Some results are only checked to be finite: logits near
    1e4 and the thresholds of "dppo" are not accurate in fp32, and "kimi" clamps its log ratios.
    """
    is_exact = function == "logps" and loss_type not in ("kimi", "dro", "dppo_tv", "dppo_kl")
    likely = make_case(25, **options_for(loss_type, level, beta=0.1))
    unlikely = of_unlikely_targets(likely, gap)
    both = torch.where(torch.arange(7) % 2 == 0, -gap, gap)
    for case, difference in ((likely, -gap), (unlikely, gap), (unlikely, both)):
        old = reference_logps(case)[0] + difference
        assert (old[case.mask] <= 0).all()
        case = case.but(old=old)
        result = check(function, case) if is_exact else run(function, case)
        assert torch.isfinite(result.loss)
        for name, grad in result.grads.items():
            assert torch.isfinite(grad).all(), name
        for name, metric in result.metrics.items():
            assert torch.isfinite(metric).all(), name
