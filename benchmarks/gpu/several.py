"""Run several benchmark command lines in one process, so that torch is imported only once.

    python -m benchmarks.gpu.several "linear_grpo_loss --shapes 64,64,512" "linear_logps --quick"
    [--out FILE.json] [--dry]

Each LINE writes a separate report: FILE-0.json, FILE-1.json and so on. The exit code is the largest
exit code of the command lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import command
from benchmarks.options import new_parser


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("lines", nargs="+", metavar="LINE")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry", action="store_true", help="list the cases of each line")
    options = parser.parse_args(arguments)
    codes = []
    for number, line in enumerate(options.lines):
        words = line.split()
        if options.out:
            words += ["--out", str(options.out.with_stem(f"{options.out.stem}-{number}"))]
        if options.dry:
            words.append("--dry")
        print(f"$ bench {line}", flush=True)
        codes.append(command.main(words))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
