"""Time configurations of the row kernel on a GPU, and print the fastest one of each setting.

The row kernel computes the loss of given logits. Each configuration is printed as a line of the
table in grpo_fast/kernels/gpu/rows.py.

    python -m benchmarks.gpu.tune          times the candidates that can run, on a GPU
    python -m benchmarks.gpu.tune --dry    lists the candidates of each setting

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
from grpo_fast.kernels.gpu import rows
from grpo_fast.kernels.gpu.rows import RowConfig, row_loss_
from grpo_fast.kernels.types import LogitTransform
from grpo_fast.objective.coefficients import RowTerms
from grpo_fast.objective.config import LossConfig

COMPILED_ROWS, COMPILED_VOCAB = 64, 32000  # the call with which candidates are compiled
# Block, warps and programs per multiprocessor of the row kernels that stride over rows. On 132
# multiprocessors, 132 rows of 151936 16-bit logits take 40 MB, so the second read of a row hits an
# L2 cache of 50 MB. With 32 warps, Triton 3.6 spills 6 registers at 8192 columns on sm_90.
PERSISTENT = ((16384, 32, 1), (8192, 16, 1), (4096, 16, 1), (4096, 16, 2))
# Number of rows of a timed call, as in the cases of bars.py. With fewer rows, the last wave of
# programs would use less of the GPU than in training.
ROWS = 8192
# Maximum difference of the logps in nats. Two configurations differ only by rounding.
AGREEMENT = 2e-4


class Candidate(NamedTuple):
    """Configuration of the row kernel for logits of one dtype.

    Attributes:
        dtype: name of the torch dtype of the logits.
        config: the configuration.
    """

    dtype: str
    config: RowConfig

    @property
    def line(self) -> str:
        """Return the configuration as source code for the table of the kernel."""
        return f"RowConfig{tuple(self.config)}"


def candidates() -> list[Candidate]:
    """Return the candidates for sm_90 that fit into its registers."""
    found = [
        Candidate(dtype, RowConfig(block_v, warps))
        for dtype in ("float32", "bfloat16")
        for block_v, warps in itertools.product((1024, 2048, 4096, 8192), (4, 8, 16, 32))
        if 4 <= block_v // (32 * warps) <= 32
    ]
    return found + [Candidate("bfloat16", RowConfig(*sizes, "evict_first")) for sizes in PERSISTENT]


@contextlib.contextmanager
def using(candidate: Candidate) -> Iterator[None]:
    """Make the kernel use the configuration of a candidate in a `with` block."""

    def chosen(*args: Any, **options: Any) -> RowConfig:
        return candidate.config

    with mock.patch.object(rows, "row_config", chosen):
        yield


def call_of(dtype_name: str, count: int, vocab: int, device: str) -> Callable[[], Tensor]:
    """Return a function that calls the row kernel in the same way as the loss.

    Args:
        dtype_name: name of the torch dtype of the logits.
        count: number of tokens.
        vocab: vocabulary size.
        device: a GPU, or "cpu" to compile without a GPU.

    Returns:
        The function. It returns the logps, (count,) in fp32.
    """
    logits = torch.randn(count, vocab, device=device).to(getattr(torch, dtype_name))
    targets = torch.randint(vocab, (count,), device=device)
    d_logits, v = torch.empty_like(logits), torch.ones(count, device=device)
    terms, config = RowTerms(v, v, old_logps=v), LossConfig(loss_type="dapo")
    arguments = (logits, d_logits, targets, terms, config, LogitTransform(1.0, None, 1.0))
    return lambda: row_loss_(*arguments, return_entropy=False).logps


def startable(arch: str, every: list[Candidate]) -> set[Candidate]:
    """Return the candidates that compile without spills and with little enough shared memory.

    All candidates are compiled in parallel, and stay in Triton's cache. Compiling one after the
    other would take ten times as long as timing them.
    """
    found = set()
    try:
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
            reasons = pool.map(why_not, itertools.repeat(arch), every)
            for candidate, reason in zip(every, reasons, strict=True):
                print(f"{arch} {candidate.dtype} {candidate.line} {reason or 'starts'}", flush=True)
                found |= set() if reason else {candidate}
    except BrokenProcessPool as error:  # the compiler crashed; the launch will report it
        print(f"not compiled beforehand: {error}")
        return set(every)
    return found


def why_not(arch: str, candidate: Candidate) -> str:
    """Compile a candidate. Return the reason why it cannot be launched, or an empty string.

    Call this in a separate process, because the fake driver stays active.
    """
    try:
        with using(candidate), compile_launches(arch) as compiled:
            call_of(candidate.dtype, COMPILED_ROWS, COMPILED_VOCAB, "cpu")()
        costs = [resources(kernel) for name, kernel in compiled if name == "row_loss_kernel"]
    except Exception as error:  # the compiler raises many types; list the candidate as failed
        return f"{type(error).__name__}: {str(error)[:160]}"
    spills, shared = (max(getattr(cost, name) for cost in costs) for name in ("spills", "shared"))
    if spills or shared > SHARED_LIMIT[arch]:
        return f"dropped: {spills} spills, {shared} bytes of shared memory"
    return ""


# ---- times on a GPU ----
class Setting(NamedTuple):
    """Dtype and vocabulary at which candidates are timed."""

    dtype: str
    vocab: int


# The setting of bars.py comes first, in case time runs out.
SETTINGS = [
    Setting(dtype, vocab)
    for dtype in ("bfloat16", "float32")
    for vocab in (151936, 32000, 128256, 262144)
]


def candidates_of(setting: Setting) -> list[Candidate]:
    return [candidate for candidate in candidates() if candidate.dtype == setting.dtype]


def tune_setting(setting: Setting, chosen: list[Candidate]) -> dict[str, Any]:
    """Time every candidate whose results agree with those of the shipped configuration.

    Returns:
        A dict with the setting, the times by candidate (the fastest first), and the reason for each
        candidate that was not timed.
    """
    torch.manual_seed(0)
    call = call_of(setting.dtype, ROWS, setting.vocab, "cuda")
    expected = call()
    steps: dict[str, Callable[[], Any]] = {"shipped": call}
    failures = {}
    for candidate in chosen:
        step = functools.partial(call_with, candidate, call)
        try:
            if bool((step() - expected).abs().max() <= AGREEMENT):
                steps[candidate.line] = step
            else:
                failures[candidate.line] = "wrong: not timed"
        except Exception as error:  # the GPU may refuse one candidate; time the other candidates
            failures[candidate.line] = f"{type(error).__name__}: {str(error)[:120]}"
    rows = measure.interleaved(steps, "cuda", budget=0.15, rounds=9)
    ordered = dict(sorted(rows.items(), key=lambda item: item[1]["median_ms"]))
    return {"setting": setting._asdict(), "rows": ordered, "failures": failures}


def call_with(candidate: Candidate, call: Callable[[], Tensor]) -> Tensor:
    with using(candidate):
        return call()


def table_line(arch: str, found: dict[str, Any]) -> str:
    """Return the fastest configuration as a line of a table, with its speedup in a comment."""
    best, row = next(iter(found["rows"].items()))
    gain = found["rows"]["shipped"]["median_ms"] / row["median_ms"]
    where = "{dtype} V={vocab}".format(**found["setting"])
    speed = f"{row['median_ms']:.3f} ms, {gain:.2f}x the shipped one's speed"
    return f"{best},  # {where}, {ROWS} rows, {arch}: {speed}"


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--dry", action="store_true", help="list the candidates of each setting")
    parser.add_argument("--seconds", type=float, default=50, help="start no setting after this")
    parser.add_argument("--out", help="file for the JSON")
    options = parser.parse_args(arguments)
    if options.dry:
        for setting in SETTINGS:
            lines = [candidate.line for candidate in candidates_of(setting)]
            print(f"{tuple(setting)}: {len(lines)} candidates: {', '.join(lines)}")
        return 0
    if not torch.cuda.is_available():
        print("tune: expected a GPU, got none", file=sys.stderr)
        return 2
    return time_all("sm_{}{}".format(*torch.cuda.get_device_capability()), options)


def time_all(arch: str, options: argparse.Namespace) -> int:
    started = time.monotonic()
    report = {**measure.header("tune", "cuda"), "arch": arch, "cases": [], "settings": []}
    path = Path(options.out) if options.out else RESULTS / f"tune-{arch}.json"
    can_start = startable(arch, candidates())
    for setting in SETTINGS:
        if time.monotonic() - started > options.seconds:
            print(f"{tuple(setting)}: no time left, not timed")
            continue
        chosen = [c for c in candidates_of(setting) if c in can_start]
        report["settings"].append(tune_setting(setting, chosen))
        torch.cuda.empty_cache()
        print(table_line(arch, report["settings"][-1]), flush=True)
        write(path, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
