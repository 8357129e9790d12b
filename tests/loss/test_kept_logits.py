"""Test the logits cache of `linear_logps`, which is kept until the first backward.

The cache saves matrix products in the backward pass. It holds as many chunks of logits as fit into
the workspace. test_logps.py checks that it does not change the results.
"""

import pytest
import torch

from grpo_fast import linear_logps
from grpo_fast.kernels.cpu import rows as linear_cpu
from grpo_fast.kernels.head import sources as linear
from tests.loss_cases import BACKENDS

T, V, H = 96, 41, 16
CHUNKS = {"one chunk": 96, "three chunks": 32}


@pytest.fixture
def products(spied):
    """Return a function that gives the number of rows of every matrix product hidden·Wᵀ so far."""
    logits, heads = spied(linear, "matmul_logits"), spied(linear_cpu, "_tensors")
    return lambda: [*(len(x.args[0]) for x in logits), *(len(x.args[0].hidden) for x in heads)]


def problem():
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(T, H, generator=g), torch.randn(V, H, generator=g)
    ids, up = torch.randint(V, (T,), generator=g), torch.randn(2, T, generator=g)
    up[:, 70:90] = 0  # these rows of the last chunk get no gradient
    return hidden.requires_grad_(), weight.requires_grad_(), ids, up


def run(backend, return_entropy):
    """Run one forward and two backward passes, and return the gradients of each backward pass."""
    hidden, weight, ids, up = problem()
    outputs = linear_logps(hidden, weight, ids, return_entropy=return_entropy, backend=backend)
    loss = (torch.stack(outputs) * up if return_entropy else outputs * up[0]).sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    return first, torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", CHUNKS.values(), ids=CHUNKS)
def test_only_what_did_not_fit_is_formed_again(
    rows, backend, return_entropy, products, monkeypatch
):
    """Check that the first backward recomputes only the chunks that did not fit into the cache.

    The first backward overwrites the cache, so the second backward recomputes all chunks. dH must
    be bitwise equal in both. dW may differ by rounding, because the second backward adds the chunks
    in a different order.
    """
    monkeypatch.setattr(linear, "workspace_bytes", lambda *_: rows * V * 4)
    first, second = run(backend, return_entropy)
    forward = [rows] * (T // rows)
    assert products()[: 2 * len(forward) - 1] == forward + forward[:-1]
    assert len(products()) == 3 * len(forward) - 1
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(first[1], second[1], rtol=1e-6, atol=1e-6)


def test_nothing_is_kept_without_a_gradient(products):
    hidden, weight, ids, _ = problem()
    with torch.no_grad():
        assert not linear_logps(hidden, weight, ids).requires_grad
    assert not linear_logps(hidden.detach(), weight.detach(), ids).requires_grad
    assert products() == [T, T]


def test_weights_changed_before_the_backward_are_refused():
    hidden, weight, ids, _ = problem()
    logps = linear_logps(hidden, weight, ids)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logps.sum().backward()
