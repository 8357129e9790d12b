"""Bugs planted in exact divergences: leaves, rows in torch and C++, the chunk loop, the door."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

LEAVES, ROWS, HEAD, DOOR, LOADER = (
    f"grpo_fast/{x}.py"
    for x in (
        "objective/divergences", "kernels/divergence_reference", "kernels/head/divergence",
        "loss/divergence", "kernels/cpu/divergence",
    )
)  # fmt: skip
CPP, WORDS, API = "csrc/rows/divergence.h", "csrc/vec/words.h", "csrc/api/divergence.cpp"


def bug(name: str, path: str, before: str, after: str, meaning: str, suite="") -> Mutant:
    suite = suite or ("csrc_divergence" if path.startswith("csrc/") else "divergence")
    return Mutant(f"divergence-{name}", path, before, after, meaning, suite)


MUTANTS = [
    bug(
        "reverse-sign",
        LEAVES,
        "tl.where(p == 0, 0.0, p * d)\n    close = p",
        "tl.where(p == 0, 0.0, -p * d)\n    close = p",
        "the gradient climbs",
    ),
    bug(
        "forward-without-gap",
        LEAVES,
        "tl.where(q == 0, 0.0, -q * d) - gap), -gap",
        "tl.where(q == 0, 0.0, -q * d)), -gap",
        "terms are negative, and cancel",
    ),
    bug(
        "close-by-difference",
        LEAVES,
        "return tl.where(tl.abs(d) < 0.5, close, slope + gap)",
        "return tl.where(tl.abs(d) < 0.0, close, slope + gap)",
        "the KL of a near teacher is rounding noise",
    ),
    bug(
        "jsd-mixture",
        LEAVES,
        "tl.where(d >= 0, beta * near, (1.0 - beta) * near)",
        "tl.where(d >= 0, (1.0 - beta) * near, beta * near)",
        "beta is the student's share",
    ),
    bug(
        "lse-with-the-top",
        ROWS,
        ".exp().scatter(-1, top, 0.0)",
        ".exp()",
        "a row has one logit too many",
    ),
    bug(
        "lse-rounded",
        ROWS,
        "return (z - near) - rest.masked_fill(lse[:, None] == -torch.inf, 0.0)",
        "return z - near",
        "1 - p of a certain row is the last digit of its logit",
    ),
    bug(
        "gradient-of-the-top",
        ROWS,
        "return d.scatter_(-1, top, at_top.to(d.dtype))",
        "return d",
        "a certain student's gradient cancels",
    ),
    bug(
        "weight-of-nan",
        ROWS,
        "d = torch.where(w == 0, 0.0, _gradient(lp, slope, center) * (w * chain))",
        "d = _gradient(lp, slope, center) * (w * chain)",
        "a row of weight 0 makes dW NaN",
    ),
    bug(
        "chain",
        ROWS,
        "_gradient(lp, slope, center) * (w * chain)",
        "_gradient(lp, slope, center) * w",
        "temperature and softcap are not differentiated",
    ),
    bug(
        "topk-share",
        ROWS,
        "(rest - tail.to(z.dtype)).exp() * d[:, -1:]",
        "d[:, -1:]",
        "every other id gets the whole tail's gradient",
    ),
    bug(
        "topk-empty-places",
        ROWS,
        "torch.where(is_one, -torch.inf, torch.inf)",
        "torch.full_like(lq, -torch.inf)",
        "an empty place takes id 0 out of the tail",
    ),
    bug(
        "topk-floor",
        DOOR,
        "sums = logps.double().exp().sum(1)",
        "sums = logps.double().exp().sum(1).clamp(max=1)",
        "probabilities above 1 pass",
    ),
    bug(
        "topk-twice",
        DOOR,
        "twice = (places.diff() == 0).any()",
        "twice = (places.diff() == 0).all()",
        "an id that stands twice in a row passes",
    ),
    bug(
        "cpp-top-lane",
        CPP,
        "lanes != static_cast<int32_t>(p_.top - column)",
        "lanes > -1",
        "the top's slope is counted twice",
    ),
    bug(
        "cpp-tail-lanes",
        CPP,
        "values += keep_where(is_one, of.value)",
        "values += of.value",
        "lanes past the end of a row repeat its last vector",
    ),
    bug(
        "cpp-rest", CPP, "return below(raw) - rest;", "return below(raw);", "lse is rounded to fp32"
    ),
    bug(
        "cpp-bend",
        CPP,
        "store_up_to(out + column, d * p_.bend(raw), n)",
        "store_up_to(out + column, d, n)",
        "softcap is not differentiated",
    ),
    bug(
        "cpp-zero-weight",
        API,
        "if (out && w[row] == 0) write_zeros(to_row, chunk.width(row));\n",
        "",
        "a row of weight 0 has the slopes for a gradient",
    ),
    bug(
        "cpp-offsets",
        API,
        "if (offsets) chunk.offsets = checked_offsets",
        "if (false) chunk.offsets = checked_offsets",
        "sets are one row",
    ),
    bug(
        "expm1-minus-term",
        WORDS,
        "p = fma(p, x, 1.6666667e-1f);\n",
        "",
        "a term of the series is missing",
    ),
    bug(
        "log1p-lost",
        WORDS,
        "f = fma(lost, bit_cast<Floats>((127 - k) << 23), f);\n",
        "",
        "log(1 + x) of a small x has the digits of 1 + x",
    ),
    bug(
        "keep",
        HEAD,
        "active[chunk].nonzero()[:, 0]",
        "active[chunk].nonzero()[:1, 0]",
        "all rows but one are left out of the products",
    ),
    bug(
        "teacher-chunk",
        HEAD,
        "at = chunk if index is None",
        "at = slice(0, count) if index is None",
        "every chunk has the teacher's first rows",
    ),
    bug(
        "teacher-bias",
        HEAD,
        "if teacher.bias is not None:",
        "if teacher.bias is None:",
        "the teacher's bias is forgotten",
    ),
    bug(
        "support-weights",
        HEAD,
        "source.gradients(SupportGradient(y, w), wanted, others)",
        "source.gradients(SupportGradient(y, w), wanted, None)",
        "rows of the whole vocabulary have no gradient",
    ),
    bug("default-weights", DOOR, "1 / max(count, 1)", "1.0", "the mean is a sum"),
    bug(
        "teacher-gradient",
        DOOR,
        "if isinstance(x, Tensor) and x.requires_grad:",
        "if False:",
        "a teacher that wants a gradient silently gets none",
    ),
    bug(
        "unit",
        DOOR,
        "weights = weights if unit is None else weights * unit",
        "weights = weights",
        "small fp16 weights underflow",
    ),
    bug(
        "term-coef",
        "grpo_fast/loss/passes.py",
        "weights = term.coef * batch.tokens.token_weights",
        "weights = batch.tokens.token_weights",
        "the term's weight is 1",
        "divergence_term",
    ),
    bug(
        "term-active-rows",
        HEAD,
        "active[chunk] | active_rows(*g)",
        "active_rows(*g)",
        "rows without an advantage do not follow the teacher",
        "divergence_term",
    ),
    bug(
        "term-kept-rows",
        HEAD,
        "at = chunk if index is None else index[chunk]",
        "at = chunk",
        "the teacher's rows are those of other targets",
        "divergence_term",
    ),
    bug(
        "term-sum",
        HEAD,
        "d[:count] += d_policy[:count]",
        "d[:count] = d_policy[:count]",
        "the teacher has no gradient beside a loss",
        "divergence_term",
    ),
]
