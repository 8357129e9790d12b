"""What every benchmark of this folder takes on its command line, and where its report goes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from benchmarks.report.files import write


class Defaults(NamedTuple):
    """Threads; seconds for each candidate and most rounds, both (in full, with --quick)."""

    threads: int
    budget: tuple[float, float]
    rounds: tuple[int, int]


def new_parser(doc: str | None) -> argparse.ArgumentParser:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default=device, choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="small sizes, a fraction of the time")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--budget", type=float, help="seconds of timing for each candidate")
    parser.add_argument("--rounds", type=int, help="at most this many rounds")
    parser.add_argument("--json", help="where the report goes")
    return parser


def parsed(
    parser: argparse.ArgumentParser, defaults: Defaults, arguments: list[str] | None = None
) -> argparse.Namespace:
    """The options, with `defaults` for what was not given; torch takes the threads."""
    options = parser.parse_args(arguments)
    options.threads = options.threads or defaults.threads
    options.budget = options.budget or defaults.budget[options.quick]
    options.rounds = options.rounds or defaults.rounds[options.quick]
    torch.set_num_threads(options.threads)
    return options


def add_clock(parser: argparse.ArgumentParser) -> None:
    words = "wall, or the CPU time of the process, which other processes do not stretch"
    parser.add_argument("--clock", choices=list(measure.CLOCKS), default="wall", help=words)


def set_clock(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Time by `--clock`. CPU time wants one thread, as waiting threads would count as busy."""
    if options.clock == "process" and options.threads != 1:
        parser.error(f"--clock process: expected --threads 1, got {options.threads}")
    measure.clock = options.clock


def save(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write the report where --json says."""
    if options.json:
        write(Path(options.json), report)
        print(f"written: {os.path.relpath(options.json)}")
