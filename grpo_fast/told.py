"""Turn expected errors of a command into one line on stderr and an exit status."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import NoReturn

import typer

USAGE_ERROR, RUN_ERROR = 2, 1
LONGEST_MESSAGE = 4000  # characters: a message may quote a file


@contextlib.contextmanager
def told(debug: bool, *failures: type[Exception], code: int = RUN_ERROR) -> Iterator[None]:
    """Says in a sentence what the user can mend (ValueError) and how a run can fail, and exits.

    What nobody expected, with its type: its text may be a model's and is escaped like every other.
    """
    try:
        yield
    except ValueError as error:
        refuse(error, debug, USAGE_ERROR)
    except failures as error:
        refuse(error, debug, code)
    except ModuleNotFoundError:  # `grpo_fast.__main__` names the package
        raise
    except Exception as error:
        refuse(error, debug, RUN_ERROR, f"unexpected {type(error).__name__}: ")


def refuse(error: Exception, debug: bool | None, code: int, start: str = "") -> NoReturn:
    """Say what an error says, in one line that is safe to see, and exit with this status."""
    from grpo_fast.data import escape_control  # a message may quote a data file or a model

    if debug:
        typer.echo(escape_control("".join(traceback.format_exception(error))), err=True)
    text = start + str(error)
    shown = text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "…"
    rank = os.environ.get("RANK", "0")
    shown = shown if rank == "0" else f"rank {rank}: {shown}"
    # debug is None for a command without that option.
    hint = "  (--debug shows where)" if debug is False else ""
    typer.echo(f"grpo-fast: {escape_control(shown)}{hint}", err=True)
    sys.exit(code)
