"""Smoke test of a GPU.

The test compares the loss from an LM head, the loss from given logits, and the attention with fp64
results.

    python -m benchmarks.gpu.smoke [--out FILE] [--device cpu]

Each check is printed with its error and its time. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import measure
from benchmarks.options import measuring

LOSS_BAR = 1e-4  # allowed error of the loss, relative to the mean absolute loss of a token
ATTENTION_BAR = 1e-2  # allowed relative L2 error of the attention


def loss(device: str, operation: str) -> tuple[float, str]:
    """Compare a loss and its gradients with fp64 results.

    The second of two calls is compared. It launches the compiled kernels directly, as all later
    calls do (grpo_fast/kernels/gpu/launch.py).

    Returns:
        The largest error as a fraction of its tolerance, and a description.
    """
    from benchmarks.kernels.exact import OUR_TOLERANCE
    from benchmarks.kernels.operations import OPERATIONS, OURS, Shape
    from benchmarks.kernels.problem import make_problem
    from benchmarks.kernels.providers import providers_of
    from benchmarks.kernels.runner import route_of

    shape = Shape(512, 896, 32000) if device == "cuda" else Shape(64, 64, 512)
    problem = make_problem(shape, torch.bfloat16, device)
    [ours] = [one for one in providers_of(operation) if one.name == OURS]
    step = ours.prepare(problem)
    step()
    errors = problem.truth(OPERATIONS[operation].truth).errors(step())
    route = route_of(operation, problem)
    if device == "cuda" and "triton" not in route.lower():
        return float("inf"), f"expected the Triton kernels, the route is {route}"
    bar = OUR_TOLERANCE[torch.bfloat16]
    worst = max(e / (LOSS_BAR if name == "loss" else bar) for name, e in errors.items())
    return worst, ", ".join(f"{name} {error:.1e}" for name, error in errors.items()) + f"; {route}"


def attention(device: str) -> tuple[float, str]:
    """Run the self-test of the attention kernel that the package chooses on this device.

    Returns:
        The error as a fraction of its tolerance, and a description.
    """
    from grpo_fast.attention import dispatch
    from grpo_fast.attention.dispatch import Kind

    kind = Kind(device, torch.bfloat16 if device == "cuda" else torch.float32, 64)
    provider = dispatch.choose(kind)
    error = dispatch.pair_of(provider.attend, kind).gap()
    return error / ATTENTION_BAR, f"{error:.1e}; {provider.name}"


CHECKS: dict[str, Callable[[str], tuple[float, str]]] = {
    "head": functools.partial(loss, operation="linear_grpo_loss"),
    "logits": functools.partial(loss, operation="logits_grpo_loss"),
    "attention": attention,
}


def checked(name: str, device: str) -> dict[str, Any]:
    started = time.monotonic()
    try:
        share, words = CHECKS[name](device)
    except Exception as error:  # anything may fail on an unknown GPU; the other checks still run
        share, words = float("inf"), f"{type(error).__name__}: {error}"
    passed = share <= 1  # False for NaN
    seconds = time.monotonic() - started
    print(f"{name}: {'right' if passed else 'WRONG'} in {seconds:.1f} s: {words}", flush=True)
    return {"check": name, "passed": passed, "words": words, "seconds": round(seconds, 1)}


def main(arguments: list[str]) -> int:
    options = measuring(__doc__, arguments)
    header = measure.header("smoke", options.device)
    wanted = ("python", "torch", "triton", "transformers")
    print(", ".join(f"{name} {header['versions'][name]}" for name in wanted), flush=True)
    checks = [checked(name, options.device) for name in CHECKS]
    if options.out:
        measure.write(options.out, {**header, "checks": checks})
    return 0 if all(check["passed"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
