"""Test that `linear_grpo_loss(divergence=)` computes the sum of two separate calls in one pass."""

import torch

from grpo_fast import DivergenceTerm, TeacherHead, TeacherTopK, linear_divergence
from grpo_fast.kernels.head.sources import DenseHead
from tests import loss_cases
from tests.loss_cases import ENGINES, call, make_case, options_for, relative_l2
from tests.pairs import pairs

LOSSES = {
    "token": options_for("dapo"),
    "sequence": options_for("gspo", "sequence"),
    "entropy": options_for("grpo", beta=0.1, entropy_coef=0.1, temperature=0.7),
    "softcap": options_for("grpo", softcap=2.0, logit_scale=1.5),
}


def teacher_of(case, *, topk=False):
    g = torch.Generator().manual_seed(3)
    B, L = case.ids.shape
    V, dtype = case.weight.shape[0], case.hidden.dtype
    h, w = (torch.randn(*x, generator=g, dtype=torch.float64) for x in ((B, L, 5), (V, 5)))
    if topk:
        logps, ids = (h @ w.T).log_softmax(-1).topk(4)
        return TeacherTopK(ids, logps)
    return TeacherHead(h.to(dtype), w.to(dtype), softcap=3.0)


def weights_of(case):
    """Return 1/(number of active tokens), the token weight of aggregation "token_mean_global"."""
    return case.mask.double() / case.mask.sum()


BARS = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 2e-3}


@pairs(name=LOSSES, backend=ENGINES, kind=["head", "top-k"], mib=["0", "256"], dtype=BARS)
def test_it_is_the_sum_of_two_calls(name, backend, kind, mib, dtype, monkeypatch):
    """Check loss, metrics and gradients."""
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", mib)
    long = torch.arange(40)[None, :] < torch.tensor([40, 17, 0, 33])[:, None]
    options = LOSSES[name] | dict(aggregation="token_mean_global")
    case = make_case(4, mask=long, dtype=dtype, **options)
    teacher = teacher_of(case, topk=kind == "top-k")
    term = DivergenceTerm(teacher, "jsd", 0.4, beta=0.3)
    found = loss_cases.run("linear", case, divergence=term, backend=backend)
    alone = loss_cases.run("linear", case, backend=backend)
    leaves = [x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    rule = {n: options.get(n, d) for n, d in (("temperature", 1.0), ("softcap", None),
                                              ("logit_scale", 1.0))}  # fmt: skip
    out = linear_divergence(*leaves[:2], teacher, "jsd", beta=0.3, bias=leaves[2],
                            weights=0.4 * weights_of(case).float(), **rule)  # fmt: skip
    out.loss.backward()
    assert abs(found.loss - alone.loss - out.loss) < 1e-6
    assert torch.equal(found.logps, alone.logps)
    assert found.metrics.keys() == alone.metrics.keys() | {"divergence"}
    mean = out.values[case.mask].mean()
    assert torch.allclose(found.metrics["divergence"].double(), mean.double(), rtol=1e-5)
    for leaf, what in zip(leaves, ("hidden", "weight", "bias"), strict=True):
        expected = alone.grads[what].double() + leaf.grad.double()
        assert relative_l2(found.grads[what], expected) < BARS[dtype]


def test_one_pass_and_hidden_rows(spied):
    """Check that a call with a divergence term computes each chunk of logits only once.

    The result must not change if the student has `hidden_rows` and the teacher does not.
    """
    case = make_case(4, **options_for("dapo"))
    B, L = case.ids.shape
    rows = torch.arange(B * L).flip(0).reshape(B, L)
    teacher, flat = teacher_of(case), case.hidden.reshape(B * L, -1).flip(0)
    term = DivergenceTerm(teacher, "reverse_kl", 1.0)
    chunks = spied(DenseHead, "chunk")
    a = call("linear", case, hidden=case.hidden.requires_grad_(), divergence=term)
    assert len(chunks) == 1
    b = call("linear", case, hidden=flat, hidden_rows=rows, divergence=term)
    assert torch.equal(a.loss, b.loss) and torch.equal(a.divergence, b.divergence)
    assert a.divergence.shape == (B, L) and not a.divergence[~case.mask].any()


def test_a_coefficient_of_0_and_no_gradient_say_the_divergence():
    case = make_case(4, **options_for("dapo"))
    plain = loss_cases.run("linear", case)
    term = DivergenceTerm(teacher_of(case), "jsd", 0.0)
    zero = loss_cases.run("linear", case, divergence=term)
    assert torch.equal(zero.loss, plain.loss) and zero.metrics["divergence"] > 0
    assert all(relative_l2(zero.grads[n], x) < 1e-6 for n, x in plain.grads.items())
    out = call("linear", case, divergence=term._replace(coef=1.0))
    assert torch.allclose(out.metrics["divergence"], zero.metrics["divergence"])
    assert out.loss > plain.loss.detach()
