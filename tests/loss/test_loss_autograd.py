"""What autograd may do with the loss: scale it, run it twice, freeze an input, view an input,
forbid gradients.
"""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from tests.loss_cases import (
    BACKENDS,
    FUNCTIONS,
    LEVELS,
    LOSS_LEVELS,
    arguments,
    make_case,
    options_for,
    relative_l2,
    run,
    truth,
)
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def leaves_and_call(function, case, backend="torch", config=None, **more):
    """(name → leaf, thunk) so that a test can play with the leaves before calling."""
    config = config or grpo_fast.LossConfig(**case.options)
    keywords = {**arguments(case, "padded"), **more}
    advantages = keywords.pop("advantages")
    if function == "linear":
        leaves = {
            "hidden": case.hidden.clone(),
            "weight": case.weight.clone(),
            "bias": case.bias.clone(),
        }

        def call():
            return grpo_fast.linear_grpo_loss(
                leaves["hidden"], leaves["weight"], case.ids, advantages, config,
                bias=leaves["bias"], backend=backend, **keywords,
            )  # fmt: skip
    elif function == "logits":
        leaves = {"logits": case.logits.clone()}

        def call():
            return grpo_fast.logits_grpo_loss(
                leaves["logits"], case.ids, advantages, config, backend=backend, **keywords
            )
    else:
        from tests.loss_cases import reference_logps

        leaves = {"logps": reference_logps(case)[0]}

        def call():
            return grpo_fast.grpo_loss(leaves["logps"], advantages, config, **keywords)

    return leaves, call


@pairs(backend=BACKENDS, function=FUNCTIONS, upstream=[0.0, -2.0, 0.25], level=LEVELS)
def test_upstream_gradient(level, upstream, function, backend):
    case = make_case(51, **options_for("grpo", level, beta=0.2))
    expected = truth(function, case)
    for name, grad in run(function, case, backend=backend, upstream=upstream).grads.items():
        assert relative_l2(grad, upstream * getattr(expected, f"{name}_grad")) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_second_backward_with_retain_graph(function, backend):
    case = make_case(52, **options_for("grpo", beta=0.2))
    leaves, call = leaves_and_call(function, case, backend)
    for leaf in leaves.values():
        leaf.requires_grad_()
    loss = call().loss
    once = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    twice = torch.autograd.grad(2.0 * loss, list(leaves.values()), retain_graph=True)
    again = torch.autograd.grad(loss, list(leaves.values()))
    for a, b, c in zip(once, twice, again, strict=True):
        assert torch.equal(2.0 * a, b) and torch.equal(a, c)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_double_backward_is_refused_clearly(function):
    case = make_case(54, **options_for("grpo"))
    leaves, call = leaves_and_call(function, case)
    leaf = next(iter(leaves.values())).requires_grad_()
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as caught:
        (grad,) = torch.autograd.grad(call().loss, leaf, create_graph=True)
        grad.sum().backward()
    assert any(
        word in str(caught.value).lower()
        for word in ("double", "twice", "once_differentiable", "does not require grad")
    )


@pairs(backend=BACKENDS, function=FUNCTIONS, level=LEVELS)
def test_inputs_are_never_modified(level, function, backend):
    case = make_case(
        55,
        sampling=True,
        **options_for("grpo", level, beta=0.2, entropy_coef=0.1 if function != "logps" else 0.0),
    )
    leaves, call = leaves_and_call(function, case, backend)
    watched = [
        *leaves.values(),
        case.ids,
        case.mask,
        case.advantages,
        case.old,
        case.ref,
        case.sampling,
    ]
    before, versions = [x.clone() for x in watched], [x._version for x in watched]
    for leaf in leaves.values():
        leaf.requires_grad_()
    call().loss.backward()
    for now, then, version in zip(watched, before, versions, strict=True):
        assert torch.equal(now, then) and now._version == version


@pairs(backend=BACKENDS, dtype=[torch.float32, torch.bfloat16],
       loss_type__level=[("grpo", "token"), ("gspo", "sequence")])  # fmt: skip
def test_inplace_overwrites_the_logits_and_gives_the_same_gradient(
    loss_type, level, dtype, backend
):
    case = make_case(56, dtype=dtype, **options_for(loss_type, level, beta=0.2))
    config = grpo_fast.LossConfig(**case.options)
    keywords = arguments(case, "padded")
    advantages = keywords.pop("advantages")
    grads = []
    for inplace in (False, True):
        source = case.logits.clone().requires_grad_()
        logits = source * 1.0  # a non-leaf, as a model's output is
        storage, before = logits.detach(), logits.detach().clone()
        out = grpo_fast.logits_grpo_loss(
            logits, case.ids, advantages, config, inplace=inplace, backend=backend, **keywords
        )
        out.loss.backward()
        grads.append(source.grad)
        assert torch.equal(storage, before) != inplace
    assert torch.equal(*grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace_tells_autograd_that_the_logits_are_gone(backend):
    """tanh computes its gradient from its output: from d-logits it would be a wrong number, without
    a word.
    """
    case = make_case(56, **options_for("grpo"))
    config, keywords = grpo_fast.LossConfig(**case.options), arguments(case, "padded")
    source = case.logits.clone().requires_grad_()
    advantages = keywords.pop("advantages")
    out = grpo_fast.logits_grpo_loss(
        torch.tanh(source), case.ids, advantages, config, inplace=True, backend=backend, **keywords
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", ["expanded", "sliding"])
def test_inplace_refuses_rows_that_share_memory(overlap, backend):
    case = make_case(56, **options_for("grpo"))
    config, keywords = grpo_fast.LossConfig(**case.options), arguments(case, "padded")
    one = case.logits[0, 0].clone()
    B, L, V = case.logits.shape
    views = {
        "expanded": one.expand(B, L, V),
        "sliding": torch.randn(B * L + V).as_strided((B, L, V), (L, 1, 1)),
    }
    advantages = keywords.pop("advantages")
    with pytest.raises(
        ValueError, match="logits: inplace=True expects rows .* share no memory, came strides"
    ):
        grpo_fast.logits_grpo_loss(
            views[overlap].requires_grad_(),
            case.ids,
            advantages,
            config,
            inplace=True,
            backend=backend,
            **keywords,
        )


@pairs(backend=BACKENDS, function=["linear", "logits"], loss_type__level=LOSS_LEVELS)
def test_no_grad_gives_the_same_numbers(loss_type, level, function, backend):
    case = make_case(57, **options_for(loss_type, level, beta=0.1))
    leaves, call = leaves_and_call(function, case, backend)
    with torch.no_grad():
        quiet = call()
    for leaf in leaves.values():
        leaf.requires_grad_()
    loud = call()
    assert not quiet.loss.requires_grad and loud.loss.requires_grad
    assert torch.equal(quiet.logps, loud.logps)
    # Sums may be grouped otherwise.
    torch.testing.assert_close(quiet.loss, loud.loss.detach(), rtol=1e-6, atol=1e-7)
    for name in quiet.metrics.keys() - {"skipped_rows"}:
        assert torch.equal(quiet.metrics[name], loud.metrics[name]), name


@pairs(backend=BACKENDS, wanted=["hidden", "weight", "bias", "hidden weight", "weight bias"],
       level=LEVELS)  # fmt: skip
def test_frozen_inputs_get_no_gradient_and_change_nothing(level, wanted, backend):
    case = make_case(58, **options_for("grpo", level, beta=0.2))
    expected = run("linear", case, backend=backend).grads
    leaves, call = leaves_and_call("linear", case, backend)
    for name in wanted.split():
        leaves[name].requires_grad_()
    call().loss.backward()
    for name, leaf in leaves.items():
        if name in wanted.split():
            assert torch.equal(leaf.grad, expected[name])
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_a_frozen_input_costs_no_gradient_tensor(frozen, monkeypatch):
    """No (V, H) or (N, H) gradient is formed for a frozen tensor: counted on the shapes of every op
    that runs.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    V, H = 211, 37
    case = make_case(59, V=V, H=H, **options_for("grpo"))
    case = case.but(hidden=torch.cat([case.hidden], 1))
    leaves, call = leaves_and_call("linear", case)
    leaves["bias"] = case.bias
    for name in {"weight", "hidden"} - {frozen}:
        leaves[name].requires_grad_()
    shapes = set()

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            known = {x.data_ptr() for x in leaves.values()}
            for x in torch.utils._pytree.tree_leaves(out):
                if (
                    isinstance(x, torch.Tensor)
                    and x.data_ptr() not in known
                    and "t" != func.__name__.split(".")[0]
                ):
                    shapes.add((func.__name__, tuple(x.shape)))
            return out

    with Shapes():
        call().loss.backward()
    gradient_ops = [s for name, s in shapes if name.startswith(("mm", "addmm", "matmul", "bmm"))]
    if frozen == "weight":
        assert (V, H) not in gradient_ops and (H, V) not in gradient_ops
    else:
        assert not any(s[-1:] == (H,) and s[0] != V for s in gradient_ops)


def test_nothing_requires_grad_gives_a_loss_without_a_graph():
    case = make_case(60, **options_for("grpo"))
    for function in FUNCTIONS:
        _, call = leaves_and_call(function, case)
        assert not call().loss.requires_grad


# ----------------------------------------------------------
# views
def strided_last(x):
    """The same numbers, every other element of a wider buffer."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 7.25 if x.is_floating_point() else 0).to(
        x.dtype
    )
    wide[..., ::2] = x
    return wide[..., ::2]


def offset(x):
    flat = torch.full((x.numel() + 3,), 5).to(x.dtype)
    flat[3:] = x.reshape(-1)
    return flat[3:].view(x.shape)


def row_padded(x):
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), 3).to(x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


VIEWS = {
    "strided": strided_last,
    "offset": offset,
    "row_padded": row_padded,
    "transposed": transposed,
}


@pairs(backend=BACKENDS, function=FUNCTIONS, dtype=[torch.float32, torch.bfloat16], view=VIEWS)
def test_views_are_read_as_they_are(view, dtype, function, backend):
    if function == "logps" and dtype != torch.float32:
        pytest.skip("logps are fp32")
    case = make_case(62, dtype=dtype, sampling=True, **options_for("grpo", beta=0.2))
    expected = run(function, case, backend=backend)
    f = VIEWS[view]
    other = case.but(
        ids=f(case.ids), mask=f(case.mask), old=f(case.old), ref=f(case.ref),
        sampling=f(case.sampling),
        advantages=f(case.advantages) if view != "transposed" else case.advantages,
    )  # fmt: skip
    leaves, call = leaves_and_call(function, other, backend)
    viewed = {}
    for name in leaves:
        leaves[name] = (
            f(leaves[name]).detach().requires_grad_()
            if leaves[name].dim() > 1
            else leaves[name].requires_grad_()
        )
        viewed[name] = leaves[name]
    out = call()
    out.loss.backward()
    tolerance = (
        0
        if dtype == torch.float32 and function != "linear"
        else 2e-6
        if dtype == torch.float32
        else 2e-3
    )
    assert abs(out.loss.item() - expected.loss.item()) <= 1e-6
    for name, leaf in viewed.items():
        assert relative_l2(leaf.grad, expected.grads[name]) <= tolerance


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_inputs(backend):
    """stride 0: one hidden row, one advantage, one old_logp for many tokens."""
    g = torch.Generator().manual_seed(0)
    T, H, V = 6, 8, 19
    row, weight = torch.randn(1, H, generator=g), torch.randn(V, H, generator=g)
    ids, cu = torch.randint(V, (T,), generator=g), torch.tensor([0, 2, T], dtype=torch.int32)
    config = grpo_fast.LossConfig(loss_type="grpo", beta=0.1)
    small = [torch.tensor([-2.5]), torch.tensor([-2.9])]
    grads, losses = [], []
    for expand in (True, False):
        h = row.clone().requires_grad_()
        many = h.expand(T, H) if expand else h.repeat(T, 1)
        old, ref = (x.expand(T) if expand else x.repeat(T) for x in small)
        A = torch.tensor([0.5]).expand(2) if expand else torch.tensor([0.5, 0.5])
        out = grpo_fast.linear_grpo_loss(
            many, weight, ids, A, config, old_logps=old, ref_logps=ref, cu_seqlens=cu,
            backend=backend,
        )  # fmt: skip
        out.loss.backward()
        grads.append(h.grad)
        losses.append(out.loss.detach())
    assert torch.equal(*losses)
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-8)
    wide = torch.randn(1, V, generator=g).requires_grad_()
    out = grpo_fast.logits_grpo_loss(
        wide.expand(T, V),
        ids,
        A,
        config,
        old_logps=old,
        ref_logps=ref,
        cu_seqlens=cu,
        backend=backend,
    )
    out.loss.backward()
    assert torch.isfinite(wide.grad).all() and (wide.grad != 0).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tied_embeddings_receive_both_gradients(backend):
    case = make_case(63, **options_for("grpo"))
    embedding = case.weight.clone().requires_grad_()
    hidden = embedding[case.ids.roll(1, 1)] * 0.5
    keywords = arguments(case, "padded")
    advantages = keywords.pop("advantages")
    out = grpo_fast.linear_grpo_loss(
        hidden,
        embedding,
        case.ids,
        advantages,
        grpo_fast.LossConfig(**case.options),
        backend=backend,
        **keywords,
    )
    out.loss.backward()
    frozen = case.but(hidden=hidden.detach(), bias=None)
    expected = truth("linear", frozen)
    manual = expected.weight_grad.index_put(
        (case.ids.roll(1, 1).reshape(-1),),
        0.5 * expected.hidden_grad.reshape(-1, 8),
        accumulate=True,
    )
    assert relative_l2(embedding.grad, manual) < 1e-5
