"""Test `linear_divergence` against textbook formulas in fp64: values, gradients, limits, errors."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from benchmarks import measure
from grpo_fast import TeacherHead, TeacherTopK, linear_divergence
from grpo_fast.objective.kl import DIVERGENCES
from tests.loss_cases import ENGINES, HAS_GPU, IS_INTERPRETER, moved, on_device, relative_l2
from tests.oracles import scaled_logits
from tests.pairs import pairs

KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1), ("jsd", 0.97)]
BACKENDS = [x.id for x in ENGINES if not x.marks]
# Each entry has a dtype, a backend, and the tolerances of values and gradients.
# test_gradient_range.py tests the gradients of 16-bit inputs on a CPU.
WAYS = {
    "fp64": (torch.float64, "torch", 1e-12, 1e-12),
    **{b: (torch.float32, b, 2e-6, 2e-6) for b in BACKENDS},
    "bf16": (torch.bfloat16, "torch", 2e-6, 6e-3),
    "fp16": (torch.float16, "torch", 2e-6, 2e-3),
}
if HAS_GPU:
    WAYS["gpu-fp32"] = (torch.float32, "triton", 1e-4, 2e-3)
    WAYS["gpu-bf16"] = (torch.bfloat16, "triton", 1e-3, 1e-2)
ROWS = 6 if IS_INTERPRETER else 37  # Triton's interpreter runs one program per row
PLAIN = dict(temperature=1.0, softcap=None, logit_scale=1.0)
RULES = {
    "plain": (PLAIN, PLAIN),
    "cohere and gemma": (dict(logit_scale=0.25, softcap=None, temperature=1.3),
                         dict(logit_scale=1.0, softcap=3.0, temperature=1.3)),
    "softcap": (dict(logit_scale=1.5, softcap=2.0, temperature=0.9), PLAIN),
}  # fmt: skip


def textbook(lp: Tensor, lq: Tensor, kind: str, beta: float) -> Tensor:
    """Compute the divergence of each row directly from its definition.

    Columns in which both distributions have probability 0 are excluded from the sum.

    Args:
        lp: Log-probabilities of the student, (N, V).
        lq: Log-probabilities of the teacher, (N, V).
        kind: Name of the divergence, for example "jsd".
        beta: Interpolation weight of "jsd".

    Returns:
        The divergences, (N,).
    """
    here = (lp > -math.inf) | (lq > -math.inf)
    lp, lq = (x.masked_fill(~here, -60.0) for x in (lp, lq))

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(a.exp() * here == 0, 0.0, a.exp() * (a - b)).sum(-1)

    if kind == "forward_kl":
        return kl(lq, lp)
    if kind == "reverse_kl":
        return kl(lp, lq)
    lm = torch.logaddexp(lp + math.log(1 - beta), lq + math.log(beta))
    return beta * kl(lq, lm) + (1 - beta) * kl(lp, lm)


def sides_of(N=37, H=6, V=53, teacher_H=9, *, dtype=torch.float64, scale=1.0, seed=0):
    """Return random hidden, weight and bias of the student, followed by those of the teacher."""
    g = torch.Generator().manual_seed(seed)

    def side(width):
        hidden = torch.randn(N, width, generator=g, dtype=torch.float64)
        weight = scale * torch.randn(V, width, generator=g, dtype=torch.float64) / width**0.5
        bias = 0.3 * torch.randn(V, generator=g, dtype=torch.float64)
        return [x.to(dtype) for x in (hidden, weight, bias)]

    return [*side(H), *side(teacher_H)]


def ours(sides, kind, beta=0.5, rules=(PLAIN, PLAIN), **options):
    """Call `linear_divergence`, and return its loss, its values and the student's gradients."""
    leaves = [x.clone().requires_grad_() for x in sides[:3]]
    options = {"teacher": TeacherHead(*sides[3:], **rules[1]), **rules[0], **options}
    device = on_device(options.get("backend"))
    given = moved(leaves, device)
    out = linear_divergence(*given[:2], kind=kind, beta=beta, bias=given[2],
                            **moved(options, device))  # fmt: skip
    out.loss.backward()
    return out.loss.detach().cpu(), out.values.cpu(), [x.grad for x in leaves]


def truth(sides, kind, beta, rules, weights, distributions=lambda z, y: (z, y)):
    wide = [x.detach().double() for x in sides]
    leaves = [x.requires_grad_() for x in wide[:3]]
    z = scaled_logits(leaves[0] @ leaves[1].T + leaves[2], **rules[0])
    y = scaled_logits(wide[3] @ wide[4].T + wide[5], **rules[1])
    lp, lq = (x.log_softmax(-1) for x in distributions(z, y))
    values = textbook(lp, lq, kind, beta)
    (values * weights.double()).sum().backward()
    return values.detach(), [x.grad for x in leaves]


def weights_of(count=37, dtype=torch.float64):
    weights = torch.linspace(-1, 2, count, dtype=dtype)
    weights[::5] = 0
    return weights


@pairs(kind__beta=KINDS, name=RULES, mib=["0", "256"], way=WAYS)  # chunks of 32 rows, or one chunk
def test_against_fp64(kind, beta, name, mib, way, monkeypatch):
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", mib)
    dtype, backend, bar, gradient_bar = WAYS[way]
    sides = sides_of(dtype=dtype)
    weights = weights_of().to(torch.promote_types(dtype, torch.float32))
    true, expected = truth(sides, kind, beta, RULES[name], weights)
    found = ours(sides, kind, beta, RULES[name], weights=weights, backend=backend)
    assert found[1].dtype == weights.dtype and relative_l2(found[1], true) < bar
    assert relative_l2(found[0], (true * weights).sum()) < 10 * bar
    for grad, wanted in zip(found[2], expected, strict=True):
        assert grad.dtype == dtype and relative_l2(grad, wanted) < gradient_bar
    assert (found[2][0][::5] == 0).all()


@pairs(kind__beta=KINDS, backend=BACKENDS, K=[1, 4, 53])
def test_a_teachers_top_k(kind, beta, backend, K):
    """Check that the divergence from a top-k teacher agrees with the textbook formula.

    With a tail, one additional category has the remaining probability. Without a tail, the K
    probabilities sum to 1. In two rows, some of the K entries are unused and have id 0.
    """
    sides, weights, g = sides_of(), weights_of(), torch.Generator().manual_seed(K)
    y = sides[3] @ sides[4].T + sides[5]
    top, ids = y.log_softmax(-1).topk(K)
    order = torch.randperm(K, generator=g)
    top, ids = top[:, order].clone(), ids[:, order].clone()
    if 1 < K < 53:
        top[3, K // 2 :], ids[3, K // 2 :] = -math.inf, 0
        ids[3][ids[3] == 0] = ids[3, 0].clone()
        ids[3, 0] = 0  # this entry is used and has the id of unused entries
        ids[5][ids[5] == 0] = ids[5, K // 2].clone()  # here no used entry has id 0
        top[5, K // 2 :], ids[5, K // 2 :] = -math.inf, 0
    for has_tail in (True, False):
        logps = top if has_tail else top.log_softmax(-1)
        teacher = TeacherTopK(ids, logps, has_tail, floor=1e-300)

        def distributions(z, y, logps=logps, has_tail=has_tail):
            rows = []
            for t in range(len(z)):
                real = logps[t] > -math.inf
                k, lq = ids[t][real], logps[t][real]
                rest = torch.ones(53, dtype=torch.bool).index_fill(0, k, False)
                lp, fill = z[t].log_softmax(-1), 54 - len(k)
                tail = lp[rest].logsumexp(0)[None] if rest.any() and has_tail else lp[:0]
                left = (-torch.expm1(lq.logsumexp(0))).log()[None][: len(tail)]
                none = torch.full((fill - len(tail),), -math.inf, dtype=z.dtype)
                rows.append((torch.cat([lp[k], tail, none]), torch.cat([lq, left, none])))
            return (torch.stack(x) for x in zip(*rows, strict=True))

        true, expected = truth(sides, kind, beta, (PLAIN, PLAIN), weights, distributions)
        for dtype in (torch.float64, torch.float32) if backend == "torch" else (torch.float32,):
            bar = 1e-11 if dtype == torch.float64 else 4e-6
            cast = [x.to(dtype) for x in sides]
            found = ours(cast, kind, beta, teacher=teacher, weights=weights.to(dtype),
                         backend=backend)  # fmt: skip
            assert relative_l2(found[1] + 1e-3, true + 1e-3) < bar
            for grad, wanted in zip(found[2], expected, strict=True):
                assert relative_l2(grad, wanted) < bar or wanted.norm() < 1e-12 > grad.norm()


@pairs(kind__beta=KINDS, backend=BACKENDS, has_tail=[True, False])
def test_a_row_without_used_ids_contributes_0(kind, beta, backend, has_tail):
    sides, ids = [x.float() for x in sides_of()], torch.arange(4).repeat(37, 1)
    logps = torch.full((37, 4), 0.25).log()
    logps[7] = -math.inf
    teacher = TeacherTopK(ids, logps, has_tail)
    found = ours(sides, kind, beta, teacher=teacher, weights=torch.ones(37), backend=backend)
    assert found[1][7] == 0 and (found[1][:7] > 0).all()
    assert (found[2][0][7] == 0).all() and (found[2][0][6] != 0).any()


def test_leaves_of_near_logits_keep_their_digits():
    """Check that the functions in DIVERGENCES are accurate in fp32 for nearly equal logits.

    At a logit difference of d = 1e-5, the divergence is p·d²/2. A difference of fp32 products would
    have no correct digit.
    """
    p, d = torch.tensor([0.3, 0.9]), torch.tensor([1e-5, -2e-5])
    q = p.double() * (-d.double()).exp()
    for kind, beta in KINDS:
        leaf, wide = DIVERGENCES[kind], (p.double(), q, d.double(), torch.expm1(-d.double().abs()))
        value, slope = leaf(p, q.float(), d, torch.expm1(-d.abs()), beta)
        true, slope_true = leaf(*wide, beta)
        assert relative_l2(value, true) < 1e-5 and relative_l2(slope, slope_true) < 1e-5
        half = (beta * (1 - beta) if kind == "jsd" else 1.0) * p.double() * d.double().square() / 2
        assert relative_l2(true, half) < 1e-4


@pytest.mark.skipif("cpu" not in BACKENDS, reason="needs the C++ kernels")
def test_a_near_teacher_has_torchs_digits_on_the_cpu():
    """Check that the CPU kernels agree with torch within 1e-5 if teacher and student nearly agree.

    At logit differences of 1e-4, computing log(1 + x) from a rounded 1 + x would cause a relative
    error of 3e-4.
    """
    torch.manual_seed(0)
    z, y, eye, none = (
        1e-4 * torch.randn(9, 48),
        1e-4 * torch.randn(9, 48),
        torch.eye(48),
        torch.zeros(48),
    )
    sides, ones = [z, eye, none, y, eye, none], torch.ones(9)
    for kind, beta in KINDS:
        found = [ours(sides, kind, beta, weights=ones, backend=x)[2][0] for x in ("torch", "cpu")]
        assert relative_l2(found[1], found[0].double()) < 1e-5


@pairs(kind__beta=KINDS, backend=BACKENDS, gap=[1e-1, 1e-3, 1e-6], doubt=[0.0, 14.0])
def test_a_certain_student_keeps_its_digits(kind, beta, backend, gap, doubt):
    """Check that values and gradients are accurate if the student is nearly certain of one token.

    The student gives this token the probability 1 − `gap`. The teacher's logit of the token is
    lower by `doubt` nats. In fp32, the terms p·log(p/q) and 1 − p must not cancel.
    """
    g = torch.Generator().manual_seed(0)
    V, N = 2049, 4 if IS_INTERPRETER else 16  # V needs several blocks of columns
    eye = torch.eye(N)
    weight = torch.randn(V, N, generator=g)
    weight[3] = weight[4:].double().logsumexp(0).float() - math.log(gap)
    teacher_weight = weight + 0.3 * torch.randn(V, N, generator=g)
    teacher_weight[3] -= doubt
    none = torch.zeros(V)
    sides = [eye, weight, none, eye, teacher_weight, none]
    true, expected = truth(sides, kind, beta, (PLAIN, PLAIN), torch.ones(N))
    _, values, grads = ours(sides, kind, beta, weights=torch.ones(N), backend=backend)
    assert (values >= 0).all() and ((values - true).abs() <= 1e-4 * true).all()
    assert (
        relative_l2(grads[1][3], expected[1][3]) < 1e-4
        and relative_l2(grads[1], expected[1]) < 1e-4
    )


@pairs(kind__beta=KINDS, backend=BACKENDS, spread=[20.0, 80.0])
def test_logits_far_apart(kind, beta, backend, spread):
    """Check that values and gradients are accurate for logits between -80 and 80.

    In the first half of the rows, the logits of teacher and student are close. In the second half,
    they are independent.
    """
    z, y = ((2 * torch.rand(16, 1000) - 1) * spread for _ in range(2))
    y[:8] = z[:8] + 0.01 * torch.randn(8, 1000)
    eye, none = torch.eye(1000), torch.zeros(1000)
    sides = [z, eye, none, y, eye, none]
    true, expected = truth(sides, kind, beta, (PLAIN, PLAIN), torch.ones(16))
    _, values, grads = ours(sides, kind, beta, weights=torch.ones(16), backend=backend)
    assert (values >= 0).all()
    assert ((values - true).abs() <= 2e-5 * true)[8:].all()
    assert ((values - true).abs() <= 2e-2 * true)[:8].all()  # close logits lose digits
    lost = (grads[0] - expected[0]).abs().sum(-1)
    assert (lost <= 1e-4 * (expected[0].abs().sum(-1) + 0.01)).all()


@pairs(way=["fp64", *BACKENDS], dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_it_is_zero_at_the_teacher_itself(way, dtype):
    sides = sides_of(ROWS, dtype=torch.float64 if way == "fp64" else dtype, scale=6.0)
    for kind, beta in KINDS:
        both = [*sides[:3], *sides[:3]]
        _, values, grads = ours(both, kind, beta, backend=WAYS[way][1])
        assert (values == 0).all() and all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_that_one_side_excludes(kind, beta, backend):
    """Check the divergence if some vocabulary columns of student or teacher have the logit -inf.

    A column in which both logits are -inf must contribute 0. If only one of the logits is -inf, the
    docstring of `linear_divergence` says whether the divergence is infinite.
    """
    for student, teacher in itertools.product((0.0, -math.inf), repeat=2):
        sides = sides_of(ROWS, dtype=torch.float32)
        sides[2][[7, 11]], sides[5][[7, 11]] = student, teacher
        _, values, grads = ours(sides, kind, beta, backend=backend)
        if (kind, student < teacher, teacher < student) in (
            ("forward_kl", True, False), ("reverse_kl", False, True)
        ):  # fmt: skip
            assert (values == math.inf).all()
            continue
        lp, lq = (h.double() @ w.double().T + b for h, w, b in (sides[:3], sides[3:]))
        true = textbook(lp.log_softmax(-1), lq.log_softmax(-1), kind, beta)
        assert relative_l2(values, true) < 2e-6 and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", [0, 3])
def test_nan_is_seen(backend, side):
    sides = sides_of(ROWS, dtype=torch.float32)
    sides[side][4, 0] = math.nan
    for kind, beta in KINDS:
        loss, values, grads = ours(sides, kind, beta, backend=backend)
        assert values.isnan().nonzero().tolist() == [[4]] and loss.isnan()
        assert grads[0][4].isnan().all() and grads[0][:4].isfinite().all()
        weights = torch.ones(ROWS).index_fill(0, torch.tensor(4), 0.0)
        loss, _, grads = ours(sides, kind, beta, weights=weights, backend=backend)
        assert loss.isfinite() and (grads[0][4] == 0).all() and grads[0].isfinite().all()
    sides = sides_of(ROWS, dtype=torch.float32)
    sides[1][40] = math.nan  # not one of the K ids of the teacher
    for has_tail in (True, False):
        logps = torch.full((ROWS, 4), 0.25).log()
        teacher = TeacherTopK(torch.arange(4).repeat(ROWS, 1), logps, has_tail)
        _, values, grads = ours(sides, "forward_kl", teacher=teacher, backend=backend)
        assert values.isnan().all() and all(x.isnan().any() for x in grads)


def test_a_teacher_of_another_dtype():
    sides = sides_of()
    narrow = [x.float() for x in sides]
    mixed = ours([*narrow[:3], *sides[3:]], "reverse_kl")[1]
    assert relative_l2(mixed, ours(sides, "reverse_kl")[1]) < 1e-6


def test_hidden_rows_padded_rows_and_no_rows():
    """Check `hidden_rows` with the padded layout, and that loss and dW are 0 without rows."""
    sides = sides_of(N=6)
    rows = torch.tensor([[0, 0, 3], [1, 0, 5]])
    teacher = TeacherHead(sides[3].reshape(2, 3, 9), sides[4], sides[5])
    leaf = sides[0].clone().requires_grad_()
    weights = torch.rand(2, 3, dtype=torch.float64)
    out = linear_divergence(leaf, sides[1], teacher, "forward_kl", bias=sides[2], weights=weights,
                            hidden_rows=rows)  # fmt: skip
    out.loss.backward()
    flat = [sides[0][rows.flatten()], *sides[1:]]
    true, expected = truth(flat, "forward_kl", 0.5, (PLAIN, PLAIN), weights.flatten())
    total = torch.zeros(6, 6, dtype=torch.float64).index_add_(0, rows.flatten(), expected[0])
    assert out.values.shape == (2, 3) and relative_l2(out.values.flatten(), true) < 1e-12
    assert relative_l2(leaf.grad, total) < 1e-12
    empty = [x[:0] if i in (0, 3) else x for i, x in enumerate(sides)]
    loss, values, grads = ours(empty, "jsd")
    assert loss == 0 and values.shape == (0,) and (grads[1] == 0).all()


def test_a_mean_by_default_and_no_second_derivative():
    sides = sides_of(dtype=torch.float32)
    loss, values, _ = ours(sides, "jsd")
    assert torch.allclose(loss, values.mean())
    hidden = sides[0].clone().requires_grad_()
    out = linear_divergence(hidden, sides[1], TeacherHead(*sides[3:]), "jsd")
    assert not out.values.requires_grad
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out.loss, hidden, create_graph=True)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the bound is that of the C++ kernels")
def test_only_one_chunk_of_logits_lives(monkeypatch):
    """Check the peak memory of a call with 32 chunks of (32, 32768) logits.

    The call may use 9 bytes for each logit of a single chunk, in addition to the memory of the LM
    head and of dW.
    """
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", "8")
    sides = sides_of(1024, 8, 1 << 15, 8, dtype=torch.float32)
    peak = measure.allocated_peak(lambda: ours(sides, "reverse_kl", backend="cpu")) / 2**20
    heads = 4  # MiB for copies of weight and hidden rows, dW and db
    assert peak < 9 * 32 * (1 << 15) / 2**20 + heads


TOP, IDS = torch.full((37, 3), 0.3).log(), torch.tensor([[4, 2, 9]]).expand(37, 3)
ALL = torch.arange(53).expand(37, 53)
WITH_GRADIENT = torch.ones(37, requires_grad=True)
# Invalid values of each argument. `teacher.NAME` is a field of a `TeacherHead`.
WRONG = {
    "hidden": [torch.zeros(37, 6, 1, 6)],
    "lm_head_weight": [torch.zeros(53, 6, dtype=torch.float64)],
    "kind": ["total_variation"],
    "beta": [1.0],
    "temperature": [0.0],
    "weights": [torch.ones(36), torch.full((37,), math.nan), WITH_GRADIENT],
    "backend": ["cuda"],
    "hidden_rows": [torch.full((37,), 37)],
    "teacher": ["gpt-2"],
    "teacher.hidden": [torch.zeros(36, 9), torch.zeros(37, 9, requires_grad=True)],
    "teacher.weight": [torch.zeros(52, 9), torch.zeros(53, 8)],
    "teacher.bias": [torch.zeros(52)],
    "teacher.temperature": [-1.0, torch.ones(37)],
    "teacher.softcap": [0.0],
    "teacher.logit_scale": [0.0],
    "teacher.floor": [TeacherTopK(IDS, TOP, floor=0.0)],
    "teacher.ids": [
        *(TeacherTopK(x, TOP) for x in (IDS * 0 + 53, IDS * 0 + 5, IDS.float())),
        TeacherTopK(torch.arange(54).expand(37, 54), torch.full((37, 54), -9.0)),
    ],
    "teacher.logps": [
        *(TeacherTopK(IDS, x) for x in (
            TOP + 0.2, TOP * math.nan, TOP * 0 - 9999.0, TOP * 0 - 1000.5,
            TOP.clone().requires_grad_())),
        TeacherTopK(IDS, TOP, has_tail=False),
        *(TeacherTopK(ALL, torch.full((37, 53), x)) for x in (-4.0, -9999.0)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(n, x) for n, values in WRONG.items() for x in values])
def test_refusals(name, value):
    sides = sides_of(dtype=torch.float32)
    section, _, field = name.partition(".")
    given = {"hidden": sides[0], "lm_head_weight": sides[1], "kind": "jsd"}
    given["teacher"] = TeacherHead(*sides[3:5])
    if field in TeacherHead._fields and not isinstance(value, TeacherTopK):
        value = given["teacher"]._replace(**{field: value})
    with pytest.raises(ValueError, match=rf"^{name}: expected .* got "):
        linear_divergence(**given | {section: value})
