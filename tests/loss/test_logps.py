"""Test `linear_logps` and `logits_logps` against fp64: values, gradients, and repeated passes.

The last tests check which implementation of `support=` is used for which sizes, and its sums of
16-bit weights. `support` has the ids from which a sampler chose. An LM head has two
implementations: one gathers rows of W, and one computes all logits. A third implementation is for
given logits. test_values_and_gradients and test_loss_parity.py test the values of all three.
"""

import pytest
import torch

from grpo_fast import Support, linear_logps, logits_logps
from grpo_fast.kernels import support
from grpo_fast.kernels.head import support as head_support
from tests import oracles
from tests.loss_cases import (
    EVERYWHERE,
    IS_INTERPRETER,
    kept_ids,
    make_case,
    moved,
    on_device,
    options_for,
    relative_l2,
    run,
    support_of,
    truth,
)
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")
# Use smaller sizes in Triton's interpreter, because it runs one program for each row of dW.
VOCABULARIES, H, T = (31, 130 if IS_INTERPRETER else 300), 41, 24 if IS_INTERPRETER else 70
RULES = {
    "plain": {}, "all": {"temperature": 0.8, "softcap": 4.0, "logit_scale": 1.3},
    "warm": {"temperature": 1.7, "logit_scale": 1.2},
}  # fmt: skip

FORMS = {"gathered": ("linear", 0), "product": ("linear", 10**9), "logits": ("logits", 0)}
# One axis, so that each backend has each form with each kind of sets.
WAYS = [
    pytest.param(*p.values, *form, id=f"{p.id}-{name}", marks=p.marks)
    for p in EVERYWHERE
    for name, form in FORMS.items()
]


@pairs(
    backend__function__cost=WAYS, rule=RULES.items(), sets=["none", "mixed", "every row"],
    workspace=["256", "0"], repeats=[False, True], V=VOCABULARIES,
)  # fmt: skip
def test_values_and_gradients(
    backend, function, rule, sets, cost, workspace, repeats, V, monkeypatch
):
    """Check logps, entropies, gradients of their weighted sums, and that rows are independent.

    With `sets`, some or all rows have a `Support`, whose ids are gathered or part of a product of
    all logits (`cost`). With `repeats`, a row of `hidden` predicts several targets. Some rows have
    no target, and their hidden states and sets may hold anything. The first backward pass reads the
    cached logits, and the second computes them again. It must give the same bits of dH. The error
    of a gradient may be three times that of plain torch in fp32.
    """
    for name in ("GATHERED_COST", "GATHERED_COST_GPU"):
        monkeypatch.setattr(head_support, name, cost)
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", workspace)  # 0 means chunks of 32 rows
    if workspace == "0":
        monkeypatch.setattr(support, "BLOCK_ELEMENTS", 7 * H)
    # 1. Make the inputs. Rows 5 to 8 get a gradient from the entropy only.
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*n, generator=g) for n in ((T, H), (V, H), (V,)))
    hidden = hidden / 3  # logits have a standard deviation of about 2
    ids, (up, up_entropy) = torch.randint(V, (T,), generator=g), torch.randn(2, T, generator=g)
    up[5:9] = 0.0
    live = torch.rand(T, generator=g) > 0.2
    kept = kept_ids(0, ids[None], V)[0] if sets != "none" else torch.ones(T, V, dtype=torch.bool)
    if sets == "every row":
        kept[kept.all(-1), 5:] = False
        kept.scatter_(-1, ids[:, None], True)
    repeats = repeats and function == "linear"  # the rows of logits cannot be named
    index = torch.randint(20, (T,), generator=g) if repeats else torch.arange(T)
    inputs = [hidden, weight, bias] if function == "linear" else [hidden @ weight.T + bias]

    # 2. Compute the expected results in fp64, and those of plain torch in fp32.
    def plain(dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        raw = leaves[0] if function == "logits" else leaves[0][index] @ leaves[1].T + leaves[2]
        return leaves, *oracles.logps_and_entropy(raw, ids, kept=kept, **rule)

    (exact, *true), (narrow, *torchs) = plain(torch.float64), plain(torch.float32)
    # 3. Compare the values.
    if not repeats:
        inputs[0] = torch.where(live[:, None], inputs[0], torch.nan)
    leaves = [x.requires_grad_() for x in inputs]

    def call(rows=slice(None), **more):
        more |= {"target_ids": ids.where(live, -100)[rows], "backend": backend, **rule}
        if sets != "none":
            more["support"] = support_of(kept[rows], live[rows])
        if repeats:
            more["hidden_rows"] = index[rows]
        own = [leaves[0] if repeats else leaves[0][rows], *leaves[1:]]
        own, more = moved((own, more), on_device(backend))
        if function == "logits":
            return moved(logits_logps(*own, **more), "cpu")
        return moved(linear_logps(*own[:2], bias=own[2], **more), "cpu")

    found = call(return_entropy=True)
    for x, y in zip(found, true, strict=True):
        torch.testing.assert_close(x[live].double(), y[live], rtol=2e-6, atol=3e-6)
        assert not x[~live].any()
    with torch.no_grad():
        assert torch.equal(call(), found[0])
    # 4. Check that the bits of a row do not depend on the other rows.
    few = live.nonzero()[::9, 0]
    alone, whole = call(few), call()
    assert torch.equal(alone, whole[few])
    if not repeats and on_device(backend) == "cpu":
        dh, all_dh = (
            torch.autograd.grad((x * up[rows]).sum(), leaves[0])[0]
            for x, rows in ((alone, few), (whole, slice(None)))
        )
        assert torch.equal(dh[few], all_dh[few])
    # 5. Compare the gradients.
    # In a large vocabulary, the typical logp nearly cancels the entropy in the entropy's gradient.
    for used in ((1.0, 1.0), (1.0, 0.0), *[(0.0, 1.0)] * (V == 31)):
        weights = [(use * w)[live] for use, w in zip(used, (up, up_entropy), strict=True)]

        def gradients(results, leaves, weights=weights):
            terms = [(x[live] * w).sum() for x, w in zip(results, weights, strict=True) if w.any()]
            return torch.autograd.grad(sum(terms), leaves, retain_graph=True)

        once, again, expected, of_torch = (
            gradients(*x)
            for x in ((found, leaves), (found, leaves), (true, exact), (torchs, narrow))
        )
        assert torch.equal(once[0], again[0])
        for x, y, z, other in zip(once, again, expected, of_torch, strict=True):
            bar = max(2e-6, 3 * relative_l2(other, z))
            assert relative_l2(x, z) < bar and relative_l2(y, z) < bar
        assert repeats or not once[0][~live].any()


def test_the_form_follows_from_the_sizes(spied):
    forms = [spied(head_support, name) for name in ("GatheredSets", "ProductSets")]
    hidden, weight, ids = torch.randn(70, 41), torch.randn(300, 41), torch.randint(300, (70,))
    for k, expected in ((2, [1, 0]), (200, [1, 1])):
        columns = (ids[:, None] + torch.arange(k)) % 300
        support = Support(columns.flatten(), torch.arange(71) * k)
        linear_logps(hidden, weight, ids, support=support)
        assert [len(calls) for calls in forms] == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_narrow_weights_gradient_is_summed_in_fp32_and_rounded_once(dtype, monkeypatch):
    """Check that a 16-bit dW is summed in fp32 and rounded only once, with the torch backend.

    The torch backend computes this sum without the C++ kernels.
    """
    monkeypatch.setattr(head_support, "GATHERED_COST", 0)
    hidden = torch.randn(300, 2).to(dtype).requires_grad_()
    weight = torch.randn(3, 2).to(dtype).requires_grad_()
    support = Support(torch.tensor([0, 1] * 300), torch.arange(0, 601, 2))
    logps = linear_logps(
        hidden, weight, torch.zeros(300, dtype=torch.int64), support=support, backend="torch"
    )
    logps.sum().backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    (h @ w[:2].T).log_softmax(-1)[:, 0].sum().backward()
    ulp = 2**-8 if dtype == torch.bfloat16 else 2**-11
    assert ((weight.grad.double() - w.grad).abs() <= ulp * w.grad.abs() + 1e-4).all()


# The hidden sizes are chosen so that the kernel runs with 4, 8 and 16 warps. 897 gives unaligned
# rows. 9000 exceeds SUPPORT_COLUMNS, so torch computes this case.
@pytest.mark.gpu
@pairs(
    options=[options_for("dapo"), options_for("grpo", softcap=3.0, beta=0.2)],
    width__dtype=[
        *((x, torch.bfloat16) for x in (896, 897, 8192, 9000)),
        (4096, torch.float16), (2048, torch.float32),
    ],
)  # fmt: skip
def test_real_sizes(width, dtype, options, monkeypatch):
    """Check gradients, and that repeated runs have the same bits.

    In 16 bits, the limit is based on the rounding error of the exact gradient, which depends on
    the values. Many gradients are below 6e-5, where the spacing of fp16 is constant.
    """
    monkeypatch.setattr(head_support, "GATHERED_COST_GPU", 0)
    case = make_case(5, H=width, V=32000, dtype=dtype, support=True, **options)
    result, again = (run("linear", case, backend="triton") for _ in range(2))
    expected = truth("linear", case)
    assert (result.logps - expected.logps)[case.mask].abs().max() < 2e-5
    for what, found in result.grads.items():
        exact = getattr(expected, f"{what}_grad")
        rounding = 0.0 if dtype == torch.float32 else relative_l2(exact.to(dtype), exact)
        assert relative_l2(found, exact) < 1e-4 + 1.5 * rounding
        assert torch.equal(found, again.grads[what])
