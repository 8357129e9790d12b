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
import functools
import sys
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import RESULTS, measure
from benchmarks.gpu.candidates import KINDS, Candidate, call_of, candidates, compile_all, using
from benchmarks.options import new_parser
from benchmarks.report.files import write

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
