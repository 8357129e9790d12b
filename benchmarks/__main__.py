"""Entry point of `python -m benchmarks`, which does the same as `grpo-fast bench`."""

from __future__ import annotations

import sys

from benchmarks.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
