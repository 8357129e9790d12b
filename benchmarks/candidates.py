"""Kernel configurations worth trying: compiled for a GPU's architecture without one, kept when nothing spills.

    python -m benchmarks.tune --compile sm_90       writes benchmarks/results/candidates-sm_90.json

Used by tune.py, which times the survivors on a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from grpo_fast.kernels.gpu.configs import LinearConfig, RowConfig

ROOT = Path(__file__).resolve().parent.parent
ROWS = 64
# Without multicast a tile of R x C reads (R + C)/(R·C) bytes per flop from L2: 1/85 for 128 x 256, 1/64 for 128 x 128,
# 1/51 for 64 x 256. At 785 TFLOP/s these are 9, 12 and 15 TB/s: smaller tiles cannot be worth a try.
TILES = [(128, 256, 64), (256, 128, 64), (128, 128, 64), (64, 256, 64)]
KINDS = ("exponentials", "linear", "linear store")


class Candidate(NamedTuple):
    """One configuration of one kernel at one dtype.

    Attributes:
        kind: "rows" (the loss kernel), "linear" (no gradient), "linear store" (fp32 logits stored, too) or "exponentials"
            (stored in 16 bits).
        config: the fields of RowConfig or LinearConfig.
    """

    kind: str
    dtype: str
    config: tuple

    @property
    def line(self) -> str:
        """As it stands in the table of kernels/configs.py."""
        return f"{'RowConfig' if self.kind == 'rows' else 'LinearConfig'}{tuple(self.config)}"

    def make(self) -> RowConfig | LinearConfig:
        """As the kernels take it."""
        return RowConfig(*self.config) if self.kind == "rows" else LinearConfig(*self.config)


def candidates() -> list[Candidate]:
    """What may be worth a try on sm_90: columns per thread are bounded by registers, stages by shared memory."""
    found = [
        Candidate("rows", dtype, (block_v, warps))
        for dtype in ("float32", "bfloat16")
        for block_v, warps in itertools.product((1024, 2048, 4096, 8192), (4, 8, 16, 32))
        if 4 <= block_v // (32 * warps) <= 32
    ]
    for kind in KINDS:
        for (block_t, block_v, block_h), stages in itertools.product(TILES, (3, 4)):
            if (block_t + block_v) * block_h * 2 * stages <= 228 * 1024:
                found.append(Candidate(kind, "bfloat16", tile(block_t, block_v, block_h, 8, stages)))
    return found


def tile(block_t: int, block_v: int, block_h: int, num_warps: int, num_stages: int) -> tuple:
    """The fields of LinearConfig with TMA; its epilogue works in pieces of 32 columns, wider ones spill."""
    return tuple(LinearConfig(block_t, block_v, block_h, num_warps, num_stages, piece=32, use_tma=True))


@contextlib.contextmanager
def using(candidate: Candidate) -> Iterator[None]:
    """Inside, the doors of the kernels take this configuration."""
    from grpo_fast.kernels.gpu import linear as linear_triton
    from grpo_fast.kernels.gpu import rows as rows_triton

    before = rows_triton.row_config, linear_triton.linear_config
    config = candidate.make()
    rows_triton.row_config = lambda *args, **options: config  # type: ignore[assignment, return-value]
    linear_triton.linear_config = lambda *args, **options: config  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        rows_triton.row_config, linear_triton.linear_config = before


def call_of(candidate: Candidate, rows: int, hidden: int, vocab: int, device: str) -> Callable[[], Any]:
    """A call of the kernel as the engine makes it: on a device, or (on "cpu") for the compiler alone.

    It returns what the kernel's door does; for "exponentials" (lse, logps, the matrix).
    """
    from grpo_fast.kernels.gpu import linear as linear_triton
    from grpo_fast.kernels.gpu import rows as rows_triton
    from grpo_fast.kernels.types import LogitRule
    from grpo_fast.objective.coefficients import RowTerms
    from grpo_fast.objective.config import LossConfig

    dtype, rule = getattr(torch, candidate.dtype), LogitRule(1.0, None, 1.0)
    targets = torch.randint(vocab, (rows,), device=device)
    if candidate.kind == "rows":
        logits, v = torch.randn(rows, vocab, device=device).to(dtype), torch.ones(rows, device=device)
        d_logits = torch.empty_like(logits)
        config = LossConfig(loss_type="dapo")
        arguments = (targets, RowTerms(v, v, old_logps=v), config, rule)
        return lambda: rows_triton.row_loss_(logits, d_logits, *arguments, return_entropy=False)
    states, weight = (torch.randn(n, hidden, device=device).to(dtype) for n in (rows, vocab))
    if candidate.kind == "exponentials":
        from grpo_fast.kernels.gpu.exponentials import head_exponentials

        matrix = states.new_empty(rows, vocab)
        return lambda: (*head_exponentials(states, weight, None, targets, rule, matrix).stats[:2], matrix)
    out = torch.empty(rows, vocab, device=device) if candidate.kind == "linear store" else None
    return lambda: linear_triton.head_logps(states, weight, None, targets, rule, return_entropy=False, logits_out=out)


def compile_all(arch: str, chosen: list[Candidate]) -> list[dict[str, Any]]:
    """Registers, spills and shared memory of every candidate on `arch`; no GPU is needed. Minutes on two cores.

    What is compiled stays in Triton's cache, where a run on a GPU of this architecture finds it.
    """
    found = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for candidate, entry in zip(chosen, pool.map(compile_one, itertools.repeat(arch), chosen), strict=True):
            found.append(entry)
            print(f"{arch} {entry['kind']:12} {entry['dtype']:8} {candidate.line:62} {verdict(entry)}", flush=True)
    return found


def compile_one(arch: str, candidate: Candidate) -> dict[str, Any]:
    """One entry of the report. The active driver of this process is a fake one afterwards."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from triton_tools.fake_driver import compile_launches
    from triton_tools.resources import SHARED_LIMIT, resources

    entry: dict[str, Any] = {**candidate._asdict(), "starts": False}
    try:
        with using(candidate), compile_launches(arch) as compiled:
            call_of(candidate, ROWS, 896, 32000, "cpu")()
        costs = [resources(kernel) for name, kernel in compiled if name in ("slice_kernel", "row_loss_kernel")]
        entry |= {"registers": max(c.registers for c in costs), "spills": max(c.spills for c in costs)}
        entry |= {"shared": max(c.shared for c in costs), "matrix": min(c.matrix for c in costs)}
        entry["starts"] = entry["spills"] == 0 and entry["shared"] <= SHARED_LIMIT[arch]
        if candidate.kind != "rows":
            entry["starts"] &= entry["matrix"] > 0
    except Exception as error:  # the compiler refuses a tile in many ways; it is listed and left out
        entry["reason"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return entry


def verdict(entry: dict[str, Any]) -> str:
    if "reason" in entry:
        return f"does not compile: {entry['reason']}"
    numbers = f"registers {entry['registers']}, spills {entry['spills']}, shared {entry['shared']}"
    return ("starts: " if entry["starts"] else "dropped: ") + numbers
