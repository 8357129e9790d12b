"""Times kernel configurations on a GPU and prints lines for grpo_fast/kernels/gpu/configs.py.

    python -m benchmarks.gpu.tune --compile sm_90   without a GPU: which candidates start (minutes)
    python -m benchmarks.gpu.tune                   on the GPU: times those, by V, H and dtype
    python -m benchmarks.gpu.tune --workspaces      the loss in one chunk and in three
    python -m benchmarks.gpu.tune --dry             what would be timed

The package itself never tunes: timing inside a training run makes it irreproducible. What is
printed here goes into the table by hand, with its time in the comment, in a commit of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import RESULTS, measure
from benchmarks.gpu.candidates import KINDS, Candidate, call_of, candidates, compile_all, using
from benchmarks.gpu.patch import patched
from benchmarks.measure import Step
from benchmarks.options import new_parser
from benchmarks.report.files import load, write

ROW_VOCABS = (32000, 128256, 151936, 262144)
LINEAR_HEADS = ((4096, 151936), (896, 151936), (2048, 151936))  # (H, V)
# One chunk of the bars at V = 151936: the last round of programs is as full as in the engine.
ROWS = 8192
# Three chunks and one, of the bars' 8192 rows at the hidden sizes where 1 GiB holds less than all.
WORKSPACES_MIB, WORKSPACE_HIDDEN = (1024, 2560), (2048, 896)
SLICES = (1024, 2048, 4096)
# fp32 sums in another order: logps of two configurations differ by rounding alone.
AGREEMENT = 2e-4


class Setting(NamedTuple):
    """What is timed: the kernel and the sizes it works on."""

    kind: str
    dtype: str
    hidden: int
    vocab: int


def settings() -> Iterator[Setting]:
    """What decides the bars first."""
    for kind in KINDS[:2]:
        for hidden, vocab in LINEAR_HEADS:
            yield Setting(kind, "bfloat16", hidden, vocab)
    for dtype in ("bfloat16", "float32"):
        for vocab in ROW_VOCABS:
            yield Setting("rows", dtype, 64, vocab)
    yield Setting(KINDS[2], "bfloat16", *LINEAR_HEADS[0])


def survivors(arch: str, kind: str, dtype: str) -> list[Candidate]:
    """The candidates that start on `arch`, by the committed report; all of them without one."""
    file, every = RESULTS / f"candidates-{arch}.json", candidates()
    if file.is_file():
        entries = [entry for report in load(file) for entry in report["cases"] if entry["starts"]]
        known = [
            Candidate(entry["kind"], entry["dtype"], tuple(entry["config"]), entry["loop"])
            for entry in entries
        ]
        every = [candidate for candidate in every if candidate in known]
    return [candidate for candidate in every if candidate[:2] == (kind, dtype)]


def tune_setting(setting: Setting, chosen: list[Candidate]) -> dict[str, Any]:
    """Times of every candidate that agrees with the shipped configuration, fastest first."""
    torch.manual_seed(0)
    shipped = Candidate(setting.kind, setting.dtype, ())
    call = call_of(shipped, ROWS, setting.hidden, setting.vocab, "cuda")
    expected = copied(call())
    steps = {"shipped": Step(lambda: {"logps": logps_of(call())})}
    failures = {}
    for candidate in chosen:
        try:
            with using(candidate):
                is_right = agree(call(), expected)
        except Exception as error:  # one may be refused at launch; the others go on
            failures[candidate.line] = f"{type(error).__name__}: {str(error)[:120]}"
            continue
        if is_right:
            steps[candidate.line] = Step(timed(candidate, call))
        else:
            failures[candidate.line] = "wrong: not timed"
    rows = times_of(steps, 0.15, 9)
    order = sorted(rows, key=lambda name: rows[name]["median_ms"])
    ordered = {name: rows[name] for name in order}
    return {"setting": setting._asdict(), "rows": ordered, "failures": failures}


def timed(candidate: Candidate, call: Any) -> Any:
    def run() -> dict[str, torch.Tensor]:
        with using(candidate):
            return {"logps": logps_of(call())}

    return run


def times_of(steps: dict[str, Step], budget: float, rounds: int) -> dict[str, Any]:
    samples = measure.interleaved(steps, "cuda", budget=budget, rounds=rounds)
    return {name: measure.spread(times) for name, times in samples.items()}


def logps_of(result: Any) -> torch.Tensor:
    return result.logps if hasattr(result, "logps") else result[1]


def copied(result: Any) -> list[torch.Tensor]:
    """The logps and, of "exponentials", the matrix: the next call writes over it."""
    matrices = [] if hasattr(result, "logps") else [x for x in result[2:] if x is not None]
    return [x.clone() for x in (logps_of(result), *matrices)]


def agree(result: Any, expected: list[torch.Tensor]) -> bool:
    """logps within `AGREEMENT`; exponentials, in bf16, within two units in the last place."""
    logps, *matrices = copied(result)
    right = bool((logps - expected[0]).abs().max() <= AGREEMENT)
    for found, want in zip(matrices, expected[1:], strict=True):
        for part, exact in zip(found.split(256), want.split(256), strict=True):
            right &= bool(((part - exact).abs() <= 2**-6 * exact.abs() + 1e-30).all())
    return right


def tune_loss(
    changes: Mapping[str, Callable[[], AbstractContextManager]], sizes: tuple[int, ...]
) -> dict[str, Any]:
    """linear_grpo_loss of 8192 rows at some hidden sizes, under each of these changes."""
    from benchmarks.kernels.problem import make_problem
    from benchmarks.kernels.providers.ours import loss
    from benchmarks.kernels.shapes import Shape

    def step_of(change: Callable[[], AbstractContextManager], base: Step) -> Step:
        def run() -> dict[str, torch.Tensor]:
            with change():
                return base.run()

        return Step(run)

    rows: dict[str, Any] = {}
    for hidden in sizes:
        base = loss("triton")(make_problem(Shape(8192, hidden, 151936), torch.bfloat16, "cuda"))
        steps = {name: step_of(change, base) for name, change in changes.items()}
        rows[f"8192,{hidden},151936"] = times_of(steps, 0.5, 7)
        del base, steps
        torch.cuda.empty_cache()
    for shape, found in rows.items():
        times = ", ".join(f"{name} {row['median_ms']:.2f} ms" for name, row in found.items())
        print(f"{shape}: {times}", flush=True)
    return rows


@contextlib.contextmanager
def workspace(mib: int) -> Iterator[None]:
    """Inside, this much workspace bounds the chunks."""
    os.environ["GRPO_FAST_WORKSPACE_MIB"] = str(mib)
    try:
        yield
    finally:
        del os.environ["GRPO_FAST_WORKSPACE_MIB"]


def table_line(arch: str, found: dict[str, Any]) -> str:
    """The fastest configuration, as a line for configs.py, and its gain over the shipped one."""
    rows, setting = found["rows"], found["setting"]
    best = next(iter(rows))
    gain = rows["shipped"]["median_ms"] / rows[best]["median_ms"]
    where = f"{setting['kind']} {setting['dtype']} H={setting['hidden']} V={setting['vocab']}"
    speed = f"{rows[best]['median_ms']:.3f} ms, {gain:.2f}x the shipped one's speed"
    return f"{best},  # {where}, {ROWS} rows, {arch}: {speed}"


def main(arguments: list[str]) -> int:
    parser = new_parser("python -m benchmarks.gpu.tune", __doc__)
    parser.add_argument("--compile", metavar="ARCH", help="compile every candidate, without a GPU")
    parser.add_argument("--workspaces", action="store_true", help="time one chunk against three")
    parser.add_argument("--dry", action="store_true", help="list what would be timed")
    parser.add_argument("--seconds", type=float, default=50, help="start no setting after this")
    parser.add_argument("--out", help="where the JSON goes")
    options = parser.parse_args(arguments)
    if options.compile:
        return compile_report(options.compile, options.out)
    is_gpu = torch.cuda.is_available()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if is_gpu else "sm_90"
    if options.workspaces and options.dry:
        print(f"linear_grpo_loss at H = {WORKSPACE_HIDDEN} in {WORKSPACES_MIB} MiB")
        return 0
    plan = [(setting, survivors(arch, setting.kind, setting.dtype)) for setting in settings()]
    if options.dry:
        for setting, chosen in plan:
            lines = ", ".join(c.line for c in chosen)
            print(f"{tuple(setting)}: {len(chosen)} candidates: {lines}")
        return 0
    if not is_gpu:
        print("tune: expected a GPU, torch sees none (--compile ARCH needs none)", file=sys.stderr)
        return 2
    if options.workspaces:
        return compare_workspaces(options.out)
    return time_all(arch, plan, options)


def compile_report(arch: str, out: str | None) -> int:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        entries = compile_all(arch, candidates())
    report = {**measure.header("candidates", "cpu"), "arch": arch, "cases": entries}
    write(Path(out) if out else RESULTS / f"candidates-{arch}.json", report)
    starting = sum(entry["starts"] for entry in entries)
    print(f"{starting} of {len(entries)} candidates start on {arch}")
    return 0


def time_all(arch: str, plan: list, options: argparse.Namespace) -> int:
    started = time.monotonic()
    report = {**measure.header("tune", "cuda"), "arch": arch, "cases": []}
    report |= {"settings": [], "slices": {}}
    path = Path(options.out) if options.out else RESULTS / f"tune-{arch}.json"
    decisive = 2 * len(LINEAR_HEADS)
    refused = not_starting(arch, [c for _, chosen in plan[:decisive] for c in chosen])
    for number, (setting, chosen) in enumerate(plan):
        if time.monotonic() - started > options.seconds:
            print(f"{tuple(setting)}: no time left, not timed")
            continue
        report["settings"].append(tune_setting(setting, [c for c in chosen if c not in refused]))
        torch.cuda.empty_cache()
        print(table_line(arch, report["settings"][-1]), flush=True)
        if number + 1 == decisive:  # before the rest: it bears on the bars
            report["slices"] = tune_slices()
        write(path, report)
    return 0


def tune_slices() -> dict[str, Any]:
    """The loss by the columns of a slice."""
    from grpo_fast.kernels.gpu import linear

    changes = {f"{n} columns": partial(patched, linear, SLICE_COLUMNS=n) for n in SLICES}
    return tune_loss(changes, (896, 4096))


def compare_workspaces(out: str | None) -> int:
    """The loss by the workspace that bounds its chunks."""
    changes = {f"{n} MiB": partial(workspace, n) for n in WORKSPACES_MIB}
    found = tune_loss(changes, WORKSPACE_HIDDEN)
    if out:
        report = {**measure.header("workspaces", "cuda"), "cases": [], "workspaces": found}
        write(Path(out), report)
    return 0


def not_starting(arch: str, chosen: list[Candidate]) -> set[Candidate]:
    """Those that this machine's Triton does not compile as wanted. The others are then in its
    cache: compiled on all cores at once; one by one would take ten times as long as to time them.
    """
    chosen = list(dict.fromkeys(chosen))
    try:
        entries = compile_all(arch, chosen)
    except BrokenProcessPool as error:  # a compiler that ends its process; a launch will show it
        print(f"not compiled beforehand: {error}")
        return set()
    return {
        candidate for candidate, entry in zip(chosen, entries, strict=True) if not entry["starts"]
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
