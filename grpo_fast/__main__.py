"""Entry point of `grpo-fast` and of `python -m grpo_fast`."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command line. If a package of the extra "train" is missing, exit with its name."""
    for stream in (sys.stdout, sys.stderr):
        # Print ? for characters that the terminal cannot encode, such as → under LC_ALL=C. Check
        # the type, because a caller may have replaced the stream by a different object.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        from grpo_fast.cli import app

        app()
    except ModuleNotFoundError as error:
        if (error.name or "grpo_fast").startswith("grpo_fast"):
            raise
        remedy = "pip install 'grpo-fast[train]' installs all that the command needs"
        sys.exit(f"grpo-fast: the package {error.name} is missing; {remedy}")


if __name__ == "__main__":
    main()
