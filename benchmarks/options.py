"""The command lines of the benchmarks: a parser that shows a module's docstring as it is written,
and the two options of what measures on a GPU.
"""

from __future__ import annotations

import argparse


def new_parser(prog: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser of nothing yet, for the command `prog`."""
    return argparse.ArgumentParser(
        prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def measuring(prog: str, doc: str | None, arguments: list[str]) -> argparse.Namespace:
    """`device`, a GPU unless the command line says cpu, and `out`, a path or None."""
    parser = new_parser(prog, doc)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", help="where the JSON goes")
    return parser.parse_args(arguments)
