"""The public functions with backend="triton" against the fp64 oracle, end to end in the
interpreter.

Run by test_triton_interpreter.py. Other files hold the kernels against fp64; here it is the way
from the public arguments to them and back that could go wrong: chunks, gathered rows, masks, the
two layouts, the fused and the two-sweep path.
"""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from grpo_fast import LossConfig
from grpo_fast.kernels.gpu import linear as linear_triton
from grpo_fast.kernels.gpu import rows as rows_triton
from grpo_fast.kernels.head import loop as linear
from tests import oracle_inputs
from tests.kernels.triton_tools import interpreter  # noqa: F401  (its repairs)
from tests.loss_cases import (
    LAYOUTS,
    assert_same,
    make_case,
    options_for,
    pack,
    relative_l2,
    run,
    spans,
)
from tests.pairs import pairs

# 38 tokens in completions of other lengths, one empty, one with a hole: two chunks of 32 rows when
# the workspace is small.
MASK = torch.arange(13)[None, :] < torch.tensor([13, 7, 0, 11, 12])[:, None]
MASK[3, 2:5] = False
SMALL = {"H": 12, "V": 37, "mask": MASK}
CONFIGS = {
    "kl and entropy": {"loss_type": "dapo", "beta": 0.1, "entropy_coef": 0.02,
                       "kl_times_ratio": True},
    "one ratio per completion": {"loss_type": "gspo", "beta": 0.05},
    "softcap and temperatures": {"loss_type": "cispo", "softcap": 3.0, "logit_scale": 0.7,
                                 "compute_entropy": True},
}  # fmt: skip
# The linear function with the workspace as it ships and with one that holds 32 rows; logits come
# whole.
WAYS = ("linear", "linear in chunks", "logits")


@pytest.fixture
def call(way, monkeypatch):
    """`run` of the function of a way to call it."""
    function = way.partition(" ")[0]
    if way != function:
        monkeypatch.setattr(linear, "workspace_bytes", lambda *_: 0)
    return lambda case, **options: (function, run(function, case, backend="triton", **options))


def check(call, case, **options):
    function, result = call(case, **options)
    assert_same(function, case, result, loss_tol=2e-6, grad_tol=1e-5)
    return result


@pairs(way=WAYS, name=CONFIGS, layout=LAYOUTS)
def test_losses(call, way, name, layout):
    options = {**CONFIGS[name]}
    case = make_case(7, **SMALL, **options_for(options.pop("loss_type"), **options))
    config = LossConfig(**case.options)
    if name == "softcap and temperatures":
        t = 0.6 + torch.rand(MASK.shape, generator=torch.Generator().manual_seed(1))
        case = case.with_options(temperature=t)
        config = config.replace(temperature=pack(t, spans(MASK)) if layout == "packed" else t)
    check(call, case, layout=layout, config=config)


@pairs(way=WAYS, loss_type=["grpo", "gspo"])
def test_rows_without_advantage(call, way, loss_type):
    """Most rows carry nothing: they are gathered away before the GEMMs, or written as zeros."""
    case = make_case(7, **SMALL, **options_for(loss_type))
    case.advantages[[0, 1]] = 0.0
    gradient = next(iter(check(call, case).grads.values()))
    assert (gradient[[0, 1, 2]] == 0).all() and (gradient[~MASK] == 0).all()


def test_inplace_gives_the_same_gradient():
    case, gradients = make_case(7, **SMALL, **options_for("grpo")), []
    for inplace in (False, True):
        leaf = case.logits.requires_grad_()
        out = grpo_fast.logits_grpo_loss(
            leaf * 1, case.ids, case.advantages, LossConfig(**case.options), old_logps=case.old,
            completion_mask=MASK, backend="triton", inplace=inplace,
        )  # fmt: skip
        out.loss.backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients) and gradients[0].any()


@pairs(way=WAYS)
def test_logps_with_gradient(call, way):
    """Differentiable logps and entropy, with rows that have no target."""
    case = make_case(7, **SMALL)
    g = torch.Generator().manual_seed(1)
    weights, t = torch.randn(2, *MASK.shape, generator=g), 0.6 + torch.rand(MASK.shape, generator=g)
    ids = torch.where(MASK, case.ids, -100)
    tensors = [case.logits] if way == "logits" else [case.hidden, case.weight, case.bias]
    leaves = [x.clone().requires_grad_() for x in tensors]
    exact = [x.double().requires_grad_() for x in tensors]
    options = {"softcap": 4.0, "return_entropy": True, "backend": "triton", "temperature": t}
    if way == "logits":
        found, raw = grpo_fast.logits_logps(*leaves, ids, **options), exact[0]
    else:
        found = grpo_fast.linear_logps(*leaves[:2], ids, bias=leaves[2], **options)
        raw = exact[0] @ exact[1].T + exact[2]
    rule = {"softcap": 4.0, "temperature": t.flatten()}
    true = oracle_inputs.logps_and_entropy(raw.flatten(0, 1), case.ids.flatten(), **rule)
    for ours, theirs in zip(found, true, strict=True):
        assert (ours[~MASK] == 0).all()
        assert (ours - theirs.view(MASK.shape))[MASK].abs().max() <= 1e-5
    sum((x * w)[MASK].sum() for x, w in zip(found, weights, strict=True)).backward()
    sum((x.view(MASK.shape) * w)[MASK].sum() for x, w in zip(true, weights, strict=True)).backward()
    assert all(relative_l2(x.grad, y.grad) <= 2e-6 for x, y in zip(leaves, exact, strict=True))


@pairs(way=WAYS, layout=LAYOUTS, dtype=[torch.float32, torch.bfloat16])
def test_on_policy_ratio_is_one(call, way, layout, dtype):
    """logps without gradient, then the loss on the same weights: the same bits, so the ratio is
    exactly 1.
    """
    rule = {"temperature": 0.8, "softcap": 6.0}
    case = make_case(7, **SMALL, dtype=dtype, **options_for("grpo", **rule))
    with torch.no_grad():
        if way == "logits":
            old = grpo_fast.logits_logps(case.logits, case.ids, backend="triton", **rule)
        else:
            tensors = case.hidden, case.weight, case.ids
            old = grpo_fast.linear_logps(*tensors, bias=case.bias, backend="triton", **rule)
    _, result = call(case.but(old=old), layout=layout)
    assert torch.equal(result.logps[MASK], old[MASK])
    assert all(x.norm() > 0 for x in result.grads.values())


def test_the_kernels_ran(monkeypatch):
    """Without a launch, the cases above would be of another backend."""
    launched, original = [], rows_triton.launch

    def launch(kernel, *arguments, **options):
        launched.append(kernel.fn.__name__)
        original(kernel, *arguments, **options)

    for module in (rows_triton, linear_triton):
        monkeypatch.setattr(module, "launch", launch)
    for function in ("linear", "logits"):
        run(function, make_case(7, **SMALL, **options_for("dapo")), backend="triton")
    assert launched == ["slice_kernel", "join_kernel", "row_grad_kernel", "row_loss_kernel"]
