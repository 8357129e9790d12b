"""Arguments of commands, and the conversion of errors to one line and an exit status."""

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
LONGEST_MESSAGE = 4000  # characters; a message may quote a file


Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def key_values(example: str) -> Any:
    """Return the typer declaration of `key=value` arguments, with an example as its help text."""
    return typer.Argument(metavar="[KEY=VALUE]...", help=example)


@contextlib.contextmanager
def told(debug: bool, *failures: type[Exception], code: int = RUN_ERROR) -> Iterator[None]:
    """Convert an error inside this context to one line on stderr and an exit status.

    A ValueError ends with USAGE_ERROR, because the user can correct its cause. The line of an
    unexpected error includes the class of the error.

    Args:
        debug: also print the traceback.
        *failures: classes of expected errors, which end with the status `code`.
        code: exit status of `failures`.
    """
    try:
        yield
    except ValueError as error:
        refuse(error, debug)
    except failures as error:
        refuse(error, debug, code)
    except KeyboardInterrupt as error:
        refuse(error, debug, INTERRUPTED, "interrupted")
    except ModuleNotFoundError:  # `grpo_fast.__main__` says which extra to install
        raise
    except Exception as error:
        refuse(error, debug, RUN_ERROR, f"unexpected {type(error).__name__}: ")


def refuse(
    error: BaseException, debug: bool | None = None, code: int = USAGE_ERROR, start: str = ""
) -> NoReturn:
    """Print an error and its notes as one line without control characters, and exit.

    Args:
        error: the error.
        debug: also print the traceback. None means that the command has no option --debug.
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
