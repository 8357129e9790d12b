"""Predict the times for which bars.py sets thresholds, for one GPU, from bytes and flops.

`python -m benchmarks.gpu.report` shows these predictions next to the measured times.

The operations are counted from grpo_fast/kernels/head/loop.py and chunks.py and kernels/gpu/, for
Triton and 16-bit inputs. Matrix products are assumed to run at the vendor library's rate, and
memory traffic at the rate of a copy. Our own GEMM kernel runs at an assumed fraction of the
vendor's rate. The time for the bytes that the epilogue of a GEMM moves is added in full. If these
transfers overlap with the product, the kernel is faster.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from benchmarks.kernels.shapes import MODELS, Shape, name_of
from grpo_fast.kernels.gpu.configs import SLICE_COLUMNS
from grpo_fast.kernels.head.chunks import TARGET_SHARE
from grpo_fast.kernels.head.gradients import GATHER_BELOW
from grpo_fast.kernels.types import ROW_MULTIPLE, padded
from grpo_fast.kernels.workspace import GPU_SHARE


class Card(NamedTuple):
    """Limits of a GPU, as seen on lent machines.

    Attributes:
        gemm_flops: rate of a bf16 product of random data, in flop/s.
        copy_bytes: rate of a device copy, reads plus writes, in bytes/s.
        memory: bytes.
    """

    gemm_flops: float
    copy_bytes: float
    memory: int

    @property
    def workspace_bytes(self) -> int:
        """Return the package's default workspace size for this card, in bytes (whole MiB)."""
        return self.memory // GPU_SHARE >> 20 << 20


CARDS = {"H100": Card(798e12, 3.0e12, 78 << 30), "H200": Card(785e12, 4.3e12, 139 << 30)}
TRITON_GEMM = 0.9  # assumed rate of slice_kernel's inner loop / rate of the vendor library
START = 3e-6  # assumed seconds between the start of a program and its first matrix product
PROCESSORS, TILE = 132, (128, 256)  # one program at a time on each multiprocessor
# Seconds between two tiles, if nothing overlaps: 8 warps on 4 schedulers at 1.755 GHz. A thread
# executes 1030 instructions in a tile without target columns, and 2060 in a tile with target
# columns (19% of the tiles). With stored exponentials, these counts are 1320 and 2660. They were
# read from the SASS.
EPILOGUE, EPILOGUE_STORE = 1.40e-6, 1.79e-6
# Bytes per stored logit. The epilogue of the forward GEMM writes exponentials in 16 bits.
STORED = 2
MIB = 2**20
# Assumed rates of the products over live tiles (live_tiles.py), relative to the vendor library's
# rate. The tiles of dW are 64 x 256, so they read 1/51 byte per flop from L2.
LIVE_HIDDEN, LIVE_WEIGHT = 0.85, 0.6
LIVE_OPERATIONS = 30  # number of small launches that compute the masses and both lists of tiles
# Fraction of live tiles for each tolerance, counted on a CPU for 1024 rows of the problem in
# sparse.py.
LIVE_SHARES = {0.1: 0.04, 0.01: 0.22, 0.001: 0.58}


class Case(NamedTuple):
    """Shape and inactive rows of a benchmark case."""

    operation: str
    shape: Shape
    active: float = 1.0
    inactive: str = "masked"


class Estimate(NamedTuple):
    """Prediction of one case.

    Attributes:
        limit: seconds of the limit, such as the three bare GEMMs.
        ours: seconds of grpo_fast.
        workspace: peak bytes, without inputs and gradients.
        parts: seconds of grpo_fast by part of the call.
    """

    limit: float
    ours: float
    workspace: float
    parts: dict[str, float]


def cases() -> list[Case]:
    """Return the cases that have a bar (bars.py), followed by the cases of other models."""
    loss = "linear_grpo_loss"
    small, middle, large = (
        Shape(8192, *MODELS[name]) for name in ("qwen2.5-0.5b", "qwen3-1.7b", "qwen3-8b")
    )
    found = [Case(loss, shape) for shape in (large, middle, small)]
    found += [Case(loss, small._replace(n=1024)), Case(loss, large._replace(n=131072))]
    # Include clipped rows, whose gradient is 0. The matrix products still multiply these zeros,
    # because skipping the rows would cost a GPU sync per chunk.
    reasons = ("masked", "zero-advantage", "clipped")
    found += [Case(loss, large, 0.2, inactive) for inactive in reasons]
    found += [Case("linear_logps", shape) for shape in (large, middle, small)]
    found += [Case("linear_logps_backward", shape) for shape in (large, small)]
    logits = Shape(8192, 64, 151936)
    found += [Case(name, logits) for name in ("logits_grpo_loss_inplace", "logits_grpo_loss")]
    others = ("qwen2.5-1.5b", "qwen2.5-7b", "llama-3-8b", "gemma-3-4b")
    return found + [Case(loss, Shape(8192, *MODELS[name])) for name in others]


def estimate(card: Card, case: Case) -> Estimate:
    n, h, v = case.shape
    if case.operation.startswith("logits"):
        return logits_loss(card, n, v)
    if case.operation == "linear_logps":
        seconds = slices(card, n, h, v)
        partial = 3 * 4 * n * -(-v // SLICE_COLUMNS)
        return Estimate(gemm(card, n, h, v), seconds, partial, {"slice_kernel": seconds})
    # Masked rows never reach the head. Rows with advantage 0 leave it after the logps. The
    # advantages of a completion are all 0 or all nonzero, so at least one of the eight completions
    # stays active.
    share = 1.0 if case.inactive == "clipped" else case.active
    if case.inactive == "zero-advantage":
        share = max(1, round(8 * case.active)) / 8
    kept = round(n * share)
    parts, workspace = sweep(card, kept if case.inactive == "masked" else n, kept, case.shape)
    if case.operation == "linear_logps_backward" and chunk_plan(card, n, h, v)[0] > 1:
        parts["slice_kernel, forward"] = slices(card, n, h, v)
    return Estimate(3 * gemm(card, n, h, v), sum(parts.values()), workspace, parts)


def sweep(card: Card, rows: int, kept: int, shape: Shape) -> tuple[dict[str, float], float]:
    """Predict one pass over the LM head, in which `kept` of the `rows` rows have a gradient.

    Returns:
        The seconds of each part, and the bytes of the workspace.
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
    # Add the memory for the slice sums of a chunk's exponentials and for its scaled hidden rows. A
    # 16-bit dW also needs the columns of the targets and their products (target_rows.py). An fp32
    # dW is itself workspace.
    extra = (12 * -(-v // SLICE_COLUMNS) + 6 * h) * chunk_rows
    extra += 2 * chunk_rows**2 if narrow else 4 * v * h
    return parts, STORED * chunk_rows * v + extra


def live_tiles(card: Card, shape: Shape, live: float) -> dict[str, float]:
    """Return the seconds of each part of a call whose gradients use live tiles only.

    The call has one chunk. `live` is the fraction of live tiles, which are the tiles that the
    gradient GEMMs do not skip.
    """
    n, h, v = shape
    sums = 4 * n * -(-v // 64)  # bytes of the sums of each row and tile
    product = gemm(card, n, h, v)
    return {
        "forward GEMM and its stores": forward(card, n, n, h, v) + sums / card.copy_bytes,
        "masses and lists": 10 * sums / card.copy_bytes + LIVE_OPERATIONS * START,
        "dH": live * product / LIVE_HIDDEN,
        "dW and its zeros": live * product / LIVE_WEIGHT + 2 * v * h / card.copy_bytes,
        "rows of dH, hidden and targets": 22 * n * h / card.copy_bytes,
    }


def chunk_plan(card: Card, rows: int, h: int, v: int) -> tuple[int, int]:
    """Return (number of chunks, rows of a chunk) as the chunk loop plans them when dW is needed."""
    if rows <= TARGET_SHARE * v and rows * STORED * v <= card.workspace_bytes + 4 * v * h:
        return 1, padded(rows)
    most = max(card.workspace_bytes // (STORED * v), 1)
    chunks = -(-rows // most)
    return chunks, max(padded(-(-rows // chunks)), ROW_MULTIPLE)


def gemm(card: Card, n: int, h: int, v: int) -> float:
    return 2 * n * h * v / card.gemm_flops


def slices(card: Card, n: int, h: int, v: int, epilogue: float = EPILOGUE) -> float:
    """Return the seconds of `slice_kernel` on all multiprocessors.

    A program computes one block of rows for one slice of columns. When a program ends, its
    multiprocessor starts the next one.
    """
    rows, width = TILE
    tile = gemm(card, rows, h, width) * PROCESSORS / TRITON_GEMM + epilogue
    free = [0.0] * PROCESSORS
    for first in range(0, v, SLICE_COLUMNS):
        seconds = START + -(-min(SLICE_COLUMNS, v - first) // width) * tile
        for _ in range(-(-n // rows)):
            heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def forward(card: Card, rows: int, chunk_rows: int, h: int, v: int) -> float:
    """Return the seconds of `slice_kernel` with stored exponentials, over all chunks."""
    full, rest = divmod(rows, chunk_rows)
    seconds = full * slices(card, chunk_rows, h, v, EPILOGUE_STORE)
    return seconds + (slices(card, rest, h, v, EPILOGUE_STORE) if rest else 0.0)


def logits_loss(card: Card, n: int, v: int) -> Estimate:
    """Predict the row kernel: it reads the logits twice and writes them once.

    The second read misses the L2, because 8 rows are in flight on every multiprocessor.
    """
    once = 2 * n * v / card.copy_bytes
    names = ("first read", "second read past the L2", "write")
    parts = {f"row_loss_kernel, {name}": once for name in names}
    return Estimate(2 * once, sum(parts.values()), 0.0, parts)


def command(case: Case) -> str:
    """Return the command that measures a case."""
    n, h, v = case.shape
    models = [name for name in name_of(case.shape).split(", ") if name]
    where = f"--model {models[0]} --tokens {n}" if models else f"--shapes {n},{h},{v}"
    rows = f" --active {case.active:g} --inactive {case.inactive}" if case.active < 1 else ""
    return f"python -m benchmarks {case.operation} --device cuda {where}{rows}"


def label(case: Case) -> str:
    rows = "" if case.active == 1 else f", {case.active:g} active ({case.inactive})"
    return f"{case.operation} {','.join(map(str, case.shape))}{rows}"


def largest(parts: dict[str, float], count: int = 3) -> str:
    """Return the parts of a call that take the most time, with their milliseconds."""
    order = sorted(parts, key=lambda name: -parts[name])[:count]
    return ", ".join(f"{name} {parts[name] * 1e3:.1f}" for name in order)
