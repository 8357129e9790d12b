"""Time kernel configurations on a GPU, and print the fastest one of each setting.

Each configuration is printed as a line of the table in grpo_fast/kernels/gpu/linear.py or rows.py.

    python -m benchmarks.gpu.tune                times the candidates that can run, on a GPU
    python -m benchmarks.gpu.tune --kind rows    times only the loss kernel for given logits
    python -m benchmarks.gpu.tune --dry          lists the candidates of each setting

The package never tunes its kernels at run time, because a training run would then not be
reproducible. Copy the printed lines into the table by hand, and commit them separately.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks import RESULTS, measure
from benchmarks.gpu.fake_driver import compile_launches
from benchmarks.gpu.resources import SHARED_LIMIT, resources
from benchmarks.options import new_parser
from benchmarks.report.files import write
from grpo_fast.kernels.gpu import exponentials, linear, rows
from grpo_fast.kernels.gpu.linear import LinearConfig
from grpo_fast.kernels.gpu.rows import RowConfig, row_loss_
from grpo_fast.kernels.types import HeadInputs, LogitTransform
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig

COMPILED_ROWS = 64  # rows with which candidates are compiled
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
    head = HeadInputs(states, weight, None, targets, rule)
    if kind == "exponentials":
        matrix = states.new_empty(rows, vocab)
        return lambda: [exponentials.head_exponentials(head, matrix).stats[1], matrix]
    out = torch.empty(rows, vocab, device=device) if kind == "linear store" else None
    return lambda: [linear.head_logps(head, return_entropy=False, logits_out=out)[1]]


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
    entry: dict[str, Any] = {**candidate._asdict(), "starts": False}
    try:
        with using(candidate), compile_launches(arch) as compiled:
            call_of(*candidate[:2], COMPILED_ROWS, 896, 32000, "cpu")()
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


# ---- times on a GPU ----
ROW_VOCABS = (151936, 32000, 128256, 262144)
LINEAR_HEADS = ((4096, 151936), (896, 151936), (2048, 151936))  # (H, V)
# Number of rows of a timed call. They form one chunk at V = 151936, as in the cases of bars.py.
# With fewer rows, the last wave of programs would use less of the GPU than in training.
ROWS = 8192
# Maximum difference of the logps in nats. Two configurations differ only by rounding.
AGREEMENT = 2e-4


class Setting(NamedTuple):
    """A kernel, with the dtype and the sizes at which its candidates are timed."""

    kind: str
    dtype: str
    hidden: int
    vocab: int


# The settings for bars.py come first, in case time runs out.
SETTINGS = [Setting(kind, "bfloat16", h, v) for kind in KINDS[:2] for h, v in LINEAR_HEADS]
SETTINGS += [
    Setting("rows", dtype, 64, vocab) for dtype in ("bfloat16", "float32") for vocab in ROW_VOCABS
]
SETTINGS += [Setting(KINDS[2], "bfloat16", *LINEAR_HEADS[0])]


def candidates_of(setting: Setting) -> list[Candidate]:
    return [candidate for candidate in candidates() if candidate[:2] == setting[:2]]


def tune_setting(setting: Setting, chosen: list[Candidate]) -> dict[str, Any]:
    """Time every candidate whose results agree with those of the shipped configuration.

    Returns:
        A dict with the setting, the times by candidate (the fastest first), and the reason for each
        candidate that was not timed.
    """
    torch.manual_seed(0)
    call = call_of(setting.kind, setting.dtype, ROWS, setting.hidden, setting.vocab, "cuda")
    # Copy the results, because the next call overwrites the matrix.
    expected = [x.clone() for x in call()]
    steps: dict[str, Callable[[], Any]] = {"shipped": call}
    failures = {}
    for candidate in chosen:
        step = functools.partial(call_with, candidate, call)
        try:
            if agree(step(), expected):
                steps[candidate.line] = step
            else:
                failures[candidate.line] = "wrong: not timed"
        except Exception as error:  # the GPU may refuse one candidate; time the other candidates
            failures[candidate.line] = f"{type(error).__name__}: {str(error)[:120]}"
    rows = measure.interleaved(steps, "cuda", budget=0.15, rounds=9)
    ordered = dict(sorted(rows.items(), key=lambda item: item[1]["median_ms"]))
    return {"setting": setting._asdict(), "rows": ordered, "failures": failures}


def call_with(candidate: Candidate, call: Callable[[], list[Tensor]]) -> list[Tensor]:
    with using(candidate):
        return call()


def agree(result: list[Tensor], expected: list[Tensor]) -> bool:
    """Return True if the logps differ by at most AGREEMENT, and the exponentials by 2 bf16 ulps."""
    logps, *matrices = result
    right = bool((logps - expected[0]).abs().max() <= AGREEMENT)
    for found, want in zip(matrices, expected[1:], strict=True):
        for part, exact in zip(found.split(256), want.split(256), strict=True):
            right &= bool(((part - exact).abs() <= 2**-6 * exact.abs() + 1e-30).all())
    return right


def table_line(arch: str, found: dict[str, Any]) -> str:
    """Return the fastest configuration as a line of a table, with its speedup in a comment."""
    best, row = next(iter(found["rows"].items()))
    gain = found["rows"]["shipped"]["median_ms"] / row["median_ms"]
    where = "{kind} {dtype} H={hidden} V={vocab}".format(**found["setting"])
    speed = f"{row['median_ms']:.3f} ms, {gain:.2f}x the shipped one's speed"
    return f"{best},  # {where}, {ROWS} rows, {arch}: {speed}"


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--kind", choices=("rows", *KINDS), help="only this kernel")
    parser.add_argument("--dry", action="store_true", help="list the candidates of each setting")
    parser.add_argument("--seconds", type=float, default=50, help="start no setting after this")
    parser.add_argument("--out", help="file for the JSON")
    options = parser.parse_args(arguments)
    settings = [x for x in SETTINGS if options.kind in (None, x.kind)]
    if options.dry:
        for setting in settings:
            lines = [candidate.line for candidate in candidates_of(setting)]
            print(f"{tuple(setting)}: {len(lines)} candidates: {', '.join(lines)}")
        return 0
    if not torch.cuda.is_available():
        print("tune: expected a GPU, got none", file=sys.stderr)
        return 2
    return time_all("sm_{}{}".format(*torch.cuda.get_device_capability()), settings, options)


def time_all(arch: str, settings: list[Setting], options: argparse.Namespace) -> int:
    started = time.monotonic()
    report = {**measure.header("tune", "cuda"), "arch": arch, "cases": [], "settings": []}
    path = Path(options.out) if options.out else RESULTS / f"tune-{arch}.json"
    can_start = startable(arch, [c for c in candidates() if c[:2] in {x[:2] for x in settings}])
    for setting in settings:
        if time.monotonic() - started > options.seconds:
            print(f"{tuple(setting)}: no time left, not timed")
            continue
        chosen = [c for c in candidates_of(setting) if c in can_start]
        report["settings"].append(tune_setting(setting, chosen))
        torch.cuda.empty_cache()
        print(table_line(arch, report["settings"][-1]), flush=True)
        write(path, report)
    return 0


def startable(arch: str, every: list[Candidate]) -> set[Candidate]:
    """Return the candidates that compile without spills and with little enough shared memory.

    All candidates are compiled in parallel, and stay in Triton's cache. Compiling one after the
    other would take ten times as long as timing them.
    """
    try:
        entries = compile_all(arch, every)
    except BrokenProcessPool as error:  # the compiler crashed; the launch will report it
        print(f"not compiled beforehand: {error}")
        return set(every)
    return {c for c, entry in zip(every, entries, strict=True) if entry["starts"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
