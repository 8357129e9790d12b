"""The tests of some files that need a GPU, dealt out to processes that share it.

    python -m benchmarks.gpu.shards [--processes 8] [--dry] FILE ...

A test goes to the process that its number says, so a long file is spread, too. Prints the end of
what each process printed; exit code 0 when every one passed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import ROOT
from benchmarks.options import new_parser

OPTIONS = ["-q", "-p", "no:cacheprovider", "-m", "gpu"]
SHOWN = 40  # lines of a process that failed
NOTHING = 5  # pytest's status where no test was asked for


def collected(files: list[str]) -> list[str]:
    """The ids of all tests in the files.

    Raises:
        ValueError: files that pytest cannot read, with what it says.
    """
    command = [sys.executable, "-m", "pytest", *OPTIONS, "--collect-only", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, NOTHING):
        said = (done.stdout + done.stderr)[-2000:]
        raise ValueError(f"files: expected tests, pytest ended with {done.returncode}: {said}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def run(tests: list[str], processes: int) -> int:
    """0 when every process passed."""
    shards = [shard for n in range(processes) if (shard := tests[n::processes])]
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, shard in enumerate(shards):
            file = Path(folder) / f"{number}.txt"
            # Ids in a file: they are too long for a command line.
            arguments = Path(folder) / f"{number}.ids"
            arguments.write_text("\n".join(shard))
            with file.open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.gpu.shards", "--ids", str(arguments)],
                    cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
                )  # fmt: skip
            running.append((process, file))
        codes = [process.wait() for process, _ in running]
        for number, (code, (_, file)) in enumerate(zip(codes, running, strict=True)):
            lines = file.read_text().splitlines()
            print(f"-- process {number}: status {code}, {len(shards[number])} tests")
            print("\n".join(lines[-(SHOWN if code else 1) :]))
    return 1 if any(codes) else 0


def main(arguments: list[str]) -> int:
    parser = new_parser("python -m benchmarks.gpu.shards", __doc__)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--dry", action="store_true", help="list how many tests there are")
    parser.add_argument("--ids", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.ids:
        import pytest

        return int(pytest.main([*OPTIONS, *Path(options.ids).read_text().splitlines()]))
    try:
        tests = collected(options.files)
    except ValueError as error:
        print(f"shards: {error}", file=sys.stderr)
        return 2
    print(f"{len(tests)} tests in {options.processes} processes", flush=True)
    if options.dry:
        return 0 if tests else 1
    return run(tests, options.processes) if tests else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
