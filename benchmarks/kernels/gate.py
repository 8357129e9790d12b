"""Speed regression test of the CPU kernels. It compares ratios with ratios stored for this CPU.

    python -m benchmarks.kernels.gate            compare with the stored ratios
    python -m benchmarks.kernels.gate --update   store new ratios

The exit code is 1 if a ratio is more than 15% worse than the stored ratio. Use `--update` on a
quiet machine, and commit the file.

A ratio is the time of grpo_fast divided by the time of the limit (three GEMMs, one GEMM or a copy).
Both are measured in the same process, so a slow machine affects both times equally. The gate
measures with 1 and 2 threads. It measures the AVX2 code (GRPO_FAST_CPU=avx2) and, if the CPU
supports it, the AVX-512 code. A case that looks worse is measured up to two more times, and its
best ratio counts.
"""

from __future__ import annotations

import json
import math
import os
import sys
from typing import Any, NamedTuple

from benchmarks import RESULTS, measure
from benchmarks.kernels.problem import STANDARD
from benchmarks.kernels.runner import Plan, run_child
from benchmarks.kernels.shapes import Shape
from benchmarks.options import new_parser
from benchmarks.report.files import write

TOLERANCE = 0.15
ATTEMPTS = 3
THREADS = (1, 2)
BUDGET = 2.0  # seconds of timing for each candidate
OURS = "grpo_fast (auto)"
# Operations, shapes and dtypes that the gate measures. The first shapes are those of the README.
# The last shape is for `logits_grpo_loss_inplace`, whose limit is a copy. The shapes are large
# enough to hide the overhead of a call, and small enough that the gate takes about a minute.
WORK: list[tuple[str, Shape, str]] = [
    ("linear_grpo_loss", Shape(1024, 256, 8192), "fp32"),
    ("linear_grpo_loss", Shape(512, 896, 32000), "fp32"),
    ("linear_grpo_loss", Shape(1024, 256, 8192), "bf16"),
    ("linear_grpo_loss", Shape(512, 896, 32000), "bf16"),
    ("linear_logps", Shape(1024, 256, 8192), "fp32"),
    ("logits_grpo_loss_inplace", Shape(512, 64, 32000), "fp32"),
]


class Setting(NamedTuple):
    """A case of the gate. Each case has one ratio."""

    operation: str
    shape: Shape
    dtype: str
    instructions: str
    threads: int

    @property
    def key(self) -> str:
        shape = ",".join(map(str, self.shape))
        words = self.operation, shape, self.dtype, self.instructions, self.threads, "threads"
        return " ".join(map(str, words))


def settings() -> list[Setting]:
    """Return the settings that this CPU can run.

    AVX-512 code is measured only if the CPU supports it. bf16 is measured only with native code,
    and only if the CPU has 16-bit products, because other code does not use them.
    """
    flags = set(measure.hardware("cpu").get("instructions", []))
    widest = {
        "fp32": "avx512",
        "bf16": "native" if flags & {"avx512_bf16", "amx_bf16"} else "avx512",
    }
    return [
        Setting(operation, shape, dtype, widest[dtype] if is_wide else "avx2", count)
        for is_wide in ((False, True) if "avx512f" in flags else (False,))
        for count in THREADS
        for operation, shape, dtype in WORK
    ]


def ratio(setting: Setting) -> float:
    """Measure grpo_fast and the limit in a new process, and return the ratio of their times.

    Raises:
        ValueError: grpo_fast was not timed, because of a wrong result or a crash.
    """
    plan = Plan(
        operations=[setting.operation], shapes=[setting.shape], dtypes=[setting.dtype],
        variants=[STANDARD], device="cpu", allocators=["default"], backends=["auto"],
        providers=["grpo_fast"], threads=setting.threads, budget=BUDGET, rounds=25,
    )  # fmt: skip
    os.environ["GRPO_FAST_CPU"] = setting.instructions
    try:
        cases = run_child(plan, "default", quiet=True)
    finally:
        del os.environ["GRPO_FAST_CPU"]
    row = cases[0]["rows"][OURS] if cases else {}
    if "ratio_to_limit" not in row:
        got = f"{row.get('status', 'crashed')} {row.get('reason', '')}"
        raise ValueError(f"{setting.key}: not timed: {got}")
    return float(row["ratio_to_limit"])


def best_ratio(setting: Setting, stored: float | None) -> tuple[float, bool]:
    """Measure a ratio, up to `ATTEMPTS` times if it looks worse than the stored ratio. Print it.

    Returns:
        The best ratio, and True if it is too much worse than the stored ratio.
    """
    found, is_worse = math.inf, stored is not None
    for _ in range(ATTEMPTS):
        found = min(found, ratio(setting))
        is_worse = stored is not None and found > stored * (1 + TOLERANCE)
        if not is_worse:
            break
    against = f"stored {stored:.2f}, {found / stored - 1:+.0%}" if stored else "nothing stored"
    words = f"{against}{'   REGRESSED' if is_worse else ''}"
    print(f"{setting.key:64} {found:6.2f} x limit   {words}", flush=True)
    return found, is_worse


def main(arguments: list[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--update", action="store_true", help="store this run's ratios")
    options = parser.parse_args(arguments)
    file = RESULTS / f"gate-{measure.cpu_class(measure.hardware('cpu'))}.json"
    known: dict[str, Any] = json.loads(file.read_text())["ratios"] if file.is_file() else {}
    if not known and not options.update:
        print(f"gate: nothing is stored in {file.name}; --update stores this run")
    ratios = {}
    regressed = 0
    for setting in settings():
        try:
            found, is_worse = best_ratio(setting, known.get(setting.key))
        except ValueError as error:
            print(f"gate: {error}", file=sys.stderr)
            return 1
        ratios[setting.key] = found
        regressed += is_worse and not options.update
    if options.update:
        write(file, {**measure.header("gate", "cpu"), "ratios": ratios})
        print(f"written: {os.path.relpath(file)}")
    worse = f"{regressed} of {len(ratios)} ratios are more than {TOLERANCE:.0%} worse"
    print(f"gate: {worse if known else 'done'}")
    return 1 if regressed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
