"""`support=`: the sampler's kept sets. Truth is the fp64 oracle on masked logits."""

from __future__ import annotations

import pytest
import torch

from tests.loss_cases import (
    AGGREGATIONS,
    BACKENDS,
    LAYOUTS,
    LOSS_LEVELS,
    assert_same,
    make_case,
    options_for,
    run,
)

LOSS_TOL, GRAD_TOL = 2e-6, 1e-5
pytestmark = pytest.mark.usefixtures("poisoned_memory")
FUNCTIONS = ("linear", "logits")


def check(function, case, **how):
    result = run(function, case, **how)
    assert_same(function, case, result, loss_tol=LOSS_TOL, grad_tol=GRAD_TOL)
    if function == "logits":
        assert not result.grads["logits"][~case.kept].any()
    return result


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("loss_type", "level"), LOSS_LEVELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_loss(loss_type, level, function, backend):
    beta = {} if loss_type in ("kimi", "dro") else {"beta": 0.4}
    case = make_case(31, support=True, **options_for(loss_type, level, **beta))
    check(function, case, backend=backend, layout=LAYOUTS[level == "token"])


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_aggregations_and_layouts(function, aggregation, layout):
    case = make_case(32, support=True, **options_for("grpo", aggregation=aggregation))
    check(function, case, layout=layout, backend="auto")


EXTRAS = {
    "softcap": dict(softcap=3.0),
    "scale": dict(logit_scale=-1.4, temperature=0.7),
    "entropy bonus": dict(entropy_coef=0.2),
    "entropy quantile": dict(top_entropy_quantile=0.55, compute_entropy=True),
    "correction": dict(sampling_correction="token_truncate"),
    "off policy": dict(off_policy_threshold=0.07, softcap=2.0, entropy_coef=-0.1),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_extras(function, extra, backend):
    case = make_case(33, support=True, sampling=True, **options_for("grpo", **extra))
    check(function, case, backend=backend)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_temperature_for_each_row(function, backend):
    case = make_case(34, support=True, bias=False, **options_for("dapo", temperature=1.0))
    case.options["temperature"] = 0.5 + torch.rand(
        case.ids.shape, generator=torch.Generator().manual_seed(0)
    )
    check(function, case, backend=backend, layout="padded")
