"""Predicted times and memory of the calls for which bars.py sets thresholds, on one GPU.

`python -m benchmarks.gpu.report` shows these predictions next to the measured values.

The flops and bytes are counted by hand from the code in grpo_fast/kernels/head/ and kernels/gpu/,
for Triton and 16-bit inputs. Matrix products are assumed to run at the rate of the vendor's
library, and memory traffic at the rate of a copy. Our own GEMM kernel adds an epilogue, whose time
was fitted to the kernels measured on an H100. A call takes at least the time of the host.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from benchmarks.kernels.shapes import MODELS, Shape, name_of
from grpo_fast.kernels.gpu.launch import SLICE_COLUMNS
from grpo_fast.kernels.head.sources import TARGET_SHARE
from grpo_fast.kernels.head.sums import GATHER_BELOW
from grpo_fast.kernels.types import ROW_MULTIPLE, padded
from grpo_fast.kernels.workspace import GPU_SHARE


class Card(NamedTuple):
    """Measured limits of a GPU.

    Attributes:
        gemm_flops: rate of a bf16 matrix product of random data, in flop/s.
        copy_bytes: rate of a copy on the device, reads plus writes, in bytes/s.
        memory: size of the memory in bytes.
        l2: size of the L2 cache in bytes.
    """

    gemm_flops: float
    copy_bytes: float
    memory: int
    l2: float

    @property
    def workspace_bytes(self) -> int:
        """Return the package's default workspace size for this card, in bytes (whole MiB)."""
        return self.memory // GPU_SHARE >> 20 << 20


CARDS = {
    "H100": Card(798e12, 3.0e12, 78 << 30, 50e6),
    "H200": Card(785e12, 4.3e12, 139 << 30, 60e6),
}
START = 3e-6  # assumed seconds between the start of a program and its first matrix product
PROCESSORS, TILE = 132, (128, 256)  # one program at a time on each multiprocessor
# Seconds by which the epilogue lengthens a tile, without and with stored exponentials. Fitted to
# slice_kernel on an H100 at H = 896: 1.08 and 1.18 times the GEMM (LOG.md, 2026-11-26). The fit
# gives 1.02 (without) and 1.04 (with) at H = 4096, where 1.02 and 1.08 were measured.
EPILOGUE, EPILOGUE_STORE = 0.40e-6, 1.38e-6
# Seconds that the host needs for a call. At N = 1024, an H100 machine took 3.2 ms for the loss and
# 1.0 ms for linear_logps. Later changes multiplied these times by about 0.8 (LOG.md, 2026-11-28).
HOST = {"linear_grpo_loss": 2.5e-3, "linear_logps": 0.8e-3}
# Assumed seconds in which a program of the row kernel loads and reduces a block of columns, in the
# first pass from memory, and in the second pass from L2.
ROW_BLOCK, ROW_BLOCK_L2 = 1.0e-6, 0.5e-6
# Bytes of a stored exponential. The epilogue of the forward GEMM writes 16 bits per logit.
STORED = 2
MIB = 2**20


class Case(NamedTuple):
    """Operation, shape and active rows of a benchmark case, as in `Variant` of problem.py."""

    operation: str
    shape: Shape
    active: float = 1.0
    inactive: str = "masked"


class Estimate(NamedTuple):
    """Prediction for one case.

    Attributes:
        limit: time of the limit in seconds. It is one bare GEMM, three GEMMs or a copy.
        ours: time of grpo_fast in seconds.
        workspace: peak memory in bytes, without inputs and gradients.
        parts: time of each part of grpo_fast's call in seconds.
    """

    limit: float
    ours: float
    workspace: float
    parts: dict[str, float]


def cases() -> list[Case]:
    """Return the cases of the report: those for which bars.py has a threshold, and a few more."""
    loss = "linear_grpo_loss"
    small, middle, large = (
        Shape(8192, *MODELS[name]) for name in ("qwen2.5-0.5b", "qwen3-1.7b", "qwen3-8b")
    )
    shapes = large, middle, small, small._replace(n=1024), large._replace(n=131072)
    found = [Case(loss, shape) for shape in shapes]
    # Include clipped rows, which have a gradient of 0. The matrix products still multiply these
    # zeros, because skipping the rows would cost a GPU sync in every chunk.
    reasons = ("masked", "zero-advantage", "clipped")
    found += [Case(loss, large, 0.2, inactive) for inactive in reasons]
    found += [Case("linear_logps", shape) for shape in (large, middle, small)]
    found += [Case("linear_logps_backward", shape) for shape in (large, small)]
    logits = Shape(8192, 64, 151936)
    found += [Case("linear_grpo_loss_frozen", shape) for shape in (large, middle, small)]
    return found + [Case(f"logits_grpo_loss{end}", logits) for end in ("_inplace", "")]


def estimate(card: Card, case: Case) -> Estimate:
    n, h, v = case.shape
    if case.operation.startswith("logits"):
        return logits_loss(card, n, v)
    if case.operation == "linear_logps":
        seconds = max(slices(card, n, h, v), HOST["linear_logps"])
        partial = 3 * 4 * n * -(-v // SLICE_COLUMNS)
        return Estimate(gemm(card, n, h, v), seconds, partial, {"slice_kernel": seconds})
    # Masked rows never reach the head. Rows with advantage 0 are dropped once their logps are
    # computed. All tokens of a completion have the same advantage, so at least one of the eight
    # completions stays active.
    share = 1.0 if case.inactive == "clipped" else case.active
    if case.inactive == "zero-advantage":
        share = max(1, round(8 * case.active)) / 8
    kept = round(n * share)
    parts, workspace = sweep(card, kept if case.inactive == "masked" else n, kept, case.shape)
    if case.operation == "linear_logps_backward" and chunk_plan(card, n, h, v)[0] > 1:
        parts["slice_kernel, forward"] = slices(card, n, h, v)
    products = 3
    if case.operation == "linear_grpo_loss_frozen":
        products = 2
        parts = {name: seconds for name, seconds in parts.items() if not name.startswith("dW")}
        parts["dH product"] = parts.pop("dH and dW products") / 2
        workspace -= 2 * kept**2  # without dW, no target columns are stored
    seconds = max(sum(parts.values()), HOST["linear_grpo_loss"])
    return Estimate(products * gemm(card, n, h, v), seconds, workspace, parts)


def sweep(card: Card, rows: int, kept: int, shape: Shape) -> tuple[dict[str, float], float]:
    """Predict a pass over the LM head with `rows` rows, of which `kept` rows have a gradient.

    Returns:
        The time of each part in seconds, and the size of the workspace in bytes.
    """
    n, h, v = shape
    chunks, chunk_rows = chunk_plan(card, rows, h, v)
    narrow = chunks == 1 and rows <= TARGET_SHARE * v  # the product writes dW in 16 bits
    stored = STORED * v / card.copy_bytes  # seconds to write or read a row
    gathers = kept < GATHER_BELOW * rows
    parts = {
        "forward GEMM and its stores": max(forward(card, rows, chunk_rows, h, v), stored * rows),
        "gather of the active rows": 2 * stored * kept if gathers else 0.0,
        "dH and dW products": 2 * gemm(card, kept, h, v),
        "rows of dH, hidden and targets": (4 * rows + 18 * kept) * h / card.copy_bytes,
        "dW accumulated in fp32": 0 if narrow else (4 + 8 * (chunks - 1)) * v * h / card.copy_bytes,
        "dW to 16 bits": (2 if narrow else 6) * v * h / card.copy_bytes,
    }
    # Add three buffers: the sums over slices, the scaled hidden rows and the gathered rows. Then
    # add the fp32 buffer of dW. A 16-bit dW has no such buffer, but it needs the target columns
    # and their products (target_rows.py).
    multiplied = min(kept, chunk_rows) if gathers else chunk_rows
    extra = 12 * -(-v // SLICE_COLUMNS) * chunk_rows + 6 * h * multiplied
    extra += STORED * v * multiplied if gathers else 0
    extra += 2 * multiplied**2 if narrow else 4 * v * h
    return parts, STORED * chunk_rows * v + extra


def chunk_plan(card: Card, rows: int, h: int, v: int) -> tuple[int, int]:
    """Return the number of chunks and the rows per chunk of a chunk loop that computes dW."""
    if rows <= TARGET_SHARE * v and rows * STORED * v <= card.workspace_bytes + 4 * v * h:
        return 1, padded(rows)
    most = max(card.workspace_bytes // (STORED * v), 1)
    chunks = -(-rows // most)
    return chunks, max(padded(-(-rows // chunks)), ROW_MULTIPLE)


def gemm(card: Card, n: int, h: int, v: int) -> float:
    return 2 * n * h * v / card.gemm_flops


def slices(card: Card, n: int, h: int, v: int, epilogue: float = EPILOGUE) -> float:
    """Return the time of `slice_kernel` on all multiprocessors, in seconds.

    A program computes one block of rows for one slice of columns. When it ends, its multiprocessor
    starts the next program.
    """
    rows, width = TILE
    tile = gemm(card, rows, h, width) * PROCESSORS + epilogue
    free = [0.0] * PROCESSORS
    for first in range(0, v, SLICE_COLUMNS):
        seconds = START + -(-min(SLICE_COLUMNS, v - first) // width) * tile
        for _ in range(-(-n // rows)):
            heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def forward(card: Card, rows: int, chunk_rows: int, h: int, v: int) -> float:
    """Return the time of `slice_kernel` for all chunks, with stored exponentials, in seconds."""
    full, rest = divmod(rows, chunk_rows)
    seconds = full * slices(card, chunk_rows, h, v, EPILOGUE_STORE)
    return seconds + (slices(card, rest, h, v, EPILOGUE_STORE) if rest else 0.0)


def logits_loss(card: Card, n: int, v: int) -> Estimate:
    """Predict the time of the row kernel, which reads the logits twice and writes them once.

    The second read does not hit the L2 cache, because 8 rows are in flight on every multiprocessor.
    """
    once = 2 * n * v / card.copy_bytes
    names = ("first read", "second read past the L2", "write")
    parts = {f"row_loss_kernel, {name}": once for name in names}
    return Estimate(2 * once, sum(parts.values()), 0.0, parts)


def row_candidate(card: Card, n: int, v: int, block_v: int, per_sm: int) -> float:
    """Predict the seconds of a row kernel with `per_sm` programs on each multiprocessor.

    The second read hits the L2 cache if it holds the rows of all programs. A program waits for each
    block of columns, in both passes, so few programs with small blocks are limited by latency.
    """
    programs = per_sm * PROCESSORS
    passes = 2 if programs * STORED * v <= card.l2 else 3
    blocks = -(-v // block_v) * -(-n // programs)
    latency = blocks * (ROW_BLOCK + (ROW_BLOCK_L2 if passes == 2 else ROW_BLOCK))
    return max(passes * STORED * n * v / card.copy_bytes, latency)


def command(case: Case) -> str:
    n, h, v = case.shape
    models = [name for name in name_of(case.shape).split(", ") if name]
    where = f"--model {models[0]} --tokens {n}" if models else f"--shapes {n},{h},{v}"
    rows = f" --active {case.active:g} --inactive {case.inactive}" if case.active < 1 else ""
    return f"python -m benchmarks {case.operation} --device cuda {where}{rows}"


def label(case: Case) -> str:
    rows = "" if case.active == 1 else f", {case.active:g} active ({case.inactive})"
    return f"{case.operation} {','.join(map(str, case.shape))}{rows}"


def largest(parts: dict[str, float]) -> str:
    """Return a string with the three slowest parts of a call and their times in ms."""
    slowest = heapq.nlargest(3, parts.items(), key=lambda item: item[1])
    return ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in slowest)
