"""Helpers that all commands use to declare arguments and to print an error as one line."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

import typer

USAGE_ERROR, RUN_ERROR, INTERRUPTED = 2, 1, 130
Words = list[str] | None  # the arguments `key=value` of a command
LONGEST_MESSAGE = 4000  # maximum characters of an error message, which may quote a whole file


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def key_values(example: str) -> Any:
    """Declare the `key=value` arguments of a typer command, with an example as the help text."""
    return typer.Argument(metavar="[KEY=VALUE]...", help=example)


@contextlib.contextmanager
def print_errors(debug: bool, *failures: type[Exception], code: int = RUN_ERROR) -> Iterator[None]:
    """Print an error raised in this context as one line on stderr, and exit with a status code.

    For a ValueError the status is USAGE_ERROR, because the user can correct the cause. For an
    unexpected error the line includes the class of the error.

    Args:
        debug: True also prints the traceback.
        *failures: further expected classes of errors, which exit with the status `code`.
        code: exit status for `failures`.
    """
    try:
        yield
    except ValueError as error:
        refuse(error, debug)
    except failures as error:
        refuse(error, debug, code)
    except KeyboardInterrupt as error:
        refuse(error, debug, INTERRUPTED, "interrupted")
    except ModuleNotFoundError:  # `grpo_fast.__main__` tells the user which extra to install
        raise
    except Exception as error:
        refuse(error, debug, RUN_ERROR, f"unexpected {type(error).__name__}: ")


def refuse(
    error: BaseException, debug: bool | None = None, code: int = USAGE_ERROR, start: str = ""
) -> NoReturn:
    """Print an error and its notes as one line without control characters, and exit.

    Args:
        error: the error.
        debug: True also prints the traceback. None means that the command has no option --debug.
        code: the exit status.
        start: text before the message.
    """
    from grpo_fast.data import escape_control

    if debug:
        typer.echo(escape_control("".join(traceback.format_exception(error))), err=True)
    text = start + str(error)
    shown = text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "…"
    shown = "; ".join([shown, *getattr(error, "__notes__", ())])
    rank = os.environ.get("RANK", "0")
    shown = shown if rank == "0" else f"rank {rank}: {shown}"
    hint = "  (--debug shows where)" if debug is False else ""
    typer.echo(f"grpo-fast: {escape_control(shown)}{hint}", err=True)
    sys.exit(code)
