"""Command line options of the benchmarks, and the reports of those in benchmarks/trainers."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """Return a function that parses a positive, finite number for an option of a parser."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < math.inf:
            what = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"expected {what} > 0, got {text!r}")
        return value

    return parse


def output_file(text: str) -> Path:
    """Parse the path of a file that is to be written, for an option of a parser."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the folder {text!r}")
    return path


def new_parser(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser without arguments. Its help shows `doc` with the line breaks unchanged."""
    return argparse.ArgumentParser(
        prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def measuring(doc: str | None, arguments: list[str]) -> argparse.Namespace:
    """Parse the options of a GPU measurement: --device (default: cuda) and --out."""
    parser = new_parser(doc)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=output_file, help="where the JSON goes")
    return parser.parse_args(arguments)


def timing_parser(
    doc: str | None, threads: int = 2, prog: str | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the options that `grpo-fast bench` and benchmarks/trainers have.

    `threads` is the default of --threads.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = new_parser(doc, prog)
    parser.add_argument("--device", default=device, choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="small sizes, a fraction of the time")
    parser.add_argument("--threads", type=positive(int), default=threads, help="CPU threads")
    parser.add_argument("--budget", type=positive(float), help="seconds of timing per candidate")
    parser.add_argument("--rounds", type=positive(int), help="at most this many rounds")
    parser.add_argument("--out", "--json", type=output_file, help="file for the report")
    return parser


# ---- benchmarks/trainers ----
Pair = tuple[float, float]  # values without --quick and with --quick


def parsed(parser: argparse.ArgumentParser, budget: Pair, rounds: Pair) -> argparse.Namespace:
    """Parse the options. Set the clock and the number of CPU threads.

    With one CPU thread, the clock is the CPU time of the process, on which other processes have
    little effect. Otherwise it is the wall time, because the CPU time would include threads that
    only wait.

    Args:
        parser: the parser.
        budget: default of --budget, in seconds.
        rounds: default of --rounds.
    """
    found = parser.parse_args()
    if found.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected cpu (torch sees no GPU), got cuda")
    found.budget = found.budget or budget[found.quick]
    found.rounds = found.rounds or rounds[found.quick]
    torch.set_num_threads(found.threads)
    found.clock = "process" if found.device == "cpu" and found.threads == 1 else "wall"
    measure.clock = found.clock
    return found


def save(
    found: argparse.Namespace, title: str, settings: dict[str, Any], **fields: Any
) -> dict[str, Any]:
    """Write a report to the file that the option --out names, if it is given. Return the report.

    Args:
        found: options of the run. The report contains those for the measurement.
        title: name of the benchmark.
        settings: further settings of the run.
        fields: results, such as `cases`.

    Raises:
        SystemExit: a case has the key `wrong`. The report is written first.
    """
    common = {name: getattr(found, name) for name in ("threads", "budget", "rounds", "clock")}
    header = measure.header(title, found.device)
    report = {**header, "settings": common | settings, **fields}
    if found.out:
        measure.write(found.out, report)
        print(f"written: {os.path.relpath(found.out)}")
    if any("wrong" in case for case in fields.get("cases", ())):
        raise SystemExit("a result of grpo_fast is wrong, and was not timed")
    return report
