"""Test the loss with autograd: upstream gradients, repeated backward, frozen inputs and views."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.loss_cases import (
    BACKENDS,
    FUNCTIONS,
    LEVELS,
    call,
    leaves_of,
    make_case,
    options_for,
    relative_l2,
    run,
    truth,
)
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def with_gradients(function, case):
    return {name: x.requires_grad_() for name, x in leaves_of(function, case).items()}


@pairs(backend=BACKENDS, function=FUNCTIONS, level=LEVELS)
def test_upstream_gradients_of_several_backward_passes(level, function, backend):
    case = make_case(51, **options_for("grpo", level, beta=0.2))
    expected, leaves = truth(function, case), with_gradients(function, case)
    loss, inputs = call(function, case, **leaves, backend=backend).loss, list(leaves.values())
    once = torch.autograd.grad(loss, inputs, retain_graph=True)
    for upstream in (-2.0, 0.25, 0.0, 1.0):
        again = torch.autograd.grad(upstream * loss, inputs, retain_graph=True)
        for name, first, grad in zip(leaves, once, again, strict=True):
            true = getattr(expected, f"{name.removeprefix('lm_head_')}_grad")
            assert torch.equal(grad, upstream * first) and relative_l2(first, true) < 1e-5


@pytest.mark.parametrize("function", FUNCTIONS)
def test_double_backward_is_refused_clearly(function):
    case = make_case(54, **options_for("grpo"))
    leaves = with_gradients(function, case)
    said = "(?i)double|twice|once_differentiable|does not require grad"
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=said):
        loss, leaf = call(function, case, **leaves).loss, next(iter(leaves.values()))
        torch.autograd.grad(loss, leaf, create_graph=True)[0].sum().backward()


@pairs(backend=BACKENDS, function=FUNCTIONS, level=LEVELS)
def test_inputs_are_never_modified(level, function, backend):
    bonus = 0.1 if function != "logps" else 0.0
    options = options_for("grpo", level, beta=0.2, entropy_coef=bonus)
    case = make_case(55, sampling=True, **options)
    leaves = with_gradients(function, case)
    watched = [*leaves.values(), case.ids, case.mask, case.advantages, case.old, case.ref]
    watched.append(case.sampling)
    before, versions = [x.clone() for x in watched], [x._version for x in watched]
    call(function, case, **leaves, backend=backend).loss.backward()
    for now, then, version in zip(watched, before, versions, strict=True):
        assert torch.equal(now, then) and now._version == version


@pairs(backend=BACKENDS, dtype=[torch.float32, torch.bfloat16], loss_type=["grpo", "gspo"])
def test_inplace_overwrites_the_logits_and_gives_the_same_gradient(loss_type, dtype, backend):
    case = make_case(56, dtype=dtype, **options_for(loss_type, beta=0.2))
    grads = []
    for inplace in (False, True):
        source = case.logits.clone().requires_grad_()
        logits = source * 1.0  # a non-leaf tensor, like the output of a model
        storage, before = logits.detach(), logits.detach().clone()
        call("logits", case, logits=logits, inplace=inplace, backend=backend).loss.backward()
        grads.append(source.grad)
        assert torch.equal(storage, before) != inplace
    assert torch.equal(*grads)


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


WEIGHT = "lm_head_weight"


@pairs(backend=BACKENDS, level=LEVELS,
       wanted=["hidden", WEIGHT, "bias", f"hidden {WEIGHT}", f"{WEIGHT} bias"])  # fmt: skip
def test_frozen_inputs_get_no_gradient_and_change_nothing(level, wanted, backend):
    case = make_case(58, **options_for("grpo", level, beta=0.2))
    expected = run("linear", case, backend=backend).grads
    leaves = leaves_of("linear", case)
    for name in wanted.split():
        leaves[name].requires_grad_()
    call("linear", case, **leaves, backend=backend).loss.backward()
    for name, leaf in leaves.items():
        assert (leaf.grad is None) == (name not in wanted.split())
        if leaf.grad is not None:
            assert torch.equal(leaf.grad, expected[name.removeprefix("lm_head_")])


@pytest.mark.parametrize("frozen", ["lm_head_weight", "hidden"])
def test_a_frozen_input_costs_no_gradient_tensor(frozen):
    """Check that no gradient is computed for a weight or `hidden` that does not require grad.

    The test records the shapes of the results of all matrix products.
    """
    V, H, products = 211, 37, ("mm", "addmm", "matmul", "bmm")
    case = make_case(59, V=V, H=H, **options_for("grpo"))
    leaves = {n: x.requires_grad_(n not in (frozen, "bias"))
              for n, x in leaves_of("linear", case).items()}  # fmt: skip
    known, shapes = {x.data_ptr() for x in leaves.values()}, set()

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.__name__.startswith(products):
                # Our matrix product writes to its third argument.
                written = args[2] if func.__name__.startswith("mm_.") else out
                shapes.update({tuple(written.shape)} if written.data_ptr() not in known else ())
            return out

    with Shapes():
        call("linear", case, **leaves).loss.backward()
    if frozen == "hidden":
        assert (V, H) in shapes and not any(s[-1] == H and s[0] != V for s in shapes)
    else:
        assert not {(V, H), (H, V)} & shapes and any(s[-1] == H for s in shapes)


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
