"""Kernel configurations that may be faster than the shipped ones.

On a GPU, tune.py times the candidates whose registers do not spill.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

if TYPE_CHECKING:  # these modules import triton
    from grpo_fast.kernels.gpu.linear import LinearConfig
    from grpo_fast.kernels.gpu.rows import RowConfig

ROWS = 64
# Rows, columns and depth of a tile. Without multicast, a tile of R x C reads (R + C)/(R·C) bytes
# per flop from L2. At 785 TFLOP/s, this is 9 TB/s for 128 x 256, 12 TB/s for 128 x 128 and 15 TB/s
# for 64 x 256. For smaller tiles, L2 would be the bottleneck.
TILES = [(128, 256, 64), (256, 128, 64), (128, 128, 64), (64, 256, 64)]
# Block, warps and programs per multiprocessor of the row kernels that stride over rows. On 132
# multiprocessors, 132 rows of 151936 16-bit logits take 40 MB, so the second read of a row hits an
# L2 cache of 50 MB. With 32 warps, Triton 3.6 spills 6 registers at 8192 columns on sm_90.
PERSISTENT = ((16384, 32, 1), (8192, 16, 1), (4096, 16, 1), (4096, 16, 2))
KINDS = ("exponentials", "linear", "linear store")


class Candidate(NamedTuple):
    """Configuration of one kernel at one dtype.

    Attributes:
        kind: "rows" (the loss kernel), "linear" (no gradient), "linear store" (also stores fp32
            logits) or "exponentials" (stores 16-bit exponentials).
        dtype: name of the torch dtype of the inputs.
        config: the configuration.
    """

    kind: str
    dtype: str
    config: RowConfig | LinearConfig

    @property
    def line(self) -> str:
        """Return the configuration as source code for the tables of the kernels."""
        return f"{type(self.config).__name__}{tuple(self.config)}"


def candidates() -> list[Candidate]:
    """Return the candidates for sm_90 that fit into its registers and its shared memory."""
    from grpo_fast.kernels.gpu.linear import LinearConfig
    from grpo_fast.kernels.gpu.rows import RowConfig

    found = [
        Candidate("rows", dtype, RowConfig(block_v, warps))
        for dtype in ("float32", "bfloat16")
        for block_v, warps in itertools.product((1024, 2048, 4096, 8192), (4, 8, 16, 32))
        if 4 <= block_v // (32 * warps) <= 32
    ]
    found += [
        Candidate("rows", "bfloat16", RowConfig(*sizes, "evict_first")) for sizes in PERSISTENT
    ]
    options = itertools.product(KINDS, TILES, (3, 4), (False, True))
    for kind, (block_t, block_v, block_h), stages, flatten in options:
        if (block_t + block_v) * block_h * 2 * stages <= 228 * 1024:
            # The epilogue processes 32 columns at a time. Larger pieces make registers spill.
            config = LinearConfig(block_t, block_v, block_h, 8, stages, 32, True, flatten)
            found.append(Candidate(kind, "bfloat16", config))
    return found


@contextlib.contextmanager
def using(candidate: Candidate) -> Iterator[None]:
    """Make the kernels use the configuration of a candidate in a `with` block."""
    from grpo_fast.kernels.gpu import linear, rows

    def chosen(*args: Any, **options: Any) -> RowConfig | LinearConfig:
        return candidate.config

    with (
        mock.patch.object(rows, "row_config", chosen),
        mock.patch.object(linear, "linear_config", chosen),
    ):
        yield


def call_of(
    kind: str, dtype_name: str, rows: int, hidden: int, vocab: int, device: str
) -> Callable[[], list[Tensor]]:
    """Return a function that calls the kernel of a candidate in the same way as the loss.

    Args:
        kind: kind of the candidate.
        dtype_name: name of the torch dtype of the inputs.
        rows: number of tokens.
        hidden: hidden size.
        vocab: vocabulary size.
        device: a GPU, or "cpu" to compile without a GPU.

    Returns:
        The function. It returns the logps, and for "exponentials" also the stored matrix.
    """
    from grpo_fast.kernels.gpu import exponentials, linear
    from grpo_fast.kernels.gpu.rows import row_loss_
    from grpo_fast.kernels.types import LogitTransform
    from grpo_fast.objective.coefficients import RowTerms
    from grpo_fast.objective.config import LossConfig

    dtype, rule = getattr(torch, dtype_name), LogitTransform(1.0, None, 1.0)
    targets = torch.randint(vocab, (rows,), device=device)
    if kind == "rows":
        logits = torch.randn(rows, vocab, device=device).to(dtype)
        d_logits, v = torch.empty_like(logits), torch.ones(rows, device=device)
        terms, config = RowTerms(v, v, old_logps=v), LossConfig(loss_type="dapo")
        arguments = (logits, d_logits, targets, terms, config, rule)
        return lambda: [row_loss_(*arguments, return_entropy=False).logps]
    # Scale the logits to a standard deviation of 2. With larger logits, most targets would be so
    # unlikely that the kernel computes their rows twice. This rarely happens in training.
    states, weight = (torch.randn(n, hidden, device=device).to(dtype) for n in (rows, vocab))
    weight *= 2 / hidden**0.5
    head = (states, weight, None, targets, rule)
    if kind == "exponentials":
        matrix = states.new_empty(rows, vocab)
        return lambda: [exponentials.head_exponentials(*head, matrix).stats[1], matrix]
    out = torch.empty(rows, vocab, device=device) if kind == "linear store" else None
    return lambda: [linear.head_logps(*head, return_entropy=False, logits_out=out)[1]]


def compile_all(arch: str, chosen: list[Candidate]) -> list[dict[str, Any]]:
    """Compile every candidate for `arch`, and print whether it can be launched.

    The compiled kernels stay in Triton's cache.

    Returns:
        The registers, spills and shared memory of each candidate.
    """
    found = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        entries = pool.map(compile_one, itertools.repeat(arch), chosen)
        for candidate, entry in zip(chosen, entries, strict=True):
            found.append(entry)
            numbers = {name: entry.get(name) for name in ("registers", "spills", "shared")}
            words = f"{'starts' if entry['starts'] else 'dropped'}: {entry.get('reason', numbers)}"
            print(f"{arch} {candidate.kind} {candidate.dtype} {candidate.line} {words}", flush=True)
    return found


def compile_one(arch: str, candidate: Candidate) -> dict[str, Any]:
    """Compile one candidate, and return its entry of the report.

    Call this in a separate process, because the fake driver stays active.
    """
    from benchmarks.gpu.fake_driver import compile_launches
    from benchmarks.gpu.resources import SHARED_LIMIT, resources

    entry: dict[str, Any] = {**candidate._asdict(), "starts": False}
    try:
        with using(candidate), compile_launches(arch) as compiled:
            call_of(*candidate[:2], ROWS, 896, 32000, "cpu")()
        counted = ("slice_kernel", "row_loss_kernel")
        costs = [resources(kernel) for name, kernel in compiled if name in counted]
        for field in ("registers", "spills", "shared"):
            entry[field] = max(getattr(cost, field) for cost in costs)
        entry["matrix"] = min(c.matrix for c in costs)
        entry["starts"] = entry["spills"] == 0 and entry["shared"] <= SHARED_LIMIT[arch]
        entry["starts"] &= candidate.kind == "rows" or entry["matrix"] > 0
    except Exception as error:  # the compiler raises many types; list the candidate as failed
        first = str(error).splitlines()[0][:160] if str(error) else ""
        entry["reason"] = f"{type(error).__name__}: {first}"
    return entry
