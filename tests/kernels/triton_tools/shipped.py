"""Calls to kernel functions that together use every Triton configuration of the package.

On sm_90, they also use the candidates of benchmarks/gpu/row_candidates.py.

`report.entries` compiles the kernels that these calls launch.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.row_candidates import CANDIDATES, KeptRows, kept_row_loss_
from grpo_fast.kernels.divergence import DivergenceTerm, TeacherHead
from grpo_fast.kernels.gpu import divergence as divergence_triton
from grpo_fast.kernels.gpu import gradients, tokens
from grpo_fast.kernels.gpu import linear as linear_triton
from grpo_fast.kernels.gpu import rows as rows_triton
from grpo_fast.kernels.gpu import support as support_triton
from grpo_fast.kernels.types import Exponentials, HeadInputs, LogitRows, LogitTransform, SupportRows
from grpo_fast.objective.coefficients import RowInputs
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.kl import DIVERGENCES, KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES

ROWS = 64


def problem(
    dtype: torch.dtype, vocab: int, hidden_size: int, options: str
) -> tuple[HeadInputs, bool]:
    """Return the arguments of a head function, and whether `options` requests the entropy.

    `options` may contain "b" (a bias), "c" (a soft cap) and "e" (the entropy).
    """
    hidden, weight = (
        torch.empty(ROWS, hidden_size, dtype=dtype),
        torch.empty(vocab, hidden_size, dtype=dtype),
    )
    has_bias = "b" in options
    transform = LogitTransform(1.0, 30.0 if "c" in options else None)
    bias = weight[:, 0].contiguous() if has_bias else None
    ids = torch.zeros(ROWS, dtype=torch.long)
    return HeadInputs(hidden, weight, bias, ids, transform), "e" in options


def linear(
    dtype: torch.dtype, vocab: int, hidden_size: int, options: str, *, store: bool = False
) -> None:
    """Compile the kernels that compute logps from hidden states.

    With `store`, the kernels also store fp32 logits.
    """
    arguments, has_entropy = problem(dtype, vocab, hidden_size, options)
    out = torch.empty(ROWS, vocab) if store else None
    linear_triton.head_logps(arguments, return_entropy=has_entropy, logits_out=out)


def written(
    dtype: torch.dtype, vocab: int, hidden_size: int, options: str, *, known: bool = False
) -> None:
    """Compile the kernels that write 16-bit exponentials.

    If the statistics are `known`, this compiles one pass. Otherwise, it compiles two, with and
    without a loss.
    """
    arguments, has_entropy = problem(dtype, vocab, hidden_size, options)
    out = torch.empty(ROWS, -(-vocab // 64) * 64, dtype=torch.bfloat16)[:, :vocab]
    v = torch.ones(ROWS)
    stats = (v, v, None) if known else None
    linear_triton.head_exponentials(arguments, out, return_entropy=has_entropy, known=stats)
    if not known:
        linear_triton.head_exponentials(
            arguments, out, return_entropy=has_entropy,
            loss=(RowInputs(v, v, v, v, v), LossConfig("dapo", beta=0.1, kl_times_ratio=True)),
        )  # fmt: skip


def rows(dtype: torch.dtype, vocab: int) -> None:
    """Compile the three row kernels with every option that adds code."""
    logits, target = torch.empty(4, vocab, dtype=dtype), torch.zeros(4, dtype=torch.long)
    v, config = torch.ones(4), LossConfig(loss_type="dapo", beta=0.1, kl_times_ratio=True)
    p, terms = LogitRows(logits, target, LogitTransform(1.0, 30.0)), RowInputs(v, v, v, v, v, v)
    rows_triton.row_logps(p, return_entropy=True)
    rows_triton.row_grad_(p, (v, v, v), v, v)
    if dtype == torch.float32:
        # Also compile the kernels for fp32 logits with a 16-bit gradient.
        out = torch.empty(4, vocab, dtype=torch.bfloat16)
        rows_triton.row_grad_(p, (v, v, v), v, v, out=out)
        rows_triton.row_loss_(p, out, terms, config, return_entropy=True)
    rows_triton.row_loss_(p, logits, terms, config, return_entropy=True)


def scaled(dtype: torch.dtype) -> None:
    x = torch.empty(10**6, dtype=dtype)
    gradients.scale_([x] * 3, [torch.ones(())] * 3)


def around_gemms(hidden_size: int) -> None:
    """Compile the kernels that run before and after the gradient GEMMs."""
    vocab, ids = 1000, torch.zeros(ROWS, dtype=torch.long)
    hidden, by = torch.empty(ROWS, hidden_size, dtype=torch.bfloat16), torch.ones(ROWS)
    weight = torch.empty(vocab, hidden_size, dtype=torch.bfloat16)
    product = torch.empty(ROWS, hidden_size)
    filled = Exponentials((by, by, None), None, None, None, by)
    gradients.times(by, filled, LogitTransform(1.0, 30.0), ROWS)
    gradients.write_hidden_(hidden, product, by, by, ids, weight)
    gradients.write_hidden_(torch.empty_like(hidden), product, by, by, ids, weight, hidden)
    scaled = gradients.scaled_hidden(hidden, by, hidden.dtype)
    matrix = torch.empty(ROWS, 1024, dtype=torch.bfloat16)[:, :vocab]
    for d_weight in (torch.empty(vocab, hidden_size), weight):
        gradients.add_targets_(d_weight, ids.int(), ids, by, hidden, matrix, scaled)


def around_calls() -> None:
    """Compile the kernels that expand tokens, check values and sort targets."""
    v, ids = torch.ones(ROWS), torch.zeros(ROWS, dtype=torch.long)
    for cu, given, index in ((ids.int(), [v] * 3, None), (None, [v], ids)):
        tokens.expanded(index, cu, ROWS, 4, v, given, per_token=cu is None)
    tokens.extremes([v, ids, ids.int(), v.double(), v == 0])
    tokens.extremes([v] * tokens.VECTORS)
    gradients.sorted_targets(ids)


def supported(dtype: torch.dtype, hidden_size: int, options: str) -> None:
    """Compile the kernels for token sets. See `problem` for the meaning of `options`."""
    p, has_entropy = problem(dtype, 1000, hidden_size, options)
    hidden, weight, _, ids, transform, _ = p
    v, index = torch.ones(ROWS), ids if "b" in options else None
    rows = SupportRows(None, None, ids, torch.arange(ROWS + 1), ids, index)
    support_triton.head_rows(p, rows, return_entropy=has_entropy, return_slopes=True)
    of_rows = LogitRows(v[None], ids, transform, torch.arange(ROWS + 1))
    rows_triton.row_logps(of_rows, return_entropy=has_entropy)
    rows_triton.row_grad_(of_rows, (v, v, v), v, v if has_entropy else None)
    support_triton.head_weight(v, hidden, rows, weight, add=False)
    if has_entropy:
        support_triton.head_hidden(v, weight, rows)
        wide = torch.empty(1000, hidden_size)
        support_triton.head_weight(v, hidden, rows, wide, add=True)


def compared(kind: str, vocab: int) -> None:
    """Compile the divergence kernels with three sets of options.

    The first has soft caps and a gradient, the second has neither, and the third is for one shard
    of the vocabulary.
    """
    z, y, w = torch.empty(4, vocab), torch.empty(4, vocab), torch.ones(4)
    term = DivergenceTerm(TeacherHead(z, y), kind)

    def rows(softcap: float | None) -> list[LogitRows]:
        return [LogitRows(x, w.long(), LogitTransform(1.0, softcap)) for x in (z, y)]

    found = divergence_triton.row_divergence_(*rows(30.0), w, term, out=y)
    divergence_triton.row_divergence_(*rows(None), w, term)
    divergence_triton.row_divergence_(*rows(30.0), w, term, out=y, known=found)


def loss(config: LossConfig) -> None:
    logits, target, v = torch.empty(4, 1000), torch.zeros(4, dtype=torch.long), torch.ones(4)
    p = LogitRows(logits, target, LogitTransform())
    rows_triton.row_loss_(p, logits, RowInputs(v, v, v, v, v), config, return_entropy=False)
    tokens.row_coefficients(v, RowInputs(v, v, v, v, v), config)


def kept(sizes: KeptRows) -> None:
    """Compile a candidate of the row kernel."""
    logits, target = torch.empty(4, 151936, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.long)
    terms, config = RowInputs(*[torch.ones(4)] * 2, None, torch.ones(4)), LossConfig("dapo")
    p = LogitRows(logits, target, LogitTransform())
    kept_row_loss_(sizes, p, logits, terms, config, return_entropy=False)


def call(function: Callable[..., None], *given: Any, **more: Any) -> tuple[str, Callable[[], None]]:
    """Return a readable name for a call, and the call as a function without arguments."""
    options = [f"{name}={x}" for name, x in more.items()]
    words = [f"{x.loss_type} {x.kl_estimator}" if isinstance(x, LossConfig) else x for x in given]
    name = " ".join(map(str, (function.__name__, *words, *options)))
    return name, partial(function, *given, **more)


def shipped(arch: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name and the call of every configuration on `arch`.

    V = 32000 and H = 896 are aligned, and 32001 and 897 are odd. sm_90 has more combinations of
    options, because it has an additional large tile for light epilogues.
    """
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for vocab, hidden_size in ((32000, 896), (32001, 897)):
        for dtype, options in itertools.product((bf16, fp32), ("", "bce")):
            yield call(linear, dtype, vocab, hidden_size, options)
        yield call(written, bf16, vocab, hidden_size, "bce")
    of_even = bf16, 32000, 896
    yield call(linear, *of_even, "be", store=True)
    yield call(linear, fp16, 32000, 896, "bce", store=True)
    for options in ("", "b", "be", "c", "e") if arch == "sm_90" else ("",):
        yield call(written, *of_even, options)
    if arch == "sm_90":
        for options in ("e", "ce", "be", "c"):
            yield call(linear, *of_even, options)
        yield call(written, *of_even, "b", known=True)
        for sizes in CANDIDATES:
            if isinstance(sizes, KeptRows):
                yield call(kept, sizes)
    yield call(written, *of_even, "", known=True)
    for dtype, vocab in ((fp16, 1000), (fp32, 1001), (bf16, 32000), (fp32, 32001)):
        yield call(rows, dtype, vocab)
    for kind, vocab in zip(DIVERGENCES, (1000, 32000, 32001), strict=True):
        yield call(compared, kind, vocab)
    for hidden_size in (896, 897):
        yield call(around_gemms, hidden_size)
    yield call(around_calls)
    # Cover each number of warps, an odd hidden size, and the largest hidden size.
    for hidden_size in (897, 4096, 8192):
        yield call(supported, bf16, hidden_size, "bce")
    yield call(supported, fp32, 8192, "bce")
    yield call(loss, LossConfig(loss_type="dapo", beta=0.1, kl_times_ratio=True))
    for dtype in (fp32, bf16):
        yield call(scaled, dtype)
    # The code of the loss functions does not depend on the architecture, so compile it only for
    # sm_90. There are fewer KL estimators than losses, so the estimators are cycled.
    if arch == "sm_90":
        token = {
            o.function: name
            for name, o in OBJECTIVES.items()
            if o.ratio_kind == "ratio" and "token" in o.levels
        }
        for name, estimator in zip(token.values(), itertools.cycle(KL_ESTIMATORS), strict=False):
            estimator = estimator if OBJECTIVES[name].reference else LossConfig.kl_estimator
            yield call(loss, LossConfig(name, kl_estimator=estimator, max_completion_length=8))
