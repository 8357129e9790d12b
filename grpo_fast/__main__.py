"""Entry point of `grpo-fast` and of `python -m grpo_fast`."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Run the command line, or name the package of the extra "train" that is missing."""
    for stream in (sys.stdout, sys.stderr):
        # Show ? for characters that the terminal cannot encode, such as → under LC_ALL=C. A caller
        # may have replaced the stream by an object without an encoding.
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
