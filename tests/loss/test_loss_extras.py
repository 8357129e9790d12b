"""Test corrections, entropy, logit transforms and metrics against the oracle and known values.

Several corrections must be applied in their documented order. The last tests are about autograd:
double backward, overwritten logits, frozen and expanded inputs. test_fuzz.py tests upstream
gradients, repeated backward passes and the bits of frozen inputs.
"""

import math

import pytest
import torch

import grpo_fast
from benchmarks import measure
from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import gemm
from grpo_fast.kernels.head import products
from grpo_fast.kernels.workspace import drop_workspace
from tests import oracles
from tests.loss_cases import (
    BACKENDS,
    FUNCTIONS,
    LAYOUTS,
    LOSS_LEVELS,
    arguments,
    call,
    leaves_of,
    make_case,
    options_for,
    reference_logps,
    run,
    truth,
)

EXACT = dict(loss_tol=3e-6, grad_tol=1e-5)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


NEGATIVE = {"kind": "reject", "low": 0.5, "high": 2.0, "advantages": "negative"}
RATIOS = (0.4, 0.8, 6.0, 1.5)
TINY = (1e-25, 1e-25, 3e-25, 1e-30)
BOUNDS = (0.1, 0.5, 2.0, 9.0)  # 0.5 and 2 are exactly the bounds of NEGATIVE
WEIGHTS = [  # corrections, ratios and advantages of four tokens; their weights and clipped share
    ({"kind": "mask", "low": 0.5, "high": 5.0}, RATIOS, [1.0] * 4, [0, 0.8, 0, 1.5], 0.0),
    ({"low": 0.5, "high": 5.0}, RATIOS, [1.0] * 4, [0.5, 0.8, 5, 1.5], 0.5),
    ({"kind": "reject", "high": 5.0, "level": "worst_token"}, RATIOS, [1.0] * 4, [0] * 4, 0.0),
    ({"high": 0.81}, RATIOS, [1.0] * 4, [0.4, 0.8, 0.81, 0.81], 0.5),
    # Only a token with a negative advantage is rejected.
    (NEGATIVE, BOUNDS, [0.0] * 4, [1, 1, 1, 1], 0.0),
    (NEGATIVE, BOUNDS, [-1e-30] * 4, [0, 1, 1, 0], 0.0),
    (NEGATIVE, BOUNDS, [1e-30, 0.0, -1.0, -1.0], [1, 1, 1, 0], 0.0),
    (NEGATIVE, BOUNDS, [-1.0, -1.0, 0.0, 1.0], [0, 1, 1, 1], 0.0),
    # The squares of these weights underflow in fp32.
    ({"high": 5.0}, TINY, [1.0] * 4, TINY, 0.0),
    # A token that the sampler could not score counts as agreeing, as in TRL's get_off_policy_mask.
    ({"high": 5.0}, (math.nan, 0.8, 6.0, 1.5), [1.0] * 4, [1, 0.8, 5, 1.5], 0.25),
    (NEGATIVE, (math.nan, 0.4, 1.5, 9.0), [-1.0] * 4, [1, 0, 1, 0], 0.0),
]


@pytest.mark.parametrize("loss_type", ["reinforce", "kimi"])
@pytest.mark.parametrize(("corrections", "ratios", "advantages", "weights", "clipped"), WEIGHTS)
def test_weights_and_metrics_of_corrections(
    loss_type, corrections, ratios, advantages, weights, clipped
):
    """Check the weight of each token, and how many tokens the metrics count as masked and clipped.

    "effective_sample_size" is a share of the tokens, (Σw)²/(n·Σw²). The loss "kimi" is tested
    because its gradient shows the weight of a token even if the advantage is 0.
    """
    config = grpo_fast.LossConfig(
        loss_type, corrections=corrections, beta=1.0 if loss_type == "kimi" else 0.0
    )
    logps, old = torch.zeros(1, 4, requires_grad=True), torch.full((1, 4), -0.3)
    given, w = torch.tensor([advantages]), torch.tensor(weights, dtype=torch.float64)
    sampling = torch.tensor([ratios]).log().neg() - 0.3
    out = grpo_fast.grpo_loss(logps, given, config, old_logps=old, sampling_logps=sampling)
    out.loss.backward()
    slope = -given[0] + (0.3 if loss_type == "kimi" else 0.0)
    torch.testing.assert_close(logps.grad[0].double(), w * slope / 4, rtol=1e-5, atol=0.0)
    names = ("masked", "clipped", "effective_sample_size")
    size = float(w.sum() ** 2 / (4 * w.square().sum())) if w.any() else 0.0
    found = [float(out.metrics[f"sampling/{name}"]) for name in names]
    assert found == pytest.approx([weights.count(0) / 4, clipped, size])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_given_logps_of_any_dtype_give_fp32_outputs(dtype):
    """Compare with the same numbers in fp32.

    The threshold of the entropy filter lies between two entropies. In bf16, it would be rounded to
    one of them.
    """
    logps = -torch.linspace(0.5, 2.0, 12).view(2, 6).to(dtype)
    entropy = torch.linspace(3.0, 3.2, 12).view(2, 6).to(dtype)
    config = grpo_fast.LossConfig("gspo", top_entropy_quantile=0.4)
    old = logps.float() - 0.1
    found = [
        grpo_fast.grpo_loss(x, torch.tensor([1.0, -1.0]), config, entropy=h, old_logps=old)
        for x, h in ((logps, entropy), (logps.float(), entropy.float()))
    ]
    outputs = [(x.loss, x.logps, x.entropy, *x.metrics.values()) for x in found]
    for a, b in zip(*outputs, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("loss_type", "level"), LOSS_LEVELS)
def test_metrics_are_masked_means(loss_type, level, layout):
    case = make_case(43, **options_for(loss_type, level, beta=0.3))
    result = run("linear", case, layout=layout)
    m = {k: v.item() for k, v in result.metrics.items()}
    assert all(v.dim() == 0 and not v.requires_grad for v in result.metrics.values())
    expected = truth("linear", case)
    assert m["active_tokens"] == case.mask.sum().item()
    raw = (expected.logps - case.old.double())[case.mask]
    assert m["approx_kl"] == pytest.approx((raw**2 / 2).mean().item(), rel=1e-5)
    # Scale the tolerance for "sequence_sum". Its ratio is a product over the tokens of a
    # completion, so its loss can be several times as large.
    size = abs(expected.policy_loss.item()) if level == "sequence_sum" else 1.0
    assert m["policy_loss"] == pytest.approx(expected.policy_loss.item(), abs=3e-6 * max(1.0, size))
    if loss_type not in ("kimi", "dro"):
        assert m["kl"] == pytest.approx(torch.cat(expected.kls).mean().item(), rel=1e-5)
        assert m["kl_guarded"] == 0
    if loss_type in ("vespo", "gmpo", "gspo_token"):
        return
    rows = oracles.completions_of(expected.logps, case.advantages, case.mask, old=case.old)
    o = oracles.resolve(case.options)
    rows = [(oracles.ratio(c, o), c.advantage) for c in rows if len(c.logp)]
    flat = torch.cat([r for r, _ in rows])
    for name, value in (("mean", flat.mean()), ("min", flat.min()), ("max", flat.max())):
        assert m[f"ratio/{name}"] == pytest.approx(value.item(), rel=1e-5)
    low = [((r < 0.8) & (a < 0)).double() for r, a in rows]
    high = [((r > (1.5 if loss_type == "cispo" else 1.28)) & (a > 0)).double() for r, a in rows]
    if level == "token":
        assert any(x.any() for x in low) and any(x.any() for x in high)
    if loss_type == "cispo":
        assert m["cispo_clip_ratio"] == pytest.approx(torch.cat(high).mean().item(), abs=1e-6)
    if "clip_ratio/low_mean" in m:
        region = [x + y for x, y in zip(low, high, strict=True)]
        for name, of in (("low", low), ("high", high), ("region", region)):
            means = torch.stack([x.mean() for x in of])
            wanted = {"mean": torch.cat(of).mean(), "min": means.min(), "max": means.max()}
            for what, value in wanted.items():
                assert m[f"clip_ratio/{name}_{what}"] == pytest.approx(value.item(), abs=1e-6)
    has_clips = loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "dual_clip", "gspo")
    assert has_clips == ("clip_ratio/low_mean" in m)


def test_vespo_phi():
    case = make_case(45, **options_for("vespo"))
    case = case.but(old=case.old * 0.1 + 0.9 * truth("linear", case).logps.float())
    m = run("linear", case).metrics
    rows = oracles.completions_of(
        truth("linear", case).logps, case.advantages, case.mask, old=case.old
    )
    phi = torch.cat(
        [oracles.vespo_phi(c, oracles.resolve(case.options)) for c in rows if len(c.logp)]
    )
    assert phi.max() > 0.05
    assert m["vespo/phi_seq_mean"].item() == pytest.approx(phi.mean().item(), rel=1e-4)


def test_kl_guard_is_counted():
    case = make_case(46, **options_for("grpo", beta=0.1))
    logps, _ = reference_logps(case)
    ref = case.ref.clone()
    ref[0, 1] = logps[0, 1] + 60.0
    ref[3, 0] = logps[3, 0] + 21.0
    result = run("logps", case.but(ref=ref))
    assert result.metrics["kl_guarded"].item() == 2
    assert all(math.isfinite(v.item()) for v in result.metrics.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_masked", [False, True])
def test_metrics_are_those_of_the_call_whatever_becomes_of_its_arguments(is_masked, layout):
    """Check that metrics do not change if the caller modifies the arguments after the call.

    Metrics are computed later, on first access, and must use the original values.
    """
    mask = None if is_masked else torch.ones(5, 7, dtype=torch.bool)
    options = options_for("grpo", beta=0.1)
    case = make_case(48, mask=mask, sampling=True, per_token_advantages=True, **options)
    outs = []
    for is_reused in (False, True):
        given = arguments("logps", case, layout)
        tensors = {name: x.clone() for name, x in given.items() if torch.is_tensor(x)}
        outs.append(call("logps", case, layout, **tensors))
        for x in tensors.values() if is_reused else ():
            x.zero_()
    fresh, reused = (out.metrics for out in outs)
    assert fresh.keys() == reused.keys()
    assert all(torch.equal(fresh[name], reused[name]) for name in fresh)


def test_skipped_rows_are_counted():
    """Check that the metric "skipped_rows" counts the rows without gradient.

    A row with advantage 0 and without KL is skipped, and its gradient must be exactly 0.
    """
    case = make_case(47, **options_for("reinforce"))
    advantages = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    result = run("linear", case.but(advantages=advantages))
    active = (case.mask & (advantages != 0)[:, None]).sum().item()
    total = case.mask.numel()
    skipped = result.metrics["skipped_rows"].item()
    assert skipped in (total - active, case.mask.sum().item() - active)
    assert (result.grads["hidden"][1] == 0).all() and (result.grads["hidden"][3] == 0).all()


@pytest.mark.skipif(
    route.unavailable("cpu", "cpu") is not None, reason="the bound is that of the C++ kernels"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_gradient_cost_no_second_chunk(monkeypatch, dtype):
    """Check the peak memory of a call with a single chunk of (1024, 32768) logits.

    A third of the rows has advantage 0, so the others are moved before the gradients are computed.
    """
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", "256")
    rows, vocab = 1024, 1 << 15
    drop_workspace()
    hidden = torch.randn(1, rows, 64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 64).to(dtype).requires_grad_()
    ids, advantages = torch.randint(vocab, (1, rows)), torch.arange(rows)[None] % 3 - 1.0

    def call() -> None:
        grpo_fast.linear_grpo_loss(
            hidden, weight, ids, advantages, grpo_fast.LossConfig(), backend="cpu"
        )

    # A bf16 head stores its exponentials in 16 bits if the CPU has a bf16 product.
    is_narrow = dtype == torch.bfloat16 and gemm.unavailable(dtype) is None
    chunk = rows * vocab * (2 if is_narrow else 4) / 2**20
    assert measure.allocated_peak(call) / 2**20 < 1.25 * chunk


def with_gradients(function, case):
    return {name: x.requires_grad_() for name, x in leaves_of(function, case).items()}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_double_backward_is_refused_clearly(function):
    case = make_case(54, **options_for("grpo"))
    leaves = with_gradients(function, case)
    said = "(?i)double|twice|once_differentiable|does not require grad"
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=said):
        loss, leaf = call(function, case, **leaves).loss, next(iter(leaves.values()))
        torch.autograd.grad(loss, leaf, create_graph=True)[0].sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace_tells_autograd_that_the_logits_are_gone(backend):
    """Check that autograd raises an error if it needs the logits that `inplace=True` overwrote.

    tanh computes its gradient from its output, which is the overwritten tensor. Without the error,
    its gradient would be wrong.
    """
    case = make_case(56, **options_for("grpo"))
    logits = torch.tanh(case.logits.clone().requires_grad_())
    out = call("logits", case, logits=logits, inplace=True, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


@pytest.mark.parametrize("frozen", ["lm_head_weight", "hidden"])
def test_a_frozen_input_costs_no_product(frozen, spied):
    """Check that no gradient is computed for a weight or `hidden` that does not require grad."""
    case = make_case(59, **options_for("grpo"))
    of_weight, of_hidden = spied(products, "accumulate_outer"), spied(products, "matmul_d_hidden")
    leaves = leaves_of("linear", case)
    for name, x in leaves.items():
        x.requires_grad_(name not in (frozen, "bias"))
    call("linear", case, **leaves).loss.backward()
    assert (len(of_weight), len(of_hidden)) == ((0, 1) if frozen == "lm_head_weight" else (1, 0))


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_inputs(backend):
    """Check that expanded inputs (stride 0) give the same loss and gradient as repeated inputs.

    With expanded inputs, all six tokens read the same memory.
    """
    case = make_case(64, mask=torch.ones(1, 6, dtype=torch.bool), bias=False,
                     **options_for("grpo", beta=0.1))  # fmt: skip
    small = {"old_logps": torch.tensor([[-2.5]]), "ref_logps": torch.tensor([[-2.9]])}
    for function in ("linear", "logits"):
        name, found = "hidden" if function == "linear" else "logits", []
        for spread in (torch.Tensor.expand, torch.Tensor.repeat):
            row = leaves_of(function, case)[name][:, :1].requires_grad_()
            given = {n: spread(x, 1, 6) for n, x in small.items()} | {name: spread(row, 1, 6, 1)
                     if spread is torch.Tensor.repeat else row.expand(1, 6, -1)}  # fmt: skip
            loss = call(function, case, **given, backend=backend).loss
            found.append((loss.detach(), torch.autograd.grad(loss, row)[0]))
        assert torch.equal(found[0][0], found[1][0]) and found[0][1].any()
        torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-6, atol=1e-8)
