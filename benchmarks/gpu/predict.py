"""Expected time of every configuration of the bars on one GPU, from bytes and flops.

    python -m benchmarks.gpu.predict     a table in Markdown for each card

report.py shows these predictions next to the measured times.

The operations are counted from grpo_fast/kernels/head/loop.py and chunks.py and kernels/gpu/, for
Triton and 16-bit inputs. Matrix products run at the vendor library's rate. Memory runs at the rate
of a copy. Our own GEMM kernel runs at an assumed fraction of the vendor's rate. The bytes that the
epilogue of a GEMM moves are added in full. If they overlap with the product, the kernel is faster.
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
        workspace: bytes of logits in flight; None for the package's default.
    """

    gemm_flops: float
    copy_bytes: float
    memory: int
    workspace: int | None = None

    @property
    def workspace_bytes(self) -> int:
        return self.workspace or self.memory // GPU_SHARE >> 20 << 20


CARDS = {"H100": Card(798e12, 3.0e12, 78 << 30), "H200": Card(785e12, 4.3e12, 139 << 30)}
TRITON_GEMM = 0.9  # assumed: rate of slice_kernel's inner loop over the vendor library's
START = 3e-6  # assumed: seconds before a program's first product
PROCESSORS, TILE = 132, (128, 256)  # one program at a time on each multiprocessor
# Between two tiles, nothing overlapped: the instructions of the SASS (1030 a thread where no target
# is among the columns, 2060 for 0.19 of the tiles; 1320 and 2660 with exponentials stored), 8 warps
# on 4 schedulers of 1.755 GHz.
EPILOGUE, EPILOGUE_STORE = 1.40e-6, 1.79e-6
# Bytes per logit: exponentials in 16 bits, which the epilogue of the forward GEMM writes.
STORED = 2
MIB = 2**20
# Assumed: rates of the products over live tiles (live_tiles.py) over the vendor library's. Tiles of
# dW are 64 x 256: they read 1/51 byte per flop from L2.
LIVE_HIDDEN, LIVE_WEIGHT = 0.85, 0.6
LIVE_OPERATIONS = 30  # small ones, for the masses and both lists
# Tolerance -> share of live tiles, counted on a CPU: 1024 rows of what sparse.py is timed with.
LIVE_SHARES = {0.1: 0.04, 0.01: 0.22, 0.001: 0.58}


class Case(NamedTuple):
    """A configuration: the fields of a benchmark's case that tell it from others."""

    operation: str
    shape: Shape
    active: float = 1.0
    inactive: str = "masked"


class Estimate(NamedTuple):
    """Seconds of the limit and of ours, bytes beyond inputs and gradients, where the time goes."""

    limit: float
    ours: float
    workspace: float
    parts: dict[str, float]


def cases() -> list[Case]:
    """What has a bar (bars.py), then the other models."""
    loss = "linear_grpo_loss"
    small, middle, large = (
        Shape(8192, *MODELS[name]) for name in ("qwen2.5-0.5b", "qwen3-1.7b", "qwen3-8b")
    )
    found = [Case(loss, shape) for shape in (large, middle, small)]
    found += [Case(loss, small._replace(n=1024)), Case(loss, large._replace(n=131072))]
    # Nobody waits to see what was clipped: such rows are multiplied, as zeros.
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
    # Masked rows never reach the head; those without advantage leave it after the logps. Whole
    # completions have advantage zero: one in eight at the least is active.
    share = 1.0 if case.inactive == "clipped" else case.active
    if case.inactive == "zero-advantage":
        share = max(1, round(8 * case.active)) / 8
    kept = round(n * share)
    parts, workspace = sweep(card, kept if case.inactive == "masked" else n, kept, case.shape)
    if case.operation == "linear_logps_backward" and chunk_plan(card, n, h, v)[0] > 1:
        parts["slice_kernel, forward"] = slices(card, n, h, v)
    return Estimate(3 * gemm(card, n, h, v), sum(parts.values()), workspace, parts)


def sweep(card: Card, rows: int, kept: int, shape: Shape) -> tuple[dict[str, float], float]:
    """(seconds by part, bytes of workspace): `rows` rows, `kept` of them with a gradient."""
    n, h, v = shape
    chunks, chunk_rows = chunk_plan(card, rows, h, v)
    narrow = chunks == 1 and rows <= TARGET_SHARE * v  # dW leaves its product in 16 bits
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
    # Beside the exponentials of a chunk: their sums by slice, hidden times its coefficients, and
    # where dW has 16 bits the columns of the targets and their products (target_rows.py), else dW
    # in fp32 and dH before it is rounded.
    beside = (12 * -(-v // SLICE_COLUMNS) + 6 * h) * chunk_rows
    beside += 2 * chunk_rows**2 if narrow else 4 * v * h
    return parts, STORED * chunk_rows * v + beside


def live_tiles(card: Card, shape: Shape, live: float) -> dict[str, float]:
    """Seconds by part of a call of one chunk in which this share of the tiles is live."""
    n, h, v = shape
    sums = 4 * n * -(-v // 64)  # bytes: of each row's sums by tile
    product = gemm(card, n, h, v)
    return {
        "forward GEMM and its stores": forward(card, n, n, h, v) + sums / card.copy_bytes,
        "masses and lists": 10 * sums / card.copy_bytes + LIVE_OPERATIONS * START,
        "dH": live * product / LIVE_HIDDEN,
        "dW and its zeros": live * product / LIVE_WEIGHT + 2 * v * h / card.copy_bytes,
        "rows of dH, hidden and targets": 22 * n * h / card.copy_bytes,
    }


def chunk_plan(card: Card, rows: int, h: int, v: int) -> tuple[int, int]:
    """(chunks, rows of each) as the chunk loop cuts them, with dW wanted."""
    if rows <= TARGET_SHARE * v and rows * STORED * v <= card.workspace_bytes + 4 * v * h:
        return 1, padded(rows)
    most = max(card.workspace_bytes // (STORED * v), 1)
    chunks = -(-rows // most)
    return chunks, max(padded(-(-rows // chunks)), ROW_MULTIPLE)


def gemm(card: Card, n: int, h: int, v: int) -> float:
    return 2 * n * h * v / card.gemm_flops


def slices(
    card: Card, n: int, h: int, v: int, epilogue: float = EPILOGUE, columns: int = SLICE_COLUMNS
) -> float:
    """slice_kernel: a program takes a block of rows and a slice of columns, then the next one."""
    rows, width = TILE
    tile = gemm(card, rows, h, width) * PROCESSORS / TRITON_GEMM + epilogue
    free = [0.0] * PROCESSORS
    for first in range(0, v, columns):
        seconds = START + -(-min(columns, v - first) // width) * tile
        for _ in range(-(-n // rows)):
            heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def forward(card: Card, rows: int, chunk_rows: int, h: int, v: int) -> float:
    """`slices` with a store, over all chunks."""
    full, rest = divmod(rows, chunk_rows)
    seconds = full * slices(card, chunk_rows, h, v, EPILOGUE_STORE)
    return seconds + (slices(card, rest, h, v, EPILOGUE_STORE) if rest else 0.0)


def logits_loss(card: Card, n: int, v: int) -> Estimate:
    """One read and one write, and a second read: the rows in flight, 8 per SM, outgrow the L2."""
    once = 2 * n * v / card.copy_bytes
    names = ("first read", "second read past the L2", "write")
    parts = {f"row_loss_kernel, {name}": once for name in names}
    return Estimate(2 * once, sum(parts.values()), 0.0, parts)


def command(case: Case) -> str:
    """What measures it."""
    n, h, v = case.shape
    models = [name for name in name_of(case.shape).split(", ") if name]
    where = f"--model {models[0]} --tokens {n}" if models else f"--shapes {n},{h},{v}"
    rows = f" --active {case.active:g} --inactive {case.inactive}" if case.active < 1 else ""
    return f"python -m benchmarks {case.operation} --device cuda {where}{rows}"


def label(case: Case) -> str:
    rows = "" if case.active == 1 else f", {case.active:g} active ({case.inactive})"
    return f"{case.operation} {','.join(map(str, case.shape))}{rows}"


def largest(parts: dict[str, float], count: int = 3) -> str:
    order = sorted(parts, key=lambda name: -parts[name])[:count]
    return ", ".join(f"{name} {parts[name] * 1e3:.1f}" for name in order)


def report() -> str:
    """Return the predictions as one table for each card, with the commands that measure them."""
    lines = ["ms (× limit); workspace in MiB besides inputs and gradients."]
    for name, card in CARDS.items():
        lines += [
            "",
            f"| configuration (bf16), {name} | limit ms | predicted | where the time goes (ms) |",
            "|---|---|---|---|",
        ]
        for case in cases():
            found = estimate(card, case)
            ours = f"{found.ours * 1e3:.1f} ({found.ours / found.limit:.2f}×)"
            ours += f", {found.workspace / MIB:.0f} MiB"
            limit = f"{found.limit * 1e3:.2f}"
            lines.append(f"| {label(case)} | {limit} | {ours} | {largest(found.parts)} |")
    lines += ["", "Not measured. Commands, in the same order:", "```"]
    return "\n".join([*lines, *(command(case) for case in cases()), "```"])


if __name__ == "__main__":
    print(report())
