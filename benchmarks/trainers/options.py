"""Command line options of the benchmarks in this folder, and their reports."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from benchmarks import options as base
from benchmarks.report.files import write


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
