"""Test that gradients stay accurate at very small and very large scales, and that NaN is seen.

In a step of 131072 tokens each token has a weight of 8e-6, so its d-logits underflow in fp16. A
loss scale of 2^16 cannot prevent this, because it multiplies the gradients only in the backward
pass, after our forward pass has computed them. The reference is fp64 on the same 16-bit inputs, and
the tolerance is the error of plain torch in the same dtype.

A NaN in an active row or in the head must reach the loss and every gradient. Comparisons, clips,
masks and weights of 0 must not hide the NaN. A user can then find it by checking either the loss or
any gradient. test_sweeps of test_loss_parity.py checks every loss.
"""

import math

import torch
from torch import Tensor

import grpo_fast
from tests import oracles
from tests.loss_cases import (
    BACKENDS,
    EVERYWHERE,
    IS_INTERPRETER,
    Case,
    assert_seen,
    make_case,
    options_for,
    relative_l2,
    worst_row,
)
from tests.pairs import pairs

SCALE, ITEMS = 2.0**16, 131072
N, H, V = 192, 32, 300
DTYPES = (torch.float16, torch.bfloat16)
CONFIGS = {
    "dapo": grpo_fast.LossConfig(),
    "gspo": grpo_fast.LossConfig(loss_type="gspo", aggregation="token_mean_global"),
    "kl and entropy": grpo_fast.LossConfig(beta=0.05, entropy_coef=0.01),
}


def problem(dtype: torch.dtype) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(9)
    hidden = torch.randn(N, H, generator=g).to(dtype)
    weight = (torch.randn(V, H, generator=g) * 0.3).to(dtype)
    bias = (torch.randn(V, generator=g) * 0.2).to(dtype)
    ids = torch.randint(V, (N,), generator=g)
    logps = (hidden.double() @ weight.double().T + bias.double()).log_softmax(-1)
    logps = logps.gather(-1, ids[:, None])[:, 0]
    near = 0.05 * torch.randn(2, N, generator=g)
    return {
        "hidden": hidden, "weight": weight, "bias": bias, "ids": ids,
        "advantages": torch.tensor([1.0, -0.7, 0.4]), "old": (logps + near[0]).float(),
        "ref": (logps + near[1]).float(),
    }  # fmt: skip


def loss_of_logits(logits: Tensor, x: dict[str, Tensor], config: grpo_fast.LossConfig) -> Tensor:
    logp_all = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    logps = logp_all.gather(-1, x["ids"][:, None])[:, 0]
    entropy = -(logp_all.exp() * logp_all).sum(-1)
    given = tokens(x, config)
    return grpo_fast.grpo_loss(logps, x["advantages"], config, entropy=entropy, **given).loss


def tokens(x: dict[str, Tensor], config: grpo_fast.LossConfig) -> dict:
    cu = torch.tensor([0, 50, 90, N], dtype=torch.int32)
    ref = x["ref"] if config.beta else None
    return {"cu_seqlens": cu, "old_logps": x["old"], "ref_logps": ref, "num_items_in_batch": ITEMS}


@pairs(name=CONFIGS, form=["hidden", "logits", "inplace"], backend=BACKENDS, dtype=DTYPES)
def test_gradients_are_as_accurate_as_those_of_torch(dtype, backend, name, form):
    """Check that our error is at most 1.05 times torch's error, overall and in the worst row."""
    x, config = problem(dtype), CONFIGS[name]
    given = {"backend": backend, **tokens(x, config)}
    own = [x[k] for k in ("hidden", "weight", "bias")]
    if form != "hidden":
        own = [torch.nn.functional.linear(*own)]

    def gradients(dtype: torch.dtype, loss_of) -> tuple[Tensor, ...]:
        leaves = [y.clone().to(dtype).requires_grad_() for y in own]
        return torch.autograd.grad(loss_of(*leaves) * SCALE, leaves)

    def plain(*leaves: Tensor) -> Tensor:
        z = leaves[0] if form != "hidden" else torch.nn.functional.linear(*leaves)
        return loss_of_logits(z, x, config)

    def ours(*leaves: Tensor) -> Tensor:
        if form == "hidden":
            hidden, weight, bias = leaves
            tail = x["ids"], x["advantages"], config
            return grpo_fast.linear_grpo_loss(hidden, weight, *tail, bias=bias, **given).loss
        z, inplace = leaves[0] * 1, form == "inplace"
        own = z, x["ids"], x["advantages"], config
        return grpo_fast.logits_grpo_loss(*own, inplace=inplace, **given).loss

    exact, theirs = gradients(torch.float64, plain), gradients(dtype, plain)
    for found, other, true in zip(gradients(dtype, ours), theirs, exact, strict=True):
        assert found.dtype == dtype
        for error in (relative_l2, worst_row):
            assert error(found, true) <= 1.05 * error(other, true), error.__name__


TERMS = ("policy", "support", "head", "top-k")
POLICY = TERMS[:2]


def loss_of(
    term: str, x: dict[str, Tensor], weights: Tensor, dtype: torch.dtype, backend: str
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of one kind, and its tensors that require grad.

    Args:
        term: "policy" for the policy loss, "support" for a policy loss with a support, or the
            teacher of a divergence. "head" is a teacher with a full head, and "top-k" a teacher
            with its most likely ids.
        x: the result of `problem`.
        weights: (N,), the weight of each token. The policy loss uses the first for all tokens.
        dtype: dtype of hidden states, weight and bias.
        backend: backend of the call.
    """
    leaves = [x[k].clone().to(dtype).requires_grad_() for k in ("hidden", "weight", "bias")]
    if term in POLICY:
        config = CONFIGS["dapo"]
        given = tokens(x, config) | {"num_items_in_batch": 1 / float(weights[0])}
        given |= {"bias": leaves[2], "backend": backend}
        if term == "support":
            sets = (x["ids"][:, None] + torch.arange(0, 40, 2)) % V
            given["support"] = grpo_fast.Support(sets.flatten(), torch.arange(N + 1) * 20)
        out = grpo_fast.linear_grpo_loss(*leaves[:2], x["ids"], x["advantages"], config, **given)
        return out.loss, leaves
    g = torch.Generator().manual_seed(10)
    other = (x["weight"].double() + 0.2 * torch.randn(V, H, generator=g)).to(x["weight"].dtype)
    if term == "top-k":
        logps = (x["hidden"].double() @ other.double().T).log_softmax(-1)
        teacher = grpo_fast.TeacherTopK(*logps.topk(20)[::-1])
    else:
        teacher = grpo_fast.TeacherHead(x["hidden"].to(dtype), other.to(dtype))
    out = grpo_fast.linear_divergence(
        *leaves[:2], teacher, "forward_kl", bias=leaves[2], weights=weights, backend=backend
    )
    return out.loss, leaves


@pairs(term=TERMS, backend=BACKENDS,
       dtype__factor=[*((torch.float16, x) for x in (1.0, 1e-7, 1e-33, 3e6)),
                      (torch.bfloat16, 1.0)])  # fmt: skip
def test_gradients_for_any_weight_of_a_token(term, dtype, factor, backend):
    """Check that 16-bit gradients are accurate for token weights that 16 bits cannot represent.

    The upstream gradient is not a power of two, so the multiplication by it rounds, too. A second
    backward must give the same gradients.
    """
    x = problem(dtype)
    if term in POLICY:  # its weight is 1/num_items_in_batch, and no batch has 1e33 tokens
        factor = max(factor, 1e-7)
    weights = torch.full((N,), factor / ITEMS)
    if term not in POLICY:
        weights *= 0.5 + torch.rand(N, generator=torch.Generator().manual_seed(8))
    exact, true = loss_of(term, x, weights, torch.float64, "torch")
    loss, leaves = loss_of(term, x, weights, dtype, backend)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact.detach().double(), rtol=2e-3, atol=0.0)
    upstream = ITEMS / factor / 7
    once = torch.autograd.grad(loss * upstream, leaves, retain_graph=True)
    again = torch.autograd.grad(loss * upstream, leaves)
    for ours, second, expected in zip(
        once, again, torch.autograd.grad(exact * upstream, true), strict=True
    ):
        assert torch.equal(ours, second) and ours.dtype == dtype
        assert relative_l2(ours, expected) <= (1e-3 if dtype == torch.float16 else 6e-3)


@pairs(term=TERMS, backend=BACKENDS)
def test_fp16_gradients_wait_for_the_backward_pass_in_sixteen_bits(term, backend):
    """Check that gradients are stored in fp16 until the backward pass, scaled by a power of two.

    The largest element must be near 2^13, so that small elements do not underflow. Without the
    scale, gradients would have to be stored in fp32, with twice the memory.
    """
    weights = torch.full((N,), 1 / ITEMS)
    loss, _ = loss_of(term, problem(torch.float16), weights, torch.float16, backend)
    gradients, units = loss.grad_fn.result
    for stored, unit in zip(gradients, units, strict=True):
        assert stored.dtype == torch.float16
        assert 2.0**11 < stored.abs().max() < 2.0**14
        assert float(unit) < 1 and math.log2(float(unit)).is_integer()


WHERE = ("hidden", "weight")
BAD = (math.nan, math.inf, -math.inf)
HEADS = ("linear", "logits")
# Options that give some tokens a weight of 0, by corrections or by the entropy mask. Only the last
# entry, "rules", gives no token a weight of 0.
FILTERS = {
    **{name: {"corrections": x} for name, x in oracles.WORDS.items()},
    "masks": {"corrections": [oracles.off_policy(0.0)], "top_entropy_quantile": 0.3},
    "rules": {"entropy_coef": 0.1, "softcap": 4.0, "temperature": 0.7},
}


def spoiled(case: Case, where: str, value: float) -> Case:
    """Return a copy of the case in which one element of the tensor named `where` is `value`.

    In "hidden", the element is in an active row of the second completion. In "weight", it is in the
    row of an id that is not a target.
    """
    changed = getattr(case, where).clone()
    if where == "hidden":
        changed[1, 1, 3] = value
    else:
        free = next(v for v in range(len(changed)) if v not in case.ids)
        changed[free, 3] = value
    return case.but(**{where: changed})


@pairs(options=FILTERS.items(), backend=EVERYWHERE, function=HEADS, advantage=[-0.8, 0.0],
       loss_type=["grpo", "gspo", "kimi", "reinforce"])  # fmt: skip
def test_where_a_filter_drops_the_row(loss_type, backend, function, options, advantage):
    case = make_case(33, sampling=True, **options_for(loss_type, **options))
    values = case.advantages.index_fill(0, torch.tensor(1), advantage)
    bad = spoiled(case.but(advantages=values), "hidden", math.nan)
    for below in (0, 5):  # sampling logps with ratios of 1 or above the bound
        assert_seen(bad.but(sampling=bad.sampling - below), function, backend)


@pairs(dtype=[torch.float32, torch.bfloat16, torch.float16], backend=EVERYWHERE, where=WHERE,
       value=BAD)  # fmt: skip
def test_with_a_vocabulary_for_the_fused_kernels(where, value, backend, dtype):
    """Check that the fused kernels propagate NaN and infinities, with and without grad_filter.

    The head has several blocks of vocabulary columns and several chunks of rows.
    """
    options = options_for("grpo", beta=0.1)
    mask = torch.ones(5, 8 if IS_INTERPRETER else 30, dtype=torch.bool)
    case = make_case(34, H=16, V=2500, mask=mask, dtype=dtype, **options)
    for more in ({}, {"grad_filter": 0.05}):
        assert_seen(spoiled(case, where, value), "linear", backend, **more)


@pairs(value=BAD, where=WHERE, backend=BACKENDS)
def test_linear_logps(backend, where, value):
    case = spoiled(make_case(36, **options_for("grpo")), where, value)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    ids = torch.where(case.mask, case.ids, -100)
    logps, entropy = grpo_fast.linear_logps(
        hidden, weight, ids, return_entropy=True, backend=backend
    )
    assert not logps.isfinite().all() and not entropy.isfinite().all()
    logps.sum().backward()
    assert not hidden.grad.isfinite().all() and not weight.grad.isfinite().all()
    assert (hidden.grad[~case.mask] == 0).all() and (logps[~case.mask] == 0).all()
    with torch.no_grad():
        assert not grpo_fast.linear_logps(hidden, weight, ids, backend=backend).isfinite().all()
