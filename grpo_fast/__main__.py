"""Entry point of the commands `grpo-fast` and `python -m grpo_fast`."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run a command of `grpo-fast`. If a required package is missing, print its name and exit."""
    for stream in (sys.stdout, sys.stderr):
        # Print "?" for characters that the terminal cannot encode, such as → under LC_ALL=C. Check
        # the type first, because a caller may have replaced the stream with a different object.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        from grpo_fast.cli import app

        app()
    except ModuleNotFoundError as error:
        name = error.name or "grpo_fast"
        if name.startswith("grpo_fast"):
            raise
        extra = "gym" if name.startswith("reasoning_gym") else "train"
        remedy = f"pip install 'grpo-fast[{extra}]' installs all that the command needs"
        sys.exit(f"grpo-fast: the package {name} is missing; {remedy}")


if __name__ == "__main__":
    main()
