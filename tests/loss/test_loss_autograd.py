"""Test the loss with autograd: double backward, overwritten logits, frozen and expanded inputs.

test_fuzz.py tests upstream gradients, repeated backward passes and the bits of frozen inputs.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast.kernels.head import products
from tests.loss_cases import BACKENDS, FUNCTIONS, call, leaves_of, make_case, options_for

pytestmark = pytest.mark.usefixtures("poisoned_memory")


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
