"""Times kernel configurations on a GPU and prints the lines for the table in grpo_fast/kernels/gpu/configs.py.

    python -m benchmarks.tune --compile sm_90     without a GPU: which candidates start (minutes; committed as JSON)
    python -m benchmarks.tune                     on the GPU: times those, by V, H and dtype; verified before timed
    python -m benchmarks.tune --dry               what would be timed

The package itself never tunes: timing inside a training run makes it irreproducible. What is printed here goes into the
table by hand, with its time in the comment, in a commit of its own.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from benchmarks.candidates import KINDS, ROOT, Candidate, call_of, candidates, compile_all, using
from benchmarks.providers import Step, versions
from benchmarks.runner import write

RESULTS = ROOT / "benchmarks" / "results"
ROW_VOCABS = (32000, 128256, 151936, 262144)
LINEAR_HEADS = ((4096, 151936), (896, 151936), (2048, 151936))  # (H, V)
ROWS = 2752  # a chunk of 1 GiB at V = 151936: the last round of programs is as full as in the engine
WORKSPACES_MIB = (512, 1024, 2048, 4096)
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
    """The candidates that start on `arch`, by the committed report; all of them where there is none."""
    from benchmarks.reports import load

    file, every = RESULTS / f"candidates-{arch}.json", candidates()
    if file.is_file():
        entries = [entry for report in load(file) for entry in report["cases"] if entry["starts"]]
        known = [Candidate(entry["kind"], entry["dtype"], tuple(entry["config"])) for entry in entries]
        every = [candidate for candidate in every if candidate in known] or every  # a report of other fields is stale
    return [candidate for candidate in every if (candidate.kind, candidate.dtype) == (kind, dtype)]


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
        except Exception as error:  # a configuration may be refused at launch; the others go on
            failures[candidate.line] = f"{type(error).__name__}: {str(error)[:120]}"
            continue
        if not is_right:
            failures[candidate.line] = "wrong: not timed"
            continue
        steps[candidate.line] = Step(timed(candidate, call))
    samples = measure.interleaved(steps, "cuda", budget=0.15, rounds=9)
    rows = {name: measure.spread(times) for name, times in samples.items()}
    order = sorted(rows, key=lambda name: rows[name]["median_ms"])
    return {"setting": setting._asdict(), "rows": {name: rows[name] for name in order}, "failures": failures}


def timed(candidate: Candidate, call: Any) -> Any:
    def run() -> dict[str, torch.Tensor]:
        with using(candidate):
            return {"logps": logps_of(call())}

    return run


def logps_of(result: Any) -> torch.Tensor:
    return result.logps if hasattr(result, "logps") else result[1]


def copied(result: Any) -> list[torch.Tensor]:
    """The logps and, of "weights", these: the next call writes over them."""
    weights = [] if hasattr(result, "logps") else [x for x in result[2:] if x is not None]
    return [x.clone() for x in (logps_of(result), *weights)]


def agree(result: Any, expected: list[torch.Tensor]) -> bool:
    """logps within `AGREEMENT`; weights, which are rounded to bf16, within two units in the last place."""
    logps, *weights = copied(result)
    right = bool((logps - expected[0]).abs().max() <= AGREEMENT)
    for found, want in zip(weights, expected[1:], strict=True):
        for part, exact in zip(found.split(256), want.split(256), strict=True):
            right &= bool(((part - exact).abs() <= 2**-6 * exact.abs() + 1e-30).all())
    return right


def tune_workspace() -> dict[str, Any]:
    """linear_grpo_loss at the shapes of the bars, by the workspace that bounds its chunks."""
    from benchmarks.problem import make_problem
    from benchmarks.providers.ours import loss
    from benchmarks.shapes import Shape

    rows: dict[str, Any] = {}
    for hidden in (896, 4096):
        problem = make_problem(Shape(8192, hidden, 151936), torch.bfloat16, "cuda")
        base = loss("triton")(problem)
        steps = {f"{mib} MiB": Step(with_workspace(mib, base)) for mib in WORKSPACES_MIB}
        samples = measure.interleaved(steps, "cuda", budget=0.5, rounds=7)
        rows[f"8192,{hidden},151936"] = {name: measure.spread(times) for name, times in samples.items()}
        del problem, base, steps
        torch.cuda.empty_cache()
    return rows


def tune_slices() -> dict[str, Any]:
    """linear_grpo_loss at the shapes of the bars, by the columns of a slice (configs.SLICE_COLUMNS)."""
    from benchmarks.problem import make_problem
    from benchmarks.providers.ours import loss
    from benchmarks.shapes import Shape

    rows: dict[str, Any] = {}
    for hidden in (896, 4096):
        base = loss("triton")(make_problem(Shape(8192, hidden, 151936), torch.bfloat16, "cuda"))
        steps = {f"{columns} columns": Step(with_slices(columns, base)) for columns in SLICES}
        samples = measure.interleaved(steps, "cuda", budget=0.4, rounds=7)
        rows[f"8192,{hidden},151936"] = {name: measure.spread(times) for name, times in samples.items()}
        del base, steps
        torch.cuda.empty_cache()
    return rows


def with_slices(columns: int, step: Step) -> Any:
    def run() -> dict[str, torch.Tensor]:
        from grpo_fast.kernels.gpu import linear as linear_triton

        before, linear_triton.SLICE_COLUMNS = linear_triton.SLICE_COLUMNS, columns
        try:
            return step.run()
        finally:
            linear_triton.SLICE_COLUMNS = before

    return run


def with_workspace(mib: int, step: Step) -> Any:
    def run() -> dict[str, torch.Tensor]:
        os.environ["GRPO_FAST_WORKSPACE_MIB"] = str(mib)
        try:
            return step.run()
        finally:
            del os.environ["GRPO_FAST_WORKSPACE_MIB"]

    return run


def table_line(arch: str, found: dict[str, Any]) -> str:
    """The fastest configuration, as a line for configs.py, and what it gains over the shipped one."""
    rows, setting = found["rows"], found["setting"]
    best = next(iter(rows))
    gain = rows["shipped"]["median_ms"] / rows[best]["median_ms"]
    where = f"{setting['kind']} {setting['dtype']} H={setting['hidden']} V={setting['vocab']}, {ROWS} rows, {arch}"
    return f"{best},  # {where}: {rows[best]['median_ms']:.3f} ms, {gain:.2f}x the shipped one's speed"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--compile", metavar="ARCH", help="compile every candidate for ARCH (sm_90), without a GPU")
    parser.add_argument("--dry", action="store_true", help="list what would be timed")
    parser.add_argument("--seconds", type=float, default=50, help="stop starting new settings after this long")
    parser.add_argument("--out", help="where the JSON goes")
    options = parser.parse_args(arguments)
    base = {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": measure.commit(),
        "versions": {"python": platform.python_version(), **versions()},
    }
    if options.compile:
        return compile_report(options.compile, options.out, base)
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90"
    plan = [(setting, survivors(arch, setting.kind, setting.dtype)) for setting in settings()]
    if options.dry:
        for setting, chosen in plan:
            print(f"{tuple(setting)}: {len(chosen)} candidates: {', '.join(c.line for c in chosen)}")
        return 0
    if not torch.cuda.is_available():
        print("tune: expected a GPU, torch sees none (--compile ARCH needs none)", file=sys.stderr)
        return 2
    return time_all(arch, plan, options, base)


def compile_report(arch: str, out: str | None, base: dict[str, Any]) -> int:
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        entries = compile_all(arch, candidates())
    report = {"benchmark": "candidates", **base, "hardware": measure.hardware("cpu"), "arch": arch, "cases": entries}
    write(Path(out) if out else RESULTS / f"candidates-{arch}.json", report)
    print(f"{sum(entry['starts'] for entry in entries)} of {len(entries)} candidates start on {arch}")
    return 0


def time_all(arch: str, plan: list, options: argparse.Namespace, base: dict[str, Any]) -> int:
    started = time.monotonic()
    report = {"benchmark": "tune", **base, "hardware": measure.hardware("cuda"), "arch": arch, "cases": []}
    report |= {"settings": [], "slices": {}, "workspaces": {}}
    path = Path(options.out) if options.out else RESULTS / f"tune-{arch}.json"
    decisive = 2 * len(LINEAR_HEADS)
    refused = not_starting(arch, [candidate for _, chosen in plan[:decisive] for candidate in chosen])
    for number, (setting, chosen) in enumerate(plan):
        if time.monotonic() - started > options.seconds:
            print(f"{tuple(setting)}: no time left, not timed")
            continue
        report["settings"].append(tune_setting(setting, [c for c in chosen if c not in refused]))
        torch.cuda.empty_cache()
        print(table_line(arch, report["settings"][-1]), flush=True)
        write(path, report)
        if number + 1 == decisive:  # before the rest: both bear on the bars
            report |= {"slices": tune_slices(), "workspaces": tune_workspace()}
            for shape, rows in [*report["slices"].items(), *report["workspaces"].items()]:
                print(f"{shape}: " + ", ".join(f"{n} {r['median_ms']:.2f} ms" for n, r in rows.items()), flush=True)
            write(path, report)
    return 0


def not_starting(arch: str, chosen: list[Candidate]) -> set[Candidate]:
    """Those that this machine's Triton does not compile as wanted. The others are then in its cache: compiled on all
    cores at once, which one after the other would take ten times as long as to time them.
    """
    chosen = list(dict.fromkeys(chosen))
    try:
        entries = compile_all(arch, chosen)
    except BrokenProcessPool as error:  # a compiler that ends its process; what is refused shows when it is launched
        print(f"not compiled beforehand: {error}")
        return set()
    return {candidate for candidate, entry in zip(chosen, entries, strict=True) if not entry["starts"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
