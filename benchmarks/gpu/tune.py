"""Time kernel configurations on a GPU, and print lines for grpo_fast/kernels/gpu/configs.py.

    python -m benchmarks.gpu.tune --compile sm_90   compiles all candidates; needs no GPU (minutes)
    python -m benchmarks.gpu.tune                   times the candidates that start, on a GPU
    python -m benchmarks.gpu.tune --dry             lists the candidates that would be timed

The package never tunes its kernels at run time, because a training run would then not be
reproducible. Copy the printed lines into the table by hand, and commit them separately.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
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
# Number of rows of a timed call. It equals one chunk at V = 151936, as in the cases of bars.py.
# With fewer rows, the last wave of programs would use less of the GPU than in training.
ROWS = 8192
SLICES = (1024, 2048, 4096)  # columns
# Maximum difference in nats between the logps of two configurations, which differ by rounding only.
AGREEMENT = 2e-4


class Setting(NamedTuple):
    """A kernel, a dtype and sizes for which the candidates are timed."""

    kind: str
    dtype: str
    hidden: int
    vocab: int


def settings() -> Iterator[Setting]:
    """Yield all settings. The settings of bars.py come first, in case time runs out."""
    for kind in KINDS[:2]:
        for hidden, vocab in LINEAR_HEADS:
            yield Setting(kind, "bfloat16", hidden, vocab)
    for dtype in ("bfloat16", "float32"):
        for vocab in ROW_VOCABS:
            yield Setting("rows", dtype, 64, vocab)
    yield Setting(KINDS[2], "bfloat16", *LINEAR_HEADS[0])


def survivors(arch: str, kind: str, dtype: str) -> list[Candidate]:
    """Return the candidates that can be launched on `arch` according to the committed report.

    If there is no report, return all candidates of the kind and dtype.
    """
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
    """Time every candidate whose results agree with those of the shipped configuration.

    Returns:
        The setting, the times by candidate with the fastest first, and the failures by candidate.
    """
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
        except Exception as error:  # the GPU may refuse one candidate; time the other candidates
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
    """Copy the logps, and the matrix of "exponentials", which the next call overwrites."""
    matrices = [] if hasattr(result, "logps") else [x for x in result[2:] if x is not None]
    return [x.clone() for x in (logps_of(result), *matrices)]


def agree(result: Any, expected: list[torch.Tensor]) -> bool:
    """Return whether the logps differ by at most `AGREEMENT`, and exponentials by two bf16 ulps."""
    logps, *matrices = copied(result)
    right = bool((logps - expected[0]).abs().max() <= AGREEMENT)
    for found, want in zip(matrices, expected[1:], strict=True):
        for part, exact in zip(found.split(256), want.split(256), strict=True):
            right &= bool(((part - exact).abs() <= 2**-6 * exact.abs() + 1e-30).all())
    return right


def tune_slices() -> dict[str, Any]:
    """Time `linear_grpo_loss` for each number of columns of a slice, at two hidden sizes."""
    from benchmarks.kernels.problem import make_problem
    from benchmarks.kernels.providers.ours import loss
    from benchmarks.kernels.shapes import Shape
    from grpo_fast.kernels.gpu import linear

    def step_of(columns: int, base: Step) -> Step:
        def run() -> dict[str, torch.Tensor]:
            with patched(linear, SLICE_COLUMNS=columns):
                return base.run()

        return Step(run)

    rows: dict[str, Any] = {}
    for hidden in (896, 4096):
        base = loss("triton")(make_problem(Shape(ROWS, hidden, 151936), torch.bfloat16, "cuda"))
        steps = {f"{columns} columns": step_of(columns, base) for columns in SLICES}
        found = rows[f"{ROWS},{hidden},151936"] = times_of(steps, 0.5, 7)
        del base, steps
        torch.cuda.empty_cache()
        times = ", ".join(f"{name} {row['median_ms']:.2f} ms" for name, row in found.items())
        print(f"{ROWS},{hidden},151936: {times}", flush=True)
    return rows


def table_line(arch: str, found: dict[str, Any]) -> str:
    """Return the fastest configuration as a line for configs.py, with its gain in a comment."""
    rows, setting = found["rows"], found["setting"]
    best = next(iter(rows))
    gain = rows["shipped"]["median_ms"] / rows[best]["median_ms"]
    where = f"{setting['kind']} {setting['dtype']} H={setting['hidden']} V={setting['vocab']}"
    speed = f"{rows[best]['median_ms']:.3f} ms, {gain:.2f}x the shipped one's speed"
    return f"{best},  # {where}, {ROWS} rows, {arch}: {speed}"


def main(arguments: list[str]) -> int:
    parser = new_parser("python -m benchmarks.gpu.tune", __doc__)
    parser.add_argument("--compile", metavar="ARCH", help="compile every candidate, without a GPU")
    parser.add_argument("--dry", action="store_true", help="list the candidates to be timed")
    parser.add_argument("--seconds", type=float, default=50, help="start no setting after this")
    parser.add_argument("--out", help="file for the JSON")
    options = parser.parse_args(arguments)
    if options.compile:
        return compile_report(options.compile, options.out)
    is_gpu = torch.cuda.is_available()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if is_gpu else "sm_90"
    plan = [(setting, survivors(arch, setting.kind, setting.dtype)) for setting in settings()]
    if options.dry:
        for setting, chosen in plan:
            lines = ", ".join(c.line for c in chosen)
            print(f"{tuple(setting)}: {len(chosen)} candidates: {lines}")
        return 0
    if not is_gpu:
        print("tune: expected a GPU, got none. --compile ARCH needs no GPU.", file=sys.stderr)
        return 2
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
        if number + 1 == decisive:  # bars.py depends on slices, too
            report["slices"] = tune_slices()
        write(path, report)
    return 0


def not_starting(arch: str, chosen: list[Candidate]) -> set[Candidate]:
    """Return the candidates that this machine's Triton does not compile without spills.

    All candidates are compiled at once, on all cores, and stay in Triton's cache. Compiling one
    after the other would take ten times as long as timing them.
    """
    chosen = list(dict.fromkeys(chosen))
    try:
        entries = compile_all(arch, chosen)
    except BrokenProcessPool as error:  # the compiler crashed; the launch will report it
        print(f"not compiled beforehand: {error}")
        return set()
    return {
        candidate for candidate, entry in zip(chosen, entries, strict=True) if not entry["starts"]
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
