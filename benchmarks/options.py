"""Command line parsers of the benchmarks."""

from __future__ import annotations

import argparse


def new_parser(prog: str, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser without arguments for the command `prog`. It shows `doc` without wrapping."""
    return argparse.ArgumentParser(
        prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def measuring(prog: str, doc: str | None, arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments of a GPU measurement: --device (a GPU by default) and --out."""
    parser = new_parser(prog, doc)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", help="where the JSON goes")
    return parser.parse_args(arguments)
