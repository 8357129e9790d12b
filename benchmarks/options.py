"""Command line parsers of the benchmarks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


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


def new_parser(doc: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser without arguments. Its help shows `doc` with the line breaks unchanged."""
    return argparse.ArgumentParser(
        prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def measuring(doc: str | None, arguments: list[str]) -> argparse.Namespace:
    """Parse the options of a GPU measurement: --device (default: cuda) and --out."""
    parser = new_parser(doc)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", help="where the JSON goes")
    return parser.parse_args(arguments)
