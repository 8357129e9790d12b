"""Self-tests of the kernels, the attention, packed rows and the sampling loop on this machine.

Most self-tests compare a pair of computations that must agree. `grpo_fast/attention/README.md`
lists all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from grpo_fast import LossConfig, LossOutput, linear_grpo_loss
from grpo_fast.attention import check_tolerance
from grpo_fast.attention.dispatch import Kind, candidates, pair_of
from grpo_fast.data.splits import Splits
from grpo_fast.errors import reason, require
from grpo_fast.kernels import route
from grpo_fast.kernels.agree import Pair, draw
from grpo_fast.rollout.own.engine import LOOP, gap_of
from grpo_fast.train.config import load_recipe
from grpo_fast.train.policy import build_tokenizer, load_policy, packed_gap

BACKENDS = ("torch", "cpu", "triton")
DTYPES = (torch.float32, torch.bfloat16)
HIDDEN = 64  # size of hidden states, and head dimension in the tests of attention kernels
VOCABULARY = 4096  # large enough to select the kernels for large vocabularies
LOGPS = 1e-5  # allowed absolute error of loss and logps in any dtype
GRADIENTS = {torch.float32: 2e-6, torch.bfloat16: 3e-3}  # allowed relative error
MODEL = ("model.config.hidden_size=16", "model.config.intermediate_size=32",
         "model.config.num_hidden_layers=1")  # fmt: skip
Gap = Callable[[], float] | str  # a function that measures a gap, or why it cannot run here


def self_checks() -> tuple[bool, list[str]]:
    """Run every self-test on the GPU, or on the CPU if there is no GPU.

    Returns:
        True if no self-test failed, and a line of the report for each self-test.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checks = [checked(*entry) for entry in table(device)]
    return all(ok for ok, _ in checks), [line for _, line in checks]


def checked(name: str, bound: float, gap: Gap) -> tuple[bool, str]:
    """Measure a gap. Return True if it is allowed or cannot be measured here, and its line."""
    if isinstance(gap, str):
        return True, f"skipped  {name} {gap}"
    note = ""
    try:
        error = gap()
    except Exception as failure:  # a kernel may raise any exception; the other tests must still run
        error = float("inf")
        note = reason(failure)
    ok = error <= bound  # False if the error is NaN
    word = "ok" if ok else "FAILED"
    return ok, f"{word:8} {name} {error:.1e} (allowed {bound:.1e}) {note}"


def table(device: torch.device) -> Iterator[tuple[str, float, Gap]]:
    """Yield the name of each self-test, its largest allowed gap, and the gap to measure."""
    # 1. Compare loss and gradients of every backend with an fp64 reference.
    for backend, dtype in product(BACKENDS, DTYPES):
        name = f"{backend} {str(dtype).removeprefix('torch.')}"
        missing = route.unavailable(backend, device.type)
        if missing is not None:
            yield name, 0.0, missing.splitlines()[0]
            continue
        for what, pair in kernel_pairs(backend, dtype, device).items():
            yield f"{name}: {what}", pair.bar, pair.gap
    # 2. Compare every attention kernel with a reference that computes the full score matrix.
    for dtype, extra in product(DTYPES, ("", ", window", ", softcap")):
        is_special = extra == ", window", extra == ", softcap"
        kind = Kind(device.type, dtype, HIDDEN, *is_special, gpu=device.index)
        for provider in candidates(kind):
            pair = pair_of(provider.attend, kind)
            name = f"attention {provider.name} {str(dtype).removeprefix('torch.')}{extra}"
            yield name, pair.bar, pair.gap
    # 3. Compare packed rows and our sampling loop with a small model's forward pass.
    name = "packed rows and our loop: logps against the model's"
    yield name, check_tolerance(torch.float32), partial(small, f"model.device={device}")


def small(on_device: str) -> float:
    """Return how far packed rows and our sampling loop differ from a small model's own logps."""
    config = load_recipe("sort", [on_device, *MODEL])
    torch.manual_seed(config.seed)
    policy = load_policy(config.model, build_tokenizer(config.model, Splits(config.data, 0)))
    require(policy.unshared is None, "packed rows", "the model's logps", policy.unshared)
    packed = packed_gap(policy)
    with policy.generation():
        gaps = torch.tensor([packed, gap_of(policy, LOOP)])
    return float(gaps.max())  # torch's max propagates NaN


def kernel_pairs(backend: str, dtype: torch.dtype, device: torch.device) -> dict[str, Pair]:
    """Return the pairs of computations that must agree for one backend, keyed by a description."""
    hidden = draw(4, 9, HIDDEN, seed=0).to(dtype)
    weight = (draw(VOCABULARY, HIDDEN, seed=1) / HIDDEN**0.5).to(dtype)
    ids = torch.arange(36).view(4, 9) * 127 % VOCABULARY
    advantages = torch.tensor([1.0, -0.5, -1.0, 2.0])
    old_logps = torch.full((4, 9), -8.3)  # logps vary around -log V, so some ratios are clipped

    def run(h: Tensor, w: Tensor, at: Any = device, by: str = backend) -> LossOutput:
        rows = slice(4 - len(h), 4)
        return linear_grpo_loss(
            h.to(at), w.to(at), ids[rows].to(at), advantages[rows].to(at),
            LossConfig(loss_type="grpo"), old_logps=old_logps[rows].to(at), backend=by,
        )  # fmt: skip

    def exact(h: Tensor, w: Tensor) -> LossOutput:
        return run(h.double(), w.double(), "cpu", "torch")

    def loss(h: Tensor, w: Tensor) -> Tensor:
        return run(h, w).loss

    def values(out: LossOutput) -> tuple[Tensor, Tensor]:
        return out.loss, out.logps

    given = hidden, weight
    return {
        "loss and logps against fp64": Pair(
            lambda *x: values(run(*x)), lambda *x: values(exact(*x)), given, LOGPS, in_nats=True
        ),
        "loss and gradients against fp64": Pair(
            loss, lambda *x: exact(*x).loss, given, GRADIENTS[dtype], gradients=True, by_norm=True
        ),
        "same bits again": Pair(loss, loss, given, 0.0, gradients=True),
        "same bits alone": Pair(
            lambda h, w: run(h, w).logps[3:], lambda h, w: run(h[3:], w).logps, given, 0.0
        ),
    }
