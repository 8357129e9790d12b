"""Test `support=`, the ids from which a sampler chose, against the fp64 oracle with masked logits.

An LM head has two implementations: one gathers rows of W, and one computes all logits. Sizes select
the implementation, so the tests force each of them. A third implementation is for given logits.
"""

from __future__ import annotations

import pytest
import torch

from grpo_fast import Support, linear_logps, logits_logps
from grpo_fast.kernels import support_reference
from grpo_fast.kernels.head import support as head_support
from tests import loss_cases, oracle_inputs
from tests.kernels.formulas import torch_threads
from tests.loss_cases import (
    BACKENDS,
    ENGINES,
    IS_INTERPRETER,
    kept_ids,
    make_case,
    options_for,
    relative_l2,
    run,
    support_of,
)
from tests.pairs import pairs

pytestmark = pytest.mark.usefixtures("poisoned_memory")
COST = {"gathered": 0, "dense": 10**9}
FORMS = (*COST, "logits")


def take(form: str, monkeypatch) -> str:
    """Force the implementation `form` for all sizes.

    Returns:
        The function that `run` must call for this implementation, "logits" or "linear".
    """
    for name in ("GATHERED_COST", "GATHERED_COST_GPU"):
        monkeypatch.setattr(head_support, name, COST.get(form, 0))
    return "logits" if form == "logits" else "linear"


def check(function, case, **how):
    result = loss_cases.check(function, case, **how)
    never = ~case.kept[case.mask].any(0)
    if function == "logits":
        assert not result.grads["logits"][~case.kept].any()
    elif never.any():
        assert not result.grads["weight"][never].any() and not result.grads["bias"][never].any()
    return result


@pairs(form=FORMS, backend=ENGINES)
def test_no_row_has_the_whole_vocabulary(form, backend, monkeypatch):
    """Check that masked rows get gradient 0 if no active row uses the full vocabulary.

    No dense gradient is then computed, so the code must write the zeros explicitly.
    """
    case = make_case(37, support=True, **options_for("dapo"))
    function = take(form, monkeypatch)
    whole = case.kept.all(-1)
    assert (whole & case.mask).any() and not case.mask.all()
    case.kept[whole] = torch.arange(case.kept.shape[-1]) == case.ids[whole, None]
    result = check(function, case, backend=backend)
    if form == "logits":
        over = run(function, case, backend=backend, inplace=True)
        assert torch.equal(over.grads["logits"], result.grads["logits"])


# Use smaller sizes in Triton's interpreter, because it runs one program for each row of dW.
V, H, T = (130, 41, 24) if IS_INTERPRETER else (300, 41, 70)


def rows(seed: int = 0, dtype=torch.float32, some: bool = True):
    """Return random inputs of a head, target ids, and a mask of the ids in the support of each row.

    The supports have different sizes. If `some` is true, the supports of some rows contain all ids.

    Returns:
        hidden (T, H), weight (V, H), bias (V,), target ids (T,) and the mask (T, V).
    """
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*n, generator=g) for n in ((T, H), (V, H), (V,)))
    ids = torch.randint(V, (T,), generator=g)
    kept = kept_ids(seed, ids[None], V)[0]
    if not some:
        kept[kept.all(-1), 5:] = False
    kept.scatter_(-1, ids[:, None], True)
    leaves = [(x / 3).to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    return *leaves, ids, kept


def masked_truth(hidden, weight, bias, ids, kept, **rule):
    """Compute logps and entropies from masked logits in fp64.

    Returns:
        The leaf tensors (hidden, weight, bias) in fp64, the logps and the entropies.
    """
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    raw = leaves[0] @ leaves[1].T + leaves[2]
    return leaves, *oracle_inputs.logps_and_entropy(raw, ids, kept=kept, **rule)


EVERYTHING = torch.ones(T, dtype=torch.bool)
RULE = dict(temperature=0.8, softcap=4.0, logit_scale=1.3)


@pairs(some={"mixed": True, "sets": False}.items(), form=COST, backend=BACKENDS)
def test_logps_entropies_and_their_gradients(backend, form, some, monkeypatch):
    take(form, monkeypatch)
    *leaves, ids, kept = rows(some=some)
    support = support_of(kept, EVERYTHING)
    keywords = dict(support=support, return_entropy=True, backend=backend, **RULE)
    true_leaves, true_lp, true_entropy = masked_truth(*leaves, ids, kept, **RULE)
    up, up_entropy = torch.randn(2, T, generator=torch.Generator().manual_seed(1))
    # The first backward pass uses the cache of the forward pass, and the second does not. Test both
    # with and without a gradient of the entropies.
    for weight_of_entropy in (up_entropy, None):
        lp, entropy = linear_logps(leaves[0], leaves[1], ids, bias=leaves[2], **keywords)
        torch.testing.assert_close(lp.double(), true_lp, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(entropy.double(), true_entropy, rtol=2e-6, atol=2e-6)
        ours, true = (lp * up).sum(), (true_lp * up).sum()
        if weight_of_entropy is not None:
            ours = ours + (entropy * weight_of_entropy).sum()
            true = true + (true_entropy * weight_of_entropy).sum()
        found = torch.autograd.grad(ours, leaves, retain_graph=True)
        again = torch.autograd.grad(ours, leaves)
        expected = torch.autograd.grad(true, true_leaves, retain_graph=True)
        for x, y, z in zip(found, again, expected, strict=True):
            assert torch.equal(x, y) and relative_l2(x, z) < 2e-6
    raw = (leaves[0] @ leaves[1].T + leaves[2]).detach()
    given = logits_logps(raw, ids, **keywords)
    torch.testing.assert_close(given[0], lp, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(given[1], entropy, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("form", COST)
@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_that_is_kept_is_the_dense_answer(backend, form, monkeypatch):
    """Check that a support with all ids and a support with empty sets change nothing.

    An empty set means that the sampler did not restrict the row.
    """
    take(form, monkeypatch)
    hidden, weight, bias, ids, _ = rows(3)
    order = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    full = Support(order.repeat(T), torch.arange(T + 1) * V)
    empty = Support(order[:0], torch.zeros(T + 1, dtype=torch.int64))
    answers = [
        linear_logps(hidden, weight, ids, bias=bias, support=x, backend=backend)
        for x in (None, empty, full)
    ]
    assert torch.equal(answers[0], answers[1])
    torch.testing.assert_close(answers[2], answers[0], rtol=0, atol=3e-6)


@pairs(some={"mixed": True, "sets": False}.items(), form=COST, backend=ENGINES)
def test_one_hidden_row_may_serve_several_targets(backend, form, some, monkeypatch):
    take(form, monkeypatch)
    hidden, weight, bias, ids, kept = rows(5, some=some)
    index = torch.randint(20, (T,), generator=torch.Generator().manual_seed(0))
    support, up = support_of(kept, EVERYTHING), torch.arange(1.0, T + 1)
    few = hidden.detach()[:20].clone().requires_grad_()
    ours = linear_logps(
        few, weight, ids, bias=bias, support=support, hidden_rows=index, backend=backend
    )
    theirs = linear_logps(few[index], weight, ids, bias=bias, support=support, backend=backend)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    for x, y in zip(
        *(torch.autograd.grad((lp * up).sum(), (few, weight, bias)) for lp in (ours, theirs)),
        strict=True,
    ):
        assert relative_l2(x, y) < 1e-6


@pytest.mark.parametrize("backend", ENGINES)
def test_a_row_does_not_depend_on_its_neighbours(backend):
    hidden, weight, bias, ids, kept = (x.detach() for x in rows(6))
    kept = kept.clone()
    kept[kept.all(-1), 40:] = False
    kept.scatter_(-1, ids[:, None], True)
    kept[:, 100:] &= torch.rand(T, V - 100, generator=torch.Generator().manual_seed(0)) < 0.02
    kept.scatter_(-1, ids[:, None], True)

    def of(part):
        h = hidden[part].clone().requires_grad_()
        some = support_of(kept, EVERYTHING)
        lengths = some.offsets.diff()[part]
        places = torch.cat([some.ids[some.offsets[t] : some.offsets[t + 1]] for t in part])
        sets = Support(places, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))
        lp = linear_logps(h, weight, ids[part], bias=bias, support=sets, backend=backend)
        return lp.detach(), torch.autograd.grad(lp.sum(), h)[0]

    part = torch.tensor([3, T - 10, 17, 22])
    for whole, own in zip(of(torch.arange(T)), of(part), strict=True):
        assert torch.equal(whole[part], own)


@pytest.mark.parametrize("form", COST)
def test_the_same_bits_for_any_number_of_threads(form, monkeypatch):
    take(form, monkeypatch)
    *leaves, ids, kept = rows(7)
    support, found = support_of(kept, EVERYTHING), []
    for count in (1, 2, 3):
        with torch_threads(count):
            lp = linear_logps(leaves[0], leaves[1], ids, bias=leaves[2], support=support)
            found.append([lp.detach(), *torch.autograd.grad(lp.sum(), leaves)])
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ENGINES)
def test_nan_is_loud(form, backend, monkeypatch):
    function = take(form, monkeypatch)
    case = make_case(36, support=True, **options_for("grpo"))
    case.hidden[0, 1] = torch.nan
    result = run(function, case, backend=backend)
    assert result.loss.isnan() and result.logps[0, 1].isnan()
    assert any(x.isnan().any() for x in result.grads.values())


def test_the_form_follows_from_the_sizes(monkeypatch):
    taken = []
    for name in ("GatheredSets", "ProductSets"):
        real = getattr(head_support, name)
        monkeypatch.setattr(
            head_support, name, lambda *x, real=real, **k: taken.append(real) or real(*x, **k)
        )
    hidden, weight, _, ids, _ = (x.detach() for x in rows())
    for k in (2, 200):
        columns = (ids[:, None] + torch.arange(k)) % V
        support = Support(columns.flatten(), torch.arange(T + 1) * k)
        linear_logps(hidden, weight, ids, support=support)
    assert [x.__name__ for x in taken] == ["GatheredSets", "ProductSets"]


def test_large_sets_come_in_chunks(monkeypatch):
    """Check that the results do not change if large supports are processed in chunks.

    The test covers the dense product, and the gathered rows of the torch backend.
    """
    *leaves, ids, kept = rows(8)
    support = support_of(kept, EVERYTHING)

    def answer(backend="auto"):
        lp = linear_logps(
            leaves[0], leaves[1], ids, bias=leaves[2], support=support, backend=backend
        )
        return [lp.detach(), *torch.autograd.grad(lp.sum(), leaves)]

    for form, backend in (("dense", "auto"), ("gathered", "torch")):
        take(form, monkeypatch)
        whole = answer(backend)
        with monkeypatch.context() as patch:
            patch.setattr(head_support, "workspace_bytes", lambda *_: 9 * V * 4)
            patch.setattr(support_reference, "BLOCK_ELEMENTS", 7 * H)
            for x, y in zip(whole, answer(backend), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_rows_that_do_not_count_may_hold_anything():
    """Check that the support of masked rows and of rows with target -100 has no effect."""
    *_, ids, kept = rows()
    hidden, weight, *_ = (x.detach() for x in rows())
    mask = torch.rand(T, generator=torch.Generator().manual_seed(0)) < 0.5
    ours = linear_logps(hidden, weight, ids.where(mask, -100), support=support_of(kept, mask))
    whole = linear_logps(hidden, weight, ids, support=support_of(kept, EVERYTHING))
    assert not ours[~mask].any()
    torch.testing.assert_close(ours[mask], whole[mask], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_narrow_weights_gradient_is_summed_in_fp32_and_rounded_once(dtype, monkeypatch):
    """Check that a 16-bit dW is summed in fp32 and rounded only once, with the torch backend.

    The torch backend computes this sum without the C++ kernels.
    """
    take("gathered", monkeypatch)
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
