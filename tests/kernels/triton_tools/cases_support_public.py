"""`support=` with backend="triton", end to end in the interpreter: against the fp64 oracle on
masked logits.

Run by test_triton_interpreter.py in a process of its own. tests/loss/test_support.py has the same
for the other backends.
"""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from grpo_fast import LossConfig, Support
from grpo_fast.kernels.gpu import gradients as gradients_triton
from grpo_fast.kernels.gpu import rows as rows_triton
from grpo_fast.kernels.gpu import support as support_triton
from grpo_fast.kernels.head import support as sweeps
from tests.kernels.triton_tools import interpreter  # noqa: F401  (its repairs)
from tests.loss_cases import (
    LAYOUTS,
    LEAVES_AND_LEVELS,
    assert_same,
    make_case,
    options_for,
    run,
    support_of,
)
from tests.oracles import off_policy

LOSS_TOL, GRAD_TOL = 2e-6, 1e-5
FUNCTIONS = ("linear", "logits")


@pytest.fixture(params=["gathered"], autouse=True)
def form(request, monkeypatch):
    """The sets of these tests are so large that they would all take the dense product."""
    if request.param == "gathered":
        monkeypatch.setattr(sweeps, "GATHERED_COST_GPU", 0)


def check(function: str, case, **how):
    result = run(function, case, backend="triton", **how)
    assert_same(function, case, result, loss_tol=LOSS_TOL, grad_tol=GRAD_TOL)
    if function == "logits":
        assert not result.grads["logits"][~case.kept].any()
    return result


@pytest.mark.parametrize(("loss_type", "level"), LEAVES_AND_LEVELS)
def test_every_leaf(loss_type, level):
    """Every fifth row has the whole vocabulary; sets in no order; nonsense behind the mask."""
    beta = {} if loss_type in ("kimi", "dro") else {"beta": 0.4}
    case = make_case(31, support=True, **options_for(loss_type, level, **beta))
    check("linear", case, layout=LAYOUTS[level == "token"])


@pytest.mark.parametrize("function", ["linear", "logits"])
def test_entropies_over_the_whole_vocabulary_and_current_ratios(function):
    corrections = [{"high": 1.5, "ratio": "current/sampling"},
                   {"kind": "reject", "low": 0.5, "level": "geometric"}]  # fmt: skip
    for more in ({}, {"corrections": corrections}):
        options = options_for("dapo", entropy_coef=0.2, entropy_over="vocabulary", **more)
        case = make_case(36, support=True, sampling=True, **options)
        result = run(function, case, backend="triton")
        assert_same(function, case, result, loss_tol=LOSS_TOL, grad_tol=GRAD_TOL)


EXTRAS = {
    "softcap": dict(softcap=3.0),
    "scale": dict(logit_scale=-1.4, temperature=0.7),
    "entropy bonus": dict(entropy_coef=0.2),
    "off policy": dict(corrections=[off_policy(0.07)], softcap=2.0, entropy_coef=-0.1, beta=0.3),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_extras(function, extra):
    check(function, make_case(33, support=True, **options_for("grpo", **extra)))


@pytest.mark.parametrize("form", ["dense"], indirect=True)
@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_large_sets_take_the_dense_product(form, extra):
    check("linear", make_case(33, support=True, **options_for("grpo", **extra)))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_temperature_for_each_row(function):
    case = make_case(34, support=True, bias=False, **options_for("dapo", temperature=1.0))
    generator = torch.Generator().manual_seed(0)
    case.options["temperature"] = 0.5 + torch.rand(case.ids.shape, generator=generator)
    check(function, case)


def only_supported(case):
    """No row with the whole vocabulary."""
    return case.but(
        kept=case.kept.scatter(-1, (case.ids[..., None] + 1) % case.kept.shape[-1], False)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_row_has_a_set(function, layout):
    check(
        function, only_supported(make_case(35, support=True, **options_for("dapo"))), layout=layout
    )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_16_bits(function):
    """Gradients in bf16: fp32 sums, rounded once; nothing is rounded on the way."""
    case = make_case(36, support=True, dtype=torch.bfloat16, **options_for("dapo"))
    result = run(function, case, backend="triton")
    assert_same(function, case, result, loss_tol=5e-6, grad_tol=2.0**-8)


def shared_prompt(*, some_dense: bool = True):
    """Two completions of 4 tokens behind one prompt row: hidden row 0 predicts a token of each."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(7, 8, generator=g), torch.randn(23, 8, generator=g)
    ids, old = torch.randint(23, (8,), generator=g), -torch.rand(8, generator=g) - 1
    places = torch.tensor([0, 1, 2, 3, 0, 4, 5, 6])
    kept = torch.rand(8, 23, generator=g) < 0.4
    kept[3] |= some_dense
    support = support_of(kept.scatter_(-1, ids[:, None], True), torch.ones(8, dtype=torch.bool))
    return hidden, weight, ids, old, places, support


@pytest.mark.parametrize(("entropy_coef", "some_dense"), [(0.0, False), (0.1, True)])
def test_hidden_rows(entropy_coef, some_dense):
    hidden, weight, ids, old, places, support = shared_prompt(some_dense=some_dense)
    config = LossConfig(loss_type="dapo", entropy_coef=entropy_coef)
    found = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        out = grpo_fast.linear_grpo_loss(
            *leaves, ids, torch.tensor([1.0, -0.7]), config, old_logps=old, hidden_rows=places,
            cu_seqlens=torch.tensor([0, 4, 8]), support=support, backend=backend,
        )  # fmt: skip
        out.loss.backward()
        found.append([out.logps.detach(), *(x.grad for x in leaves)])
    for actual, expected in zip(*found, strict=True):
        assert (actual - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("of_entropy", [False, True], ids=["logps", "entropy"])
def test_differentiable_logps(of_entropy):
    hidden, weight, ids, _, places, support = shared_prompt()
    factors, found = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)), []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        results = grpo_fast.linear_logps(
            *leaves, ids, hidden_rows=places, support=support, return_entropy=True,
            softcap=4.0, backend=backend,
        )  # fmt: skip
        results = [(r * w).sum() for r, w in zip(results, factors, strict=True)]
        sum(results[: 1 + of_entropy]).backward()
        found.append([x.grad for x in leaves])
    for actual, expected in zip(*found, strict=True):
        assert (actual - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_on_policy_ratio_is_one_and_bits_repeat(function, dtype):
    """A pass without gradient gives the bits of one with gradient; every gradient repeats its
    own.
    """
    case = only_supported(
        make_case(37, support=True, dtype=dtype, bias=False, **options_for("grpo"))
    )
    mask = case.mask
    support = support_of(case.kept.flatten(0, -2), mask.flatten())
    tensors = (case.hidden, case.weight)
    if function == "logits":
        tensors = (case.hidden @ case.weight.T,)
    with torch.no_grad():
        logps = getattr(grpo_fast, f"{function}_logps")
        ids = case.ids.masked_fill(~mask, -100)
        old = logps(*tensors, ids, support=support, backend="triton")
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = getattr(grpo_fast, f"{function}_grpo_loss")(
            *leaves, case.ids, case.advantages, LossConfig(loss_type="grpo"), old_logps=old,
            completion_mask=mask, support=support, backend="triton",
        )  # fmt: skip
        out.loss.backward()
        runs.append([x.grad for x in leaves])
        assert torch.equal(out.logps[mask], old[mask])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_the_kernels_ran(monkeypatch):
    """Without a launch, the cases above would compare torch with torch. A frozen head takes no
    kernel for dW, and nobody reads W again where there is no gradient of an entropy.
    """
    launched, original = [], rows_triton.launch

    def launch(kernel, *arguments, **options):
        launched.append(kernel.fn.__name__)
        original(kernel, *arguments, **options)

    for module in (rows_triton, support_triton, gradients_triton):
        monkeypatch.setattr(module, "launch", launch)
    hidden, weight, ids, old, _, _ = shared_prompt()
    support = Support(torch.stack([ids, (ids + 1) % 23], 1).flatten(), torch.arange(0, 17, 2))
    hidden = torch.cat([hidden, hidden[:1]]).requires_grad_()

    def call(weight, entropy_coef=0.0):
        launched.clear()
        config = LossConfig(loss_type="dapo", entropy_coef=entropy_coef)
        grpo_fast.linear_grpo_loss(
            hidden, weight, ids, torch.tensor([1.0, -0.7]), config, old_logps=old,
            cu_seqlens=torch.tensor([0, 4, 8]), support=support, backend="triton",
        )  # fmt: skip
        return [x for x in launched if x != "scale_kernel"]

    frozen = ["support_head_kernel", "row_grad_kernel", "scaled_hidden_kernel"]
    assert call(weight) == frozen
    assert call(weight.requires_grad_()) == [*frozen, "sums_kernel"]
    assert call(weight, 0.1) == [*frozen[:2], "sums_kernel", "scaled_hidden_kernel", "sums_kernel"]
    launched.clear()
    logits = (hidden @ weight.T).detach()
    grpo_fast.logits_logps(logits, ids, support=support, backend="triton")
    assert launched == ["row_logps_kernel"]
