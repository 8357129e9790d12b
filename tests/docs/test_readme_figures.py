"""Test that every measured figure of README.md comes from a committed file of results.

A figure is a number with a unit of measurement: ×, %, ms, s or MiB. Each of them must be computed
by a function of this file, so that a new figure without results fails. The table of the loss is
tested in tests/benchmarks/test_bench_tool.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

from grpo_fast.train.evaluate import mean_and_error
from tests.docs.test_docs import README, ROOT, rows_of

RESULTS = ROOT / "benchmarks" / "results"
TEXT = README.read_text()
OURS = "grpo_fast (auto)"
# Figures that describe a task or a setting, and not a measurement.
STATED = {"512 MiB", "50%", "45%"}


def read(name: str) -> Any:
    """Return a file of results. Refuse one that was measured with uncommitted changes."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    assert "+changes" not in str(report.get("commit")), name
    return report


def gpu_reports(part: str) -> list[dict[str, Any]]:
    return read("gpu_session")["parts"][part]["reports"]


def ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio_to_limit']:.2f}×"


def gpu_case(part: str, shape: list[int]) -> dict[str, Any]:
    """Return the rows of `linear_grpo_loss` that were measured on the H100."""
    return next(
        case["rows"]
        for report in gpu_reports(part)
        for case in report["cases"]
        if case["shape"] == shape and case["operation"] == "linear_grpo_loss"
        and case["active"] == 1 and case["allocator"] != "fair"
    )  # fmt: skip


def share(case: dict[str, Any], ours: str = "grpo_fast", theirs: str = "TRL") -> str:
    return f"{case[ours]['median_ms'] / case[theirs]['median_ms']:.2f}"


def steps(name: str) -> dict[str, dict[str, Any]]:
    return {case["shape"]: case["step"] for case in read(name)["cases"]}


def test_the_table_of_steps():
    loops = [steps(name) for name in ("cpu-loop", "cpu-loop-zen4")]
    update = gpu_reports("step")[0]["providers"]
    expected = [
        ", ".join(share(loop["short"]) for loop in loops),
        ", ".join(share(loop["12-shot"]) for loop in loops),
        share(steps("cpu-loop-real")["short"]),
        share(steps("cpu-loop-real-12shot")["12-shot"]),
        share(update, "shared"),
    ]
    table = rows_of(TEXT, "of GRPO with its rollout")
    assert [row[-1].strip("*") for row in table] == expected


def figures() -> set[str]:
    """Return all figures that the text may contain, computed from the files of results."""
    rows = gpu_case("peers", [8192, 4096, 151936])
    compiled, small = rows["torch.compile"], gpu_case("bars", [1024, 896, 151936])[OURS]
    times = [
        f"{row['median_ms']:.1f} ± {row['spread_ms']:.1f} ms" for row in (rows[OURS], compiled)
    ]
    memory = [f"{compiled['workspace_mib']:,.0f} MiB", f"{rows[OURS]['workspace_mib']:,.0f}"]
    ours = [points[-1]["accuracy"] for points in races("capitals", "grpo_fast")]
    mean, error = mean_and_error([100 * accuracy for accuracy in ours])
    first = races("capitals", "grpo_fast")[0][0]["accuracy"]
    return {*times, *memory, ratio(small), f"{first:.1%}", f"{mean:.1f} ± {error:.1f}%"}


def races(task: str, trainer: str) -> list[list[dict[str, float]]]:
    """Return the evaluations of a trainer in a task of the race, for each seed."""
    cases = read("race")["cases"]
    return [x["points"] for x in cases if (x["task"], x["trainer"]) == (task, trainer)]


def seconds_to(level: float, task: str, trainer: str) -> tuple[str, str]:
    """Return the mean CPU seconds until an accuracy, and how many of the seeds reach it."""
    runs = races(task, trainer)
    reached = [[x["cpu"] for x in run if x["accuracy"] >= level] for run in runs]
    times = [found[0] for found in reached if found]
    return f"{sum(times) / len(times):,.0f}", f"({len(times)} of {len(runs)} seeds"


def test_the_race():
    shown = re.sub(r"[\s*]+", " ", TEXT)
    for task, level in (("capitals", 0.5), ("examples", 0.45)):
        ours, our_seeds = seconds_to(level, task, "grpo_fast")
        theirs, their_seeds = seconds_to(level, task, "TRL")
        assert f"reaches {level:.0%} after {ours} CPU seconds {our_seeds}), and TRL" in shown
        assert re.search(rf"and TRL( 1.16)? after {theirs} {re.escape(their_seeds)}", shown)
    slower, _ = seconds_to(0.5, "capitals", "grpo_fast-recomputing")
    ours, theirs = (
        max(run[-1]["peak"] for run in races("capitals", trainer))
        for trainer in ("grpo_fast-recomputing", "TRL")
    )
    assert f"activations it takes {slower}, and {ours / theirs:.2f} of TRL's memory" in shown


FIGURE = re.compile(r"[\d.,]*\d(?: ± [\d.]+)?(?:×|%| ms\b| MiB\b)")


def test_every_figure_in_the_text_is_computed_from_results():
    prose = "\n".join(line for line in TEXT.splitlines() if not line.startswith("|"))
    found = set(FIGURE.findall(re.sub(r"\s+", " ", prose)))
    assert len(found) >= 7
    assert found - STATED <= figures(), found - STATED - figures()
