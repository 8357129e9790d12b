"""Command line options of the benchmarks in this folder, and their reports."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from benchmarks import options as base
from benchmarks.kernels.exact import TOLERANCE
from benchmarks.report.files import write

Case = tuple[int, ...]


class Defaults(NamedTuple):
    """Default values of a benchmark's options.

    Attributes:
        threads: number of CPU threads.
        budget: time for each candidate in seconds, without --quick and with --quick.
        rounds: maximum number of rounds, without --quick and with --quick.
    """

    threads: int
    budget: tuple[float, float]
    rounds: tuple[int, int]


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = base.new_parser(doc)
    parser.add_argument("--device", default=device, choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="small sizes, a fraction of the time")
    positive = base.positive
    parser.add_argument("--threads", type=positive(int), help="CPU threads")
    parser.add_argument("--budget", type=positive(float), help="seconds of timing per candidate")
    parser.add_argument("--rounds", type=positive(int), help="at most this many rounds")
    words = "wall, or the CPU time of the process, on which other processes have little effect"
    parser.add_argument("--clock", choices=list(measure.CLOCKS), default="wall", help=words)
    parser.add_argument("--json", "--out", help="file for the report")
    return parser


def add_pretrained(parser: Any, data: argparse.ArgumentParser) -> None:
    """Add the options --model to `parser`, which may be a group, and --data to `data`."""

    def folder(text: str) -> str:
        if not Path(text).is_dir():
            raise argparse.ArgumentTypeError(f"expected a folder, got {text!r}")
        return text

    words = "folder of a pretrained model; needs --data"
    parser.add_argument("--model", dest="pretrained", type=folder, metavar="PATH", help=words)
    data.add_argument("--data", type=folder, metavar="PATH", help="folder of GSM8K, for --model")


def parsed(parser: argparse.ArgumentParser, defaults: Defaults) -> argparse.Namespace:
    """Parse the options and fill in the defaults. Set the clock and the number of CPU threads."""
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected cpu (torch sees no GPU), got cuda")
    if getattr(options, "pretrained", None) and not options.data:
        parser.error("--data: expected the folder of GSM8K, whose questions --model gets")
    if options.json and Path(options.json).is_dir():
        parser.error(f"--json: expected a file, got the folder {options.json!r}")
    options.threads = options.threads or defaults.threads
    options.budget = options.budget or defaults.budget[options.quick]
    options.rounds = options.rounds or defaults.rounds[options.quick]
    torch.set_num_threads(options.threads)
    if options.clock == "process" and (options.threads != 1 or options.device == "cuda"):
        # The CPU time of the process would also count threads that only wait for other threads.
        got = f"{options.threads} on {options.device}"
        parser.error(f"--clock process: expected --threads 1 on cpu, got {got}")
    measure.clock = options.clock
    return options


def parsed_cases(
    parser: argparse.ArgumentParser, defaults: Defaults, names: str, usual: dict[str, list[Case]]
) -> argparse.Namespace:
    """Parse the options of a benchmark whose cases are given as numbers, such as 512,896,32000.

    Args:
        parser: the parser, to which `--cases` is added.
        defaults: defaults of the other options.
        names: meaning of the numbers of a case, separated by commas, such as "N,H,V".
        usual: cases for a call without `--cases`, under the keys "quick" (for --quick), "cpu" and
            "cuda".

    Returns:
        The options. `cases` has the cases, and `dtype` is fp32 on a CPU and bf16 on a GPU.
    """

    def case(text: str) -> Case:
        numbers = tuple(int(part) if part.isdecimal() else 0 for part in text.split(","))
        if len(numbers) != names.count(",") + 1 or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"expected {names}, each at least 1, got {text!r}")
        return numbers

    parser.add_argument("--cases", nargs="+", type=case, metavar=names)
    options = parsed(parser, defaults)
    options.cases = options.cases or usual["quick" if options.quick else options.device]
    options.dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    return options


def compared(steps: dict[str, Any], error: float, options: argparse.Namespace) -> dict[str, Any]:
    """Measure two steps with the same results, and return their times and ratios.

    Args:
        steps: the two steps, keyed by name. The ratios are those of the first to the second step.
        error: relative L2 difference of their results. If it is too large, nothing is measured and
            the key `wrong` is returned.
        options: options of the run.
    """
    if not error <= TOLERANCE[options.dtype]:
        return {"wrong": True}
    times = measure.measured(steps, options)
    first, second = times.values()
    memory_ratio = first["workspace_mib"] / max(second["workspace_mib"], 2**-10)
    ratio = first["median_ms"] / second["median_ms"]
    return {"times": times, "ratio": ratio, "memory_ratio": memory_ratio}


def described(row: dict[str, Any]) -> str:
    """Return the text of a row with the fields of `compared`, `tokens_ratio` and `difference`."""
    difference = f"difference {row['difference']:.1g}"
    if "wrong" in row:
        return f"WRONG, not timed: {difference}"
    times = "  ".join(f"{name} {x['median_ms']:9.2f} ms" for name, x in row["times"].items())
    ratios = f"ratio {row['ratio']:5.2f} (tokens {row['tokens_ratio']:.2f})"
    return f"{times}  {ratios}  memory {row['memory_ratio']:.2f}  {difference}"


def save(
    options: argparse.Namespace, title: str, settings: dict[str, Any], **fields: Any
) -> dict[str, Any]:
    """Write a report to the file that the option --json names, if it is given. Return the report.

    Args:
        options: options of the run. The report contains those that `Defaults` lists.
        title: name of the benchmark.
        settings: further settings of the run.
        fields: results, such as `cases`.

    Raises:
        SystemExit: a case has the key `wrong`. The report is written first.
    """
    common = {name: getattr(options, name) for name in (*Defaults._fields, "clock")}
    header = measure.header(title, options.device)
    report = {**header, "settings": common | settings, **fields}
    if options.json:
        write(Path(options.json), report)
        print(f"written: {os.path.relpath(options.json)}")
    if any("wrong" in case for case in fields.get("cases", ())):
        raise SystemExit("a result of grpo_fast is wrong, and was not timed")
    return report
