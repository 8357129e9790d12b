"""A bitwise promise: NaN, infinities and impossible ids in masked slots change no
number.
"""

from __future__ import annotations

import math

import pytest
import torch

import grpo_fast
from tests import oracles
from tests.loss_cases import (
    BACKENDS,
    LAYOUTS,
    LOSS_LEVELS,
    Case,
    arguments,
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
    """NaN, ±inf, huge numbers and impossible ids in every masked slot."""
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


def run_logps(case: Case, logps, entropy, layout):
    """grpo_loss on logps given outright (poison included)."""
    config = grpo_fast.LossConfig(**case.options)
    keywords = arguments(case, layout)
    advantages = keywords.pop("advantages")
    lay = (lambda x: x) if layout == "padded" else (lambda x: pack(x, spans(case.mask)))
    x, H = lay(logps).clone().requires_grad_(), lay(entropy).clone().requires_grad_()
    out = grpo_fast.grpo_loss(x, advantages, config, entropy=H, **keywords)
    out.loss.backward()
    return out, {"logps": x.grad, "entropy": H.grad}


def assert_identical(a, b):
    loss_a, metrics_a, grads_a = a
    loss_b, metrics_b, grads_b = b
    assert torch.equal(loss_a, loss_b) and torch.isfinite(loss_a)
    for name, value in metrics_a.items():
        assert torch.equal(value, metrics_b[name]), name
    for name, grad in grads_a.items():
        assert torch.equal(grad, grads_b[name]), name
        assert torch.isfinite(grad).all(), name


@pairs(layout=LAYOUTS, per_token=[False, True], loss_type__level=LOSS_LEVELS)
def test_masked_poison_is_inert_for_logps(loss_type, level, per_token, layout):
    options = options_for(
        loss_type,
        level,
        beta=0.2,
        entropy_coef=0.1,
        corrections=[oracles.off_policy(0.2)],
        top_entropy_quantile=0.7,
    )
    case = make_case(81, sampling=True, per_token_advantages=per_token, **options)
    logps, entropy = reference_logps(case)
    bad = poisoned(case)
    spoiled = [
        torch.where(case.mask, x, torch.full_like(x, v))
        for x, v in ((logps, math.nan), (entropy, math.inf))
    ]
    (clean, clean_grads), (dirty, dirty_grads) = (
        run_logps(case, logps, entropy, layout),
        run_logps(bad, *spoiled, layout),
    )
    assert_identical(
        (clean.loss, clean.metrics, clean_grads), (dirty.loss, dirty.metrics, dirty_grads)
    )


@pairs(
    layout=LAYOUTS,
    function=["linear", "logits"],
    dtype=DTYPES,
    loss_type__level=[
        ("grpo", "token"),
        ("gspo", "sequence"),
        ("vespo", "token"),
        ("gmpo", "token"),
    ],
    backend=BACKENDS,
)
def test_masked_poison_is_inert_in_the_fused_paths(
    loss_type, level, dtype, function, layout, backend
):
    options = options_for(loss_type, level, beta=0.2, entropy_coef=0.1)
    case = make_case(82, dtype=dtype, sampling=True, **options)
    clean = run(function, case, layout=layout, backend=backend)
    dirty = run(function, poisoned(case), layout=layout, backend=backend)
    assert_identical(
        (clean.loss, clean.metrics, clean.grads), (dirty.loss, dirty.metrics, dirty.grads)
    )
    assert torch.equal(clean.logps, dirty.logps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_poison_is_inert_in_the_store_free_path(backend):
    case = make_case(83, **options_for("grpo", beta=0.2))
    config = grpo_fast.LossConfig(**case.options)
    outs = []
    for c in (case, poisoned(case)):
        keywords = arguments(c, "padded")
        advantages = keywords.pop("advantages")
        with torch.no_grad():
            outs.append(grpo_fast.linear_grpo_loss(
                c.hidden, c.weight, c.ids, advantages, config, bias=c.bias, backend=backend,
                **keywords,
            ))  # fmt: skip
    assert torch.equal(outs[0].loss, outs[1].loss) and torch.equal(outs[0].logps, outs[1].logps)


@pytest.mark.parametrize(
    "loss_type", [loss_type for loss_type, level in LOSS_LEVELS if level == "token"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_masked_poison_is_inert_for_every_loss_of_given_logits(backend, loss_type):
    """One sweep over all rows: a masked one has NaN logits, and most slopes are NaN there."""
    case = make_case(25, **options_for(loss_type))
    clean = run("logits", case, backend=backend)
    dirty = run(
        "logits",
        case.but(hidden=torch.where(case.mask[..., None], case.hidden, torch.nan)),
        backend=backend,
    )
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean.grads["logits"], dirty.grads["logits"])
