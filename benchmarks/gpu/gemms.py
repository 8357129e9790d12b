"""Times of the vendor library's matrix products, which decide how many rows a chunk should have.

    python -m benchmarks.gpu.gemms [--out FILE] [--device cpu]

Several numbers of rows are timed, because a partly filled last wave of thread blocks costs time. dW
is computed in three ways: added to an fp32 sum, written in fp32, and written in bf16. The report
contains milliseconds and TFLOP/s. On a CPU, the sizes are tiny.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.gpu import by_size

VOCAB, HIDDEN = 151936, (4096, 2048, 896)
ROWS = (2752, 4096, 8192)


def products(rows: int, hidden: int, vocab: int, device: str) -> dict[str, Callable[[], Any]]:
    """Return the products of one chunk, keyed by name.

    The data is random, because products of zeros run faster.
    """
    wide = torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    d, weight, h = normal(rows, vocab), normal(vocab, hidden), normal(rows, hidden)
    calls: dict[str, Callable[[], Any]] = {
        "logits bf16": lambda: torch.mm(h, weight.t(), out=d),
        "dH bf16": lambda: d @ weight,
        "dW bf16": lambda: d.t() @ h,
    }
    if device == "cuda":  # torch has no 16-bit product with an fp32 result on a CPU
        total = torch.zeros(vocab, hidden, device=device)
        calls |= {
            "dH fp32": lambda: torch.mm(d, weight, out_dtype=wide),
            "dW fp32": lambda: torch.mm(d.t(), h, out_dtype=wide),
            "dW fp32 accumulated": lambda: torch.addmm(total, d.t(), h, out_dtype=wide, out=total),
        }
    return calls


def timed(rows: int, hidden: int, vocab: int, device: str) -> list[dict[str, Any]]:
    """Time every product of one size. A product that fails is listed with its error."""
    calls = products(rows, hidden, vocab, device)
    found, failed = {}, []
    for name, call in calls.items():
        try:
            call()
            found[name] = call
        except RuntimeError as error:  # this build of torch may lack a product
            reason = str(error).splitlines()[0][:160]
            failed.append({"product": name, "rows": rows, "hidden": hidden, "reason": reason})
    entries = []
    for name, samples in measure.interleaved(found, device, budget=0.1, rounds=9).items():
        spread = measure.spread(samples)
        rate = 2 * rows * hidden * vocab / spread["median_ms"] / 1e9
        entries.append(
            {"product": name, "rows": rows, "hidden": hidden, "vocab": vocab, **spread}
            | {"tflops": rate}
        )
        print(f"{rows:6} {hidden:5} {name:22} {spread['median_ms']:8.3f} ms {rate:7.1f} TFLOP/s")
    for entry in failed:
        print(f"{rows:6} {hidden:5} {entry['product']:22} does not run: {entry['reason']}")
    return entries + failed


def main(arguments: list[str]) -> int:
    sizes = [(n, h, VOCAB) for h in HIDDEN for n in ROWS]
    return by_size.run("gemms", __doc__, arguments, timed, sizes, "gemms", "gemms")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
