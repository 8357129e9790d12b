"""The expected time of every configuration of the bars on one H200, from the bytes and flops of the code.

    python -m benchmarks.predict                          the table of LOG.md
    python -m benchmarks.predict --against FILE.json      predicted beside measured, from a GPU's results

Counted from kernels/linear.py, chunks.py, linear_triton.py and rows_triton.py (Triton backend, 16-bit inputs). Matrix
products run at the vendor library's rate, our own GEMM kernel at a fraction of it that is assumed, memory at the copy's
rate; what a GEMM's own epilogue moves is added in full, so overlap can only make it faster.

Three forms of a chunk are predicted, each from the bytes per logit that it moves and holds: what the code was, might
have been, and is, so that each step can be confirmed or refuted by itself.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from typing import Any, NamedTuple

from benchmarks.shapes import MODELS, Shape, name_of
from grpo_fast.kernels.gpu.configs import SLICE_COLUMNS
from grpo_fast.kernels.head.gradients import GATHER_BELOW
from grpo_fast.kernels.types import ROW_MULTIPLE, padded

# One NVIDIA H200: measured limits of other work (../shared/design/PEERS.md), and two assumptions.
GEMM_FLOPS = 785e12  # bf16 on random data, 770-800 seen
COPY_BYTES = 4.3e12  # per second, read + write
TRITON_GEMM = 0.9  # assumed: rate of slice_kernel's inner loop over the vendor library's
START = 3e-6  # assumed: seconds before a program's first product
PROCESSORS, TILE = 132, (128, 256)  # one program at a time on each multiprocessor
# Between two tiles, nothing overlapped: the instructions of the SASS (1030 a thread where no target is among the
# columns, 2060 for 0.19 of the tiles; 1320 and 2660 with weights), 8 warps on 4 schedulers of 1.755 GHz.
EPILOGUE, EPILOGUE_STORE = 1.40e-6, 1.79e-6
CHUNK_SYNC = 40e-6  # assumed: seconds that the host needs to see which rows of a chunk are active
WORKSPACE = 1 << 30  # kernels/memory.py
MIB = 2**20


class Form(NamedTuple):
    """Bytes per logit of one way to get the gradient of a chunk of logits.

    Attributes:
        stored: written by the epilogue of the forward GEMM.
        rewritten: read and written by the row kernel, for a row with a gradient.
        converted: read and written to bring the gradient to 16 bits.
        held: of the buffers that bound the chunk's rows.
        beside: held for a while beyond those.
    """

    title: str
    stored: int
    rewritten: int
    converted: int
    held: int
    beside: int


FORMS = {
    # fp32 logits, the gradient over them, brought to 16 bits for each of its two products
    "fp32": Form("fp32 logits, rewritten", 4, 8, 12, 4, 2),
    # the row kernel writes the gradient beside them, in 16 bits, once
    "beside": Form("fp32 logits, 16-bit gradient beside", 4, 6, 0, 6, 0),
    # the epilogue writes 16-bit weights E; coefficients move to the small matrices (KERNELS.md, "a free normaliser")
    "weights": Form("16-bit weights from the epilogue", 2, 0, 0, 2, 0),
}


CURRENT = FORMS["weights"]  # what the chunk loop takes for bf16 on a GPU


class Case(NamedTuple):
    """A configuration, its bar, and the operations whose ratio the bar is about."""

    operation: str
    shape: Shape
    bar: str
    active: float = 1.0
    inactive: str = "masked"


class Estimate(NamedTuple):
    """Seconds of the limit and of ours, bytes beyond inputs and gradients, where the time goes."""

    limit: float
    ours: float
    workspace: float
    parts: dict[str, float]


def cases() -> list[Case]:
    """Section 2 of the third issue, then the other models."""
    bars = {"qwen2.5-0.5b": "<= 1.4x", "qwen3-1.7b": "<= 1.2x", "qwen3-8b": "<= 1.12x"}
    found = [Case("linear_grpo_loss", Shape(8192, *MODELS[name]), bar) for name, bar in bars.items()]
    large = MODELS["qwen3-8b"]
    found.append(Case("linear_grpo_loss", Shape(131072, *large), "workspace <= 1 GiB"))
    for inactive in ("masked", "zero-advantage", "clipped"):
        bar = ">= 2.5x faster than all rows active"
        found.append(Case("linear_grpo_loss", Shape(8192, *large), bar, 0.2, inactive))
    for name in ("qwen2.5-0.5b", "qwen3-8b"):
        found.append(Case("linear_logps", Shape(8192, *MODELS[name]), "<= 1.3x, no workspace"))
        found.append(Case("linear_logps_backward", Shape(8192, *MODELS[name]), ""))
    logits = Shape(8192, 64, 151936)
    found.append(Case("logits_grpo_loss_inplace", logits, ">= 0.8 of the copy (<= 1.25x)"))
    found.append(Case("logits_grpo_loss", logits, ""))
    others = ("qwen2.5-1.5b", "qwen2.5-7b", "llama-3-8b", "gemma-3-4b")
    return found + [Case("linear_grpo_loss", Shape(8192, *MODELS[name]), "") for name in others]


def estimate(case: Case, form: Form) -> Estimate:
    n, h, v = case.shape
    if case.operation.startswith("logits"):
        return logits_loss(n, v)
    if case.operation == "linear_logps":
        seconds = slices(n, h, v)
        partial = 3 * 4 * n * -(-v // SLICE_COLUMNS)
        return Estimate(gemm(n, h, v), seconds, partial, {"slice_kernel": seconds})
    # Masked rows never reach the head; the others are known to be inactive once their logp is. Whole completions have
    # advantage zero: one in eight at the least is active.
    share = max(1, round(8 * case.active)) / 8 if case.inactive == "zero-advantage" else case.active
    kept = round(n * share)
    parts, workspace = sweep(kept if case.inactive == "masked" else n, kept, case.shape, form)
    if case.operation == "linear_logps_backward":
        chunks, chunk_rows = chunk_plan(n, v, form)
        again = 0 if chunks == 1 else 1 if form is FORMS["weights"] else (chunks - 1) / chunks  # the last one is kept
        parts["slice_kernel, forward"] = again * slices(n, h, v)
    return Estimate(3 * gemm(n, h, v), sum(parts.values()), workspace, parts)


def sweep(rows: int, kept: int, shape: Shape, form: Form) -> tuple[dict[str, float], float]:
    """(seconds by part, bytes of workspace) of `LinearHead.loss_gradients`: `rows` rows, `kept` with a gradient."""
    n, h, v = shape
    chunks, chunk_rows = chunk_plan(rows, v, form)
    element = v / COPY_BYTES  # seconds for one byte of every logit of a row
    gathers = kept < GATHER_BELOW * rows
    # A row without a gradient is written (as zeros), not read.
    zeros = form.held * (rows - kept) * element if gathers and form.rewritten else 0.0
    parts = {
        "forward GEMM and its stores": max(forward(rows, chunk_rows, h, v), form.stored * rows * element),
        "row kernel": form.rewritten * kept * element + zeros,
        "gather of the active rows": 2 * min(form.held, 4) * kept * element if gathers else 0.0,
        "gradient to 16 bits": form.converted * kept * element,
        "dH and dW products": 2 * gemm(kept, h, v),
        "dW accumulated in fp32": (4 + 8 * (chunks - 1)) * v * h / COPY_BYTES,
        "dW to 16 bits": 6 * v * h / COPY_BYTES,
        "host waits": chunks * CHUNK_SYNC,
    }
    logits, accumulator = form.held * chunk_rows * v, 4 * v * h
    # At the end dW is there in fp32 and in the weight's dtype; before, what is held beside the chunk.
    during = form.beside * chunk_rows * v + accumulator - 2 * v * h
    return parts, logits + max(during, accumulator)


def chunk_plan(rows: int, v: int, form: Form) -> tuple[int, int]:
    """(chunks, rows of each) as `LinearHead._chunk_rows` cuts them."""
    most = max(WORKSPACE // (form.held * v), 1)
    chunks = -(-rows // most)
    return chunks, max(padded(-(-rows // chunks)), ROW_MULTIPLE)


def gemm(n: int, h: int, v: int) -> float:
    return 2 * n * h * v / GEMM_FLOPS


def slices(n: int, h: int, v: int, epilogue: float = EPILOGUE, columns: int = SLICE_COLUMNS) -> float:
    """slice_kernel: every program takes a block of rows and a slice of columns, whoever is free the next one."""
    rows, width = TILE
    tile = gemm(rows, h, width) * PROCESSORS / TRITON_GEMM + epilogue
    free = [0.0] * PROCESSORS
    for first in range(0, v, columns):
        seconds = START + -(-min(columns, v - first) // width) * tile
        for _ in range(-(-n // rows)):
            heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def forward(rows: int, chunk_rows: int, h: int, v: int) -> float:
    """`slices` with a store, over all chunks."""
    full, rest = divmod(rows, chunk_rows)
    return full * slices(chunk_rows, h, v, EPILOGUE_STORE) + (slices(rest, h, v, EPILOGUE_STORE) if rest else 0.0)


def logits_loss(n: int, v: int) -> Estimate:
    """One read and one write, and a second read: the rows in flight, 8 per SM, outgrow the L2."""
    once = 2 * n * v / COPY_BYTES
    parts = {
        "row_loss_kernel, first read": once,
        "row_loss_kernel, second read past the L2": once,
        "row_loss_kernel, write": once,
    }
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
    """The predictions as a table in Markdown, each with the command that measures it."""
    lines = [
        f"Forms: {'; '.join(f'**{name}** {form.title}' for name, form in FORMS.items())}. This checkout has "
        f"{CURRENT.title!r}. ms (× limit); workspace in MiB beyond inputs and gradients.",
        "",
        f"| configuration (bf16) | limit ms | {' | '.join(FORMS)} | bar | where the time of this checkout goes (ms) |",
        "|---|---|" + "---|" * len(FORMS) + "---|---|",
    ]
    for case in cases():
        found = {name: estimate(case, form) for name, form in FORMS.items()}
        cells = [f"{e.ours * 1e3:.1f} ({e.ours / e.limit:.2f}×), {e.workspace / MIB:.0f} MiB" for e in found.values()]
        here = estimate(case, CURRENT)
        lines.append(
            f"| {label(case)} | {here.limit * 1e3:.2f} | {' | '.join(cells)} | {case.bar} | {largest(here.parts)} |"
        )
    lines += ["", "Not measured. Commands, in the same order:", "```"]
    return "\n".join([*lines, *(command(case) for case in cases()), "```"])


def against(paths: list[str]) -> str:
    """Predicted beside measured, for the configurations that the results hold."""
    from benchmarks.reports import cases_of

    measured = {key_of(case): case for case in cases_of(paths) if case.get("allocator") == "cuda"}
    lines = [f"{'configuration':66}{'limit ms':>20}{'ours ms':>20}{'workspace MiB':>20}  (predicted / measured)"]
    for case in cases():
        found = measured.get((case.operation, tuple(case.shape), case.active, case.inactive))
        rows = found["rows"] if found else {}
        ours = rows.get("grpo_fast (auto)", {})
        limits = [row["median_ms"] for row in rows.values() if row["role"] == "limit" and "median_ms" in row]
        guess = estimate(case, CURRENT)
        pairs = [
            (guess.limit * 1e3, min(limits) if limits else None),
            (guess.ours * 1e3, ours.get("median_ms")),
            (guess.workspace / MIB, ours.get("workspace_mib")),
        ]
        cells = [f"{a:.1f} / {'not measured' if b is None else f'{b:.1f}'}" for a, b in pairs]
        lines.append(f"{label(case):66}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def key_of(case: dict[str, Any]) -> tuple:
    return case["operation"], tuple(case["shape"]), case["active"], case["inactive"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", nargs="+", metavar="FILE", help="JSON of `python -m benchmarks` or gpu_session.sh")
    options = parser.parse_args(arguments)
    try:
        print(against(options.against) if options.against else report())
    except ValueError as error:
        print(f"predict: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
