"""The command `grpo-fast`, also `python -m grpo_fast`: says which package is missing."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Runs `grpo_fast.cli`, which needs the extra "train"; the library needs torch and triton only.

    A character that the terminal's encoding lacks (→ under LC_ALL=C) is shown as ?.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a caller may have put something else there
            stream.reconfigure(errors="replace")
    try:
        from grpo_fast.cli import app

        app()
    except ModuleNotFoundError as error:
        if (error.name or "grpo_fast").startswith("grpo_fast"):
            raise
        brings = "pip install 'grpo-fast[train]' brings what it needs"
        sys.exit(f"grpo-fast: the package {error.name} is missing; {brings}")


if __name__ == "__main__":
    main()
