"""Times of the candidates of the row kernel on a GPU, at (8192, 151936) in bf16.

    python -m benchmarks.gpu.row_candidates [--out FILE] [--device cpu]

The row kernel computes the loss of given logits. A `RowConfig` is a configuration of the shipped
kernel, in which programs stride over rows. `KeptRows` is another kernel (below), and QUACK is the
cross entropy of the library QuACK, which must be installed. The package never tunes its
kernels at run time, because a training run would then not be reproducible. If a `RowConfig` is
faster than the shipped one, copy its line into grpo_fast/kernels/gpu/rows.py by hand. On a CPU, the
command only lists the candidates.

`KeptRows` keeps a part of each row in registers between its two passes. The shipped kernel reads
each row of logits twice. With one program on each of 132 multiprocessors, 40 MB of rows are in
flight. The L2 cache of an H100 has two parts of 25 MB, so the second read may miss. `KeptRows`
keeps the first KEPT blocks of a row in registers, as pairs of 16-bit logits, and reads only the
rest a second time. The loads of the rest are pipelined: they are in flight while earlier blocks are
processed.

With GIVEN, the first pass subtracts `target logit - old logp`, which is near the lse, in place of a
running maximum. A block then needs no reduction over the threads of a program. If the lse of a row
is far from this number, its sum overflows. linear.py computes such rows again in a second launch,
which this candidate does not have. With GIVEN, the last bits of a logp differ from those of
`row_logps`, so an on-policy ratio would not be exactly 1. The candidate has no soft cap, no
temperature and no entropy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks import measure
from benchmarks.options import measuring
from grpo_fast.kernels.gpu import rows
from grpo_fast.kernels.gpu.launch import launch, multiprocessors
from grpo_fast.kernels.gpu.math import FLOOR, exp_fp32, expm1, finish
from grpo_fast.kernels.gpu.rows import RowConfig
from grpo_fast.kernels.gpu.tokens import loss_and_slope, loss_arguments
from grpo_fast.kernels.types import LogitRows, LogitTransform, RowLoss
from grpo_fast.objective.coefficients import RowInputs
from grpo_fast.objective.config import LossConfig


@triton.jit
def halves(pairs):
    """Return the two bf16 numbers in each int32, as fp32."""
    low = (pairs << 16).to(tl.float32, bitcast=True)
    return low, (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def add_pairs(row_max, exp_sum, pairs, at_target, rest, GIVEN: tl.constexpr, ALL: tl.constexpr):
    """Add a block of logits to the running maximum and sum, except the target.

    `at_target` is the distance of the target from each pair of the block, in logits. `rest` is the
    number of pairs from the start of the block to the end of the row. With ALL, it is not read.
    """
    low, high = halves(pairs)
    low = tl.where(at_target != 0, low, float("-inf"))
    high = tl.where(at_target != 1, high, float("-inf"))
    if not ALL:
        in_row = tl.arange(0, pairs.shape[0]) < rest
        low = tl.where(in_row, low, float("-inf"))
        high = tl.where(in_row, high, float("-inf"))
    if not GIVEN:
        new_max = tl.maximum(row_max, tl.max(tl.maximum(low, high), 0))
        exp_sum = exp_sum * exp_fp32(row_max - new_max)
        row_max = new_max
    return row_max, exp_sum + exp_fp32(low - row_max) + exp_fp32(high - row_max)


@triton.jit
def gradient_pairs(pairs, at_target, lse, g, g_target):
    """Return the gradient of a block of logits as pairs."""
    low, high = halves(pairs)
    low = tl.where(at_target == 0, g_target, -g * exp_fp32(low - lse))
    high = tl.where(at_target == 1, g_target, -g * exp_fp32(high - lse))
    low = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
    return low | (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["n_rows", "zero"])
def kept_rows_kernel(
    logits_ptr, out_ptr, target_ptr, advantages_ptr, policy_weights_ptr, old_logps_ptr, lse_ptr,
    logps_ptr, losses_ptr, grad_logps_ptr, n_rows, V, stride_logits_t, stride_out_t, p0, p1, p2, p3,
    zero, OBJECTIVE: tl.constexpr, N_PARAMS: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr,
    GIVEN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, BLOCK)
    n_pairs = V // 2
    for row_id in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        row = tl.cast(row_id, tl.int64)
        target = tl.load(target_ptr + row).to(tl.int32)
        z_target = tl.load(logits_ptr + row * stride_logits_t + target).to(tl.float32)
        pairs_ptr = (logits_ptr + row * stride_logits_t).to(tl.pointer_type(tl.int32)) + offs
        # Compute the distance from block 0 here, and subtract the first column of each block below.
        # Otherwise, the compiler would compute the columns of all blocks before the loop, and keep
        # them in registers.
        at_target = target - 2 * offs
        # 1. Compute the statistics, and keep the first blocks.
        exp_sum = tl.zeros([BLOCK], tl.float32)
        row_max = tl.maximum(z_target, FLOOR)
        if GIVEN:
            row_max = z_target - tl.load(old_logps_ptr + row)
        kept = ()
        for i in tl.static_range(KEPT):
            pairs = tl.load(pairs_ptr + i * BLOCK, eviction_policy="evict_first")
            row_max, exp_sum = add_pairs(
                row_max, exp_sum, pairs, at_target - 2 * i * BLOCK, BLOCK, GIVEN, True
            )
            kept = kept + (pairs,)  # type: ignore[assignment]
        for start in tl.range(KEPT * BLOCK, n_pairs, BLOCK, num_stages=STAGES):
            pairs = tl.load(
                pairs_ptr + start, mask=offs < n_pairs - start, other=0,
                eviction_policy="evict_last",
            )  # fmt: skip
            row_max, exp_sum = add_pairs(
                row_max, exp_sum, pairs, at_target - 2 * start, n_pairs - start, GIVEN, False
            )
        lse, lp, _ = finish(row_max, tl.sum(exp_sum, 0), 0.0, z_target, True)
        tl.store(lse_ptr + row, lse)
        tl.store(logps_ptr + row, lp)
        # 2. Compute the loss and its slope.
        loss, g = loss_and_slope(
            lp, row, True, advantages_ptr, policy_weights_ptr, None, old_logps_ptr, None, p0, p1,
            p2, p3, 0.0, 0.0, OBJECTIVE, N_PARAMS, None, False,
        )  # fmt: skip
        tl.store(losses_ptr + row, loss)
        tl.store(grad_logps_ptr + row, g)
        # 3. Write the gradient, first that of the kept blocks. The operations with `zero` change
        # nothing. Without them, the compiler would keep unpacked numbers and comparisons of pass 1.
        out_pairs = (out_ptr + row * stride_out_t).to(tl.pointer_type(tl.int32)) + offs
        g_target = -g * expm1(lp)
        at_target += zero
        for i in tl.static_range(KEPT):
            d = gradient_pairs(kept[i] ^ zero, at_target - 2 * i * BLOCK, lse, g, g_target)
            tl.store(out_pairs + i * BLOCK, d, eviction_policy="evict_first")
        for start in tl.range(KEPT * BLOCK, n_pairs, BLOCK, num_stages=STAGES):
            in_row = offs < n_pairs - start
            pairs = tl.load(pairs_ptr + start, mask=in_row, other=0, eviction_policy="evict_first")
            d = gradient_pairs(pairs, at_target - 2 * start, lse, g, g_target)
            tl.store(out_pairs + start, d, mask=in_row, eviction_policy="evict_first")


class KeptRows(NamedTuple):
    """Sizes of `kept_rows_kernel`.

    Attributes:
        block: number of pairs of logits that a program processes at a time.
        num_warps: warps of a program.
        kept: number of blocks of a row that stay in registers.
        stages: number of blocks of the rest whose loads are in flight, plus one.
        given: whether `target logit - old logp` replaces the running maximum.
    """

    block: int
    num_warps: int
    kept: int
    stages: int
    given: bool


def kept_row_loss_(
    sizes: KeptRows,
    rows: LogitRows,
    out: Tensor,  # (C, V)
    terms: RowInputs,
    config: LossConfig,
    *,
    return_entropy: bool,
) -> RowLoss:
    """Compute the loss of every row and its gradient, as `row_loss_` does.

    The logits are bf16 and contiguous, with an even number of columns. Every row must have a valid
    target, and with `given` an old logp near the new one. A KL, entropies, and a transform of the
    logits are not supported.
    """
    logits, target_ids, transform, _ = rows
    assert transform == (1.0, None, 1.0) and not return_entropy and terms.kl_weights is None
    vocab = logits.shape[1]
    assert vocab >= 2 * sizes.block * sizes.kept  # the kept blocks are loaded without a mask
    assert all(x % 2 == 0 for x in (vocab, logits.stride(0), out.stride(0)))
    lse, logps, losses, grad_logps = (
        torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(4)
    )
    numbers, constants = loss_arguments(config)
    launch(
        kept_rows_kernel, min(len(logits), multiprocessors(logits.device)), logits, out, target_ids,
        terms.advantages, terms.policy_weights, terms.old_logps, lse, logps, losses, grad_logps,
        *logits.shape, logits.stride(0), out.stride(0), *numbers[:4], 0,
        OBJECTIVE=constants["OBJECTIVE"], N_PARAMS=constants["N_PARAMS"], BLOCK=sizes.block,
        KEPT=sizes.kept, GIVEN=sizes.given, STAGES=sizes.stages, num_warps=sizes.num_warps,
    )  # fmt: skip
    return RowLoss(lse, logps, None, losses, grad_logps)


Candidate = RowConfig | KeptRows | str

ROWS, VOCAB = 8192, 151936
QUACK = "quack.cross_entropy"
# Block, warps and programs per multiprocessor. On 132 multiprocessors, 132 rows of 16-bit logits
# take 40 MB. The L2 cache has 50 MB, but on an H100 in two parts of 25 MB, so the second read of a
# row may miss. With 32 warps, Triton 3.6
# spills 6 registers at 8192 columns on sm_90.
# KeptRows keeps 38% of a row in registers with 14 blocks, and 43% with 16. With 16 blocks, Triton
# 3.6 spills 4 registers.
CANDIDATES: list[Candidate] = [
    RowConfig(16384, 32, 1, "evict_first"),
    RowConfig(8192, 16, 1, "evict_first"),
    KeptRows(2048, 16, kept=0, stages=6, given=False),
    KeptRows(2048, 16, kept=14, stages=4, given=False),
    KeptRows(2048, 16, kept=16, stages=4, given=True),
    QUACK,
]
# Maximum difference of the logps in nats. Two configurations differ only by rounding.
AGREEMENT = 2e-4
ROUNDING = 2**-7  # relative difference of two bf16 gradients


def line_of(config: Candidate) -> str:
    """Return a candidate as source code."""
    return config if isinstance(config, str) else f"{type(config).__name__}{tuple(config)}"


def call_of(count: int, vocab: int, device: str) -> tuple[Callable[[], Tensor], Tensor]:
    """Return a function that calls the row kernel as the loss does, and the d-logits it writes.

    The function returns the logps (N,).
    """
    torch.manual_seed(0)
    logits = torch.randn(count, vocab, device=device).bfloat16()
    targets = torch.randint(vocab, (count,), device=device)
    d_logits, v = torch.empty_like(logits), torch.ones(count, device=device)
    terms, config = RowInputs(v, v, old_logps=-12 * v), LossConfig(loss_type="dapo")
    p = LogitRows(logits, targets, LogitTransform())
    return lambda: rows.row_loss_(p, d_logits, terms, config, return_entropy=False).logps, d_logits


def quack_row_loss_(rows: LogitRows, out: Tensor, *unused: object, return_entropy: bool) -> RowLoss:
    """Compute a cross entropy and its gradient with QuACK, in place of a GRPO loss.

    A cluster of blocks keeps a row in shared memory, so a row is read once and written once. A GRPO
    loss would have the same traffic. The signature is that of version 0.6.4.
    """
    from quack.cross_entropy import cross_entropy_fwd_out

    loss, lse = (torch.empty(len(out), device=out.device) for _ in range(2))
    cross_entropy_fwd_out(rows.logits, rows.target_ids, None, loss, lse, out, None)
    return RowLoss(lse, -loss, None, loss, loss)


def call_with(config: Candidate, call: Callable[[], Tensor]) -> Tensor:
    """Call the row kernel with a configuration, or another kernel in its place."""
    patch: Any
    if isinstance(config, RowConfig):
        patch = mock.patch.object(rows, "row_config", lambda vocab: config)
    else:
        kernel = quack_row_loss_ if isinstance(config, str) else partial(kept_row_loss_, config)
        patch = mock.patch.object(rows, "row_loss_", kernel)
    with patch:
        return call()


def failure_of(
    config: Candidate, call: Callable[[], Tensor], d_logits: Tensor, expected: tuple[Tensor, Tensor]
) -> str:
    """Return why a candidate is not timed, or an empty string if its results are right.

    The gradient of QuACK's cross entropy is not that of the loss, so only its logps are compared.
    """
    d_logits.zero_()
    try:
        is_right = bool((call_with(config, call) - expected[0]).abs().max() <= AGREEMENT)
        if is_right and config != QUACK:
            is_right = torch.allclose(d_logits, expected[1], rtol=ROUNDING, atol=1e-6)
    except Exception as error:  # the GPU may refuse one candidate; time the other candidates
        return f"{type(error).__name__}: {str(error)[:120]}"
    return "" if is_right else "wrong: not timed"


def main(arguments: list[str]) -> int:
    options = measuring(__doc__, arguments)
    if options.device == "cpu":
        print(*map(line_of, CANDIDATES), sep="\n")
        return 0
    report = measure.header("row candidates", "cuda") | {"cases": [], "row_candidates": {}}
    call, d_logits = call_of(ROWS, VOCAB, "cuda")
    expected = call(), d_logits.clone()
    for config in CANDIDATES:
        reason = failure_of(config, call, d_logits, expected)
        found: dict[str, Any] = {"reason": reason}
        if not reason:
            candidate = partial(call_with, config, call)
            steps: dict[str, Callable[[], Any]] = {"shipped": call, "candidate": candidate}
            times = measure.interleaved(steps, "cuda", budget=0.5, rounds=25)
            found = {name: row["median_ms"] for name, row in times.items()}
        print(f"{line_of(config)}: {found}", flush=True)
        report["row_candidates"][line_of(config)] = found
        if options.out:  # after each candidate, because the session ends the command at its limit
            measure.write(options.out, report)
        if "CUDA error" in reason:  # every later call in this process would fail, too
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
