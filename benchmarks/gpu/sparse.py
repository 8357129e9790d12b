"""Times of dense gradients and of gradients from live tiles (live_tiles.py), for a peaked softmax.

    python -m benchmarks.gpu.sparse [--out FILE] [--device cpu]

A call computes dH and dW from hidden states. Its error is compared with the bound of `grad_filter`
before it is timed. On a CPU, the problem is built, but no kernel runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.gpu import by_size
from benchmarks.gpu.live_tiles import LiveTiles, live_product, live_tiles, weighed_exponentials
from benchmarks.gpu.predict import LIVE_SHARES
from grpo_fast.kernels.gpu.exponentials import head_exponentials
from grpo_fast.kernels.gpu.gradients import add_targets_, scaled_hidden, times, write_hidden_
from grpo_fast.kernels.types import LogitTransform

ROWS, VOCAB, HIDDEN = 8192, 151936, (4096, 896)
ROUNDING = 3e-3  # relative rounding error of a bf16 gradient


class Problem(NamedTuple):
    """Inputs of a call, and a buffer for its exponentials."""

    hidden: Tensor  # (T, H)
    weight: Tensor  # (V, H)
    target_ids: Tensor  # (T,)
    grad_logps: Tensor  # (T,) fp32
    matrix: Tensor  # (T, V), overwritten with the exponentials


def peaked(rows: int, hidden: int, vocab: int, device: str) -> Problem:
    """Build a problem with a softmax like that of a trained model.

    Low ids are likely, as in a byte-pair vocabulary, and four of five rows are nearly certain. At V
    = 151936, the entropy has a mean of 0.7 nats and a median of 0.4.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    weight = torch.randn(vocab, hidden, **options) * (6 / hidden**0.5)
    weight[:, 0] = -1.5 * (torch.arange(vocab, device=device) + 2.0).log()
    states = torch.randn(rows, hidden, **options)
    states[:, 0] = 1.0
    states *= 1 + 2 * (torch.rand(rows, 1, device=device) < 0.8)
    chances = ((block @ weight.t()).float().softmax(-1) for block in states.split(256))
    targets = torch.cat([p.multinomial(1)[:, 0] for p in chances])
    slopes = torch.randn(rows, device=device)
    return Problem(states, weight, targets, slopes, states.new_empty(rows, vocab))


def gradients(p: Problem, tolerance: float | None) -> tuple[Tensor, Tensor, LiveTiles | None]:
    """Return dH and dW of Σ grad_logps·logps, and the live tiles or None.

    Args:
        p: the problem.
        tolerance: fraction of the gradient mass (see live_tiles.py) that may be dropped. None
            computes the dense gradients.
    """
    hidden, weight, ids, slopes, matrix = p
    if tolerance is None:
        found, log_sums = (
            head_exponentials(hidden, weight, None, ids, LogitTransform(), matrix),
            None,
        )
    else:
        found, log_sums = weighed_exponentials(hidden, weight, ids, LogitTransform(), matrix)
    by_row, by_target = times(slopes, found.unit, found.target_unit, hidden.shape[0])
    scaled, live = scaled_hidden(hidden, by_row, hidden.dtype), None
    if tolerance is None or log_sums is None:
        product = torch.mm(matrix, weight, out_dtype=torch.float32)
        d_weight = matrix.t() @ scaled
    else:
        live = live_tiles(log_sums, found.stats[0], slopes, by_target, tolerance)
        product = live_product(matrix, weight, live, torch.empty_like(hidden, dtype=torch.float32))
        d_weight = live_product(matrix, scaled, live, torch.empty_like(weight), transposed=True)
    d_hidden = write_hidden_(torch.empty_like(hidden), product, by_row, by_target, ids, weight)
    sorted_ids, order = ids.sort(stable=True)
    add_targets_(d_weight, sorted_ids, order, by_target, hidden, matrix, scaled)
    return d_hidden, d_weight, live


def check(p: Problem, found: tuple, exact: tuple) -> None:
    """Check the errors of dH and dW against the bounds of `grad_filter`.

    Raises:
        ValueError: a gradient differs from the dense one by more than the dropped mass allows.
    """
    for ours, dense, other in zip(found, exact, (p.weight, p.hidden), strict=False):
        most = found[2].dropped * other.float().norm(dim=1).max()
        most += 2 * ROUNDING * dense.float().norm()
        error = (ours.float() - dense.float()).norm()
        if not error <= most:
            raise ValueError(
                f"gradient: expected an error of at most {most.item():.3g}, got {error:.3g}"
            )


def timed(rows: int, hidden: int, vocab: int, device: str) -> list[dict[str, Any]]:
    """Time the dense call and one call for each tolerance, and return their entries."""
    p = peaked(rows, hidden, vocab, device)
    if device == "cpu":
        return [{"rows": rows, "hidden": hidden, "call": "dense", "reason": "needs a GPU"}]
    shares: dict[str, float] = {"dense": 1.0}
    calls: dict[str, Callable[[], Any]] = {"dense": partial(gradients, p, None)}
    exact = gradients(p, None)
    for tolerance in LIVE_SHARES:
        found = gradients(p, tolerance)
        check(p, found, exact)
        calls[f"{tolerance:g}"] = partial(gradients, p, tolerance)
        shares[f"{tolerance:g}"] = found[2].is_live.double().mean().item() if found[2] else 1.0
    entries = []
    for name, samples in measure.interleaved(calls, device, budget=0.3, rounds=7).items():
        entry = {"rows": rows, "hidden": hidden, "call": name, "live": shares[name]}
        entries.append(entry | measure.spread(samples))
        time = f"{entries[-1]['median_ms']:8.3f} ms"
        print(f"{hidden:5} {name:6} {time}, {shares[name]:.3f} of the tiles", flush=True)
    return entries


def main(arguments: list[str]) -> int:
    sizes = [(ROWS, h, VOCAB) for h in HIDDEN]
    return by_size.run("sparse", __doc__, arguments, timed, sizes, "live tiles", "live_tiles")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
