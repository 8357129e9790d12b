"""The forward kernels side by side: Triton's, those in CUDA C++, and the vendor's bare product.

    python -m benchmarks.gpu.forward [--out FILE] [--device cpu]

Each is compared with Triton's result before it is timed (which the tests hold to fp64), with the
exponentials stored and without. On the CPU tiny sizes, where only the product runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import measure
from benchmarks.gpu import by_size
from benchmarks.gpu.candidates import Candidate, call_of
from benchmarks.gpu.cuda_forward.kernel import CONFIGS, CudaConfig, using
from benchmarks.gpu.tune import agree, copied
from grpo_fast.kernels.gpu.configs import architecture

ROWS, VOCAB, HIDDEN = 8192, 151936, (4096, 2048, 896)
KINDS = {"stored": "exponentials", "bare": "linear"}


def in_cuda(config: CudaConfig, call: Callable[[], Any]) -> Any:
    """The call with the kernel in CUDA C++, which must have started."""
    with using(config) as started:
        result = call()
    if not started:
        raise RuntimeError(f"expected sm_90, got {architecture(torch.device('cuda', 0))}")
    return result


def forms(kind: str, rows: int, hidden: int, vocab: int, device: str) -> dict[str, Any]:
    """Name -> call, Triton's first."""
    call = call_of(Candidate(KINDS[kind], "bfloat16", ()), rows, hidden, vocab, device)
    found = {f"Triton, {kind}": call}
    for config in CONFIGS:
        tile = f"{config.block_t} x {config.block_v}, {config.teams} team(s)"
        found[f"CUDA C++ {tile}, {kind}"] = partial(in_cuda, config, call)
    return found


def checked(calls: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the calls that run and agree with the first, why the others are not timed)."""
    expected, right, failures = None, {}, {}
    for name, call in calls.items():
        try:
            result = call()
            if expected is None:
                expected = copied(result)
            if agree(result, expected):
                right[name] = call
            else:
                failures[name] = "wrong: not timed"
        except Exception as error:  # one may be refused at launch; the others go on
            failures[name] = f"{type(error).__name__}: {str(error)[:120]}"
        if expected is None:  # nothing to compare with
            break
    return right, failures


def timed(rows: int, hidden: int, vocab: int, device: str) -> list[dict[str, Any]]:
    states, weight = (
        torch.randn(n, hidden, device=device, dtype=torch.bfloat16) for n in (rows, vocab)
    )
    logits = states.new_empty(rows, vocab)
    calls: dict[str, Any] = {"vendor's product": lambda: torch.mm(states, weight.t(), out=logits)}
    failures: dict[str, str] = {}
    for kind in KINDS:
        right, wrong = checked(forms(kind, rows, hidden, vocab, device))
        calls |= right
        failures |= wrong
    where, entries = {"rows": rows, "hidden": hidden, "vocab": vocab}, []
    for name, samples in measure.interleaved(calls, device, budget=0.1, rounds=9).items():
        spread = measure.spread(samples)
        rate = 2 * rows * hidden * vocab / spread["median_ms"] / 1e9
        entries.append({"product": name, **where, **spread, "tflops": rate})
        print(f"{hidden:5} {name:40} {spread['median_ms']:8.3f} ms {rate:7.1f} TFLOP/s", flush=True)
    for name, reason in failures.items():
        entries.append({"product": name, **where, "reason": reason})
        print(f"{hidden:5} {name:40} {reason}", flush=True)
    return entries


def main(arguments: list[str]) -> int:
    sizes = [(ROWS, h, VOCAB) for h in HIDDEN]
    return by_size.run("forward", __doc__, arguments, timed, sizes, "forward kernels", "forwards")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
