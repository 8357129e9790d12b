"""Times of the candidates of the row kernel on a GPU, at (8192, 151936) in bf16.

    python -m benchmarks.gpu.row_candidates [--out FILE] [--device cpu]

The row kernel computes the loss of given logits. A `RowConfig` is a configuration of the shipped
kernel, in which programs stride over rows. `KeptRows` is another kernel (row_kernels.py), and QUACK
is the cross entropy of the library QuACK, which must be installed. The package never tunes its
kernels at run time, because a training run would then not be reproducible. If a `RowConfig` is
faster than the shipped one, copy its line into grpo_fast/kernels/gpu/rows.py by hand. On a CPU, the
command only lists the candidates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.gpu.row_kernels import KeptRows, kept_row_loss_
from benchmarks.options import measuring
from benchmarks.report.files import write
from grpo_fast.kernels.gpu import rows
from grpo_fast.kernels.gpu.rows import RowConfig
from grpo_fast.kernels.types import LogitRows, LogitTransform, RowLoss
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig

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
    terms, config = RowTerms(v, v, old_logps=-12 * v), LossConfig(loss_type="dapo")
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
            write(Path(options.out), report)
        if "CUDA error" in reason:  # every later call in this process would fail, too
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
