"""Test that NaN, infinities and invalid ids at masked tokens do not change a bit of the results."""

from __future__ import annotations

import math

import torch

from tests import oracles
from tests.loss_cases import (
    BACKENDS,
    LAYOUTS,
    LOSS_LEVELS,
    Case,
    Result,
    call,
    make_case,
    options_for,
    pack,
    reference_logps,
    run,
    spans,
)
from tests.pairs import pairs

DTYPES = (torch.float32, torch.bfloat16)
POISON = (math.nan, math.inf, -math.inf, 3e38)
BAD_IDS = (-100, -1, 10**6, 2**40)


def poisoned(case: Case, seed: int = 0) -> Case:
    """Return a copy of the case with NaN, ±inf, huge numbers or invalid ids at masked tokens."""
    off = ~case.mask
    g = torch.Generator().manual_seed(seed)

    def spoil(x, values=POISON):
        if x is None:
            return None
        bad = torch.tensor(values, dtype=x.dtype)[torch.randint(len(values), x.shape, generator=g)]
        m = off if x.dim() == 2 else off.unsqueeze(-1)
        return torch.where(m, bad, x)

    return case.but(
        hidden=spoil(case.hidden), ids=spoil(case.ids, BAD_IDS), old=spoil(case.old),
        ref=spoil(case.ref), sampling=spoil(case.sampling),
        advantages=spoil(case.advantages) if case.advantages.dim() == 2 else case.advantages,
    )  # fmt: skip


def assert_identical(a, b) -> None:
    assert torch.equal(a.loss, b.loss) and torch.isfinite(a.loss)
    assert torch.equal(a.logps, b.logps)
    for name, value in a.metrics.items():
        assert torch.equal(value, b.metrics[name]), name
    for name, grad in a.grads.items():
        assert torch.equal(grad, b.grads[name]) and torch.isfinite(grad).all(), name


@pairs(layout=LAYOUTS, per_token=[False, True], loss_type__level=LOSS_LEVELS)
def test_masked_poison_is_inert_for_logps(loss_type, level, per_token, layout):
    more = {"corrections": [oracles.off_policy(0.2)], "top_entropy_quantile": 0.7}
    options = options_for(loss_type, level, beta=0.2, entropy_coef=0.1, **more)
    case = make_case(81, sampling=True, per_token_advantages=per_token, **options)
    found = []
    for this, given in ((case, (0.0, 0.0)), (poisoned(case), (math.nan, math.inf))):
        lay = (lambda x: x) if layout == "padded" else (lambda x: pack(x, spans(case.mask)))
        leaves = [lay(torch.where(case.mask, x, v)).requires_grad_()
                  for x, v in zip(reference_logps(case), given, strict=True)]  # fmt: skip
        out = call("logps", this, layout, logps=leaves[0], entropy=leaves[1])
        out.loss.backward()
        grads = {"logps": leaves[0].grad, "entropy": leaves[1].grad}
        found.append(Result(out.loss, out.metrics, out.loss, None, grads, out))
    assert_identical(*found)


@pairs(layout=LAYOUTS, function=["linear", "logits"], dtype=DTYPES, backend=BACKENDS,
       loss_type__level=LOSS_LEVELS)  # fmt: skip
def test_masked_poison_is_inert_in_the_fused_paths(
    loss_type, level, dtype, function, layout, backend
):
    options = options_for(loss_type, level, beta=0.2, entropy_coef=0.1)
    case = make_case(82, dtype=dtype, sampling=True, **options)
    cases = case, poisoned(case)
    assert_identical(*(run(function, x, layout=layout, backend=backend) for x in cases))
    with torch.no_grad():  # no logits are stored
        a, b = (call(function, x, layout, backend=backend) for x in cases)
    assert torch.equal(a.loss, b.loss) and torch.equal(a.logps, b.logps)
