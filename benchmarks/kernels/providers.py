"""All providers of an operation, and those that run other libraries.

Each library is called as its documentation recommends.

Most of these libraries only compute logps. Plain torch code then computes the loss from the logps.
If a library is not installed, or does not support the device or dtype, it is not timed, and the
table shows the reason.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import ours
from benchmarks.kernels.ours import Provider, runs_anywhere
from benchmarks.kernels.problem import EPSILON, Problem, spread
from benchmarks.kernels.shapes import COMPLETIONS
from benchmarks.measure import Step

QUACK_ROWS = 4096  # the default chunk of QuACK
# Type of a function that prepares a problem. It returns a function without arguments that computes
# the logps, (N,). The logps of masked rows are not compared.
Logps = Callable[[Problem], Callable[[], Tensor]]


def plain_logps(hidden: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
    """Return the fp32 logps (N,) of the targets, computed from all logits at once."""
    return -F.cross_entropy((hidden @ weight.T).float(), target_ids, reduction="none")


def plain_loss(hidden: Tensor, weight: Tensor, target_ids: Tensor, *arguments: Any) -> Tensor:
    return ours.dapo(plain_logps(hidden, weight, target_ids), *arguments)


def plain(problem: Problem) -> Callable[[], Tensor]:
    return lambda: plain_logps(problem.hidden, problem.weight, problem.target_ids)


def compiled(problem: Problem) -> Callable[[], Tensor]:
    function = torch.compile(plain_logps, dynamic=False)
    return lambda: function(problem.hidden, problem.weight, problem.target_ids)


def compiled_loss(problem: Problem) -> Step:
    """Return a step in which torch.compile compiles the logps and the loss as one graph."""
    function, arguments = torch.compile(plain_loss, dynamic=False), ours.dapo_arguments(problem)
    return ours.differentiate(
        problem, lambda: function(problem.hidden, problem.weight, problem.target_ids, *arguments)
    )


def trl(problem: Problem) -> Callable[[], Tensor]:
    """Compute logps as the fused LM head of TRL's `GRPOTrainer` does (`add_fused_lm_head`).

    On a GPU, TRL removes masked rows before the matrix product. This function does the same.
    """
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE  # the trainer's constant
    mask = problem.mask_or_none if problem.hidden.is_cuda else None

    def call() -> Tensor:
        hidden, target_ids = problem.hidden, problem.target_ids
        if mask is not None:
            hidden, target_ids = hidden[mask], target_ids[mask]
        logps = ChunkedLogProbFunction.apply(
            hidden, problem.weight, None, target_ids, 1.0, chunk, None, 1.0, ()
        )[0]
        return logps if mask is None else logps.new_zeros(len(mask)).masked_scatter(mask, logps)

    return call


def cce(problem: Problem) -> Callable[[], Tensor]:
    """Compute logps with Cut Cross-Entropy. On a CPU, use its implementation "torch_compile"."""
    from cut_cross_entropy import linear_cross_entropy

    implementation = "cce" if problem.hidden.is_cuda else "torch_compile"
    targets = problem.labels

    def call() -> Tensor:
        inputs = (problem.hidden, problem.weight, targets)
        return -linear_cross_entropy(*inputs, reduction="none", impl=implementation).float()

    return call


def liger_sm90(problem: Problem) -> Callable[[], Tensor]:
    """Compute logps with Liger's CuTe-DSL cross entropy for Hopper, which stores no logits.

    Its backward pass takes a gradient for each token, so it can compute a GRPO loss. The signature
    is that of linkedin/Liger-Kernel at ead96b61 and of version 0.8.5.
    """
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction,
    )

    targets = problem.labels
    return lambda: (
        -LigerFusedLinearScaledCrossEntropyFunction.apply(problem.hidden, problem.weight, targets)
    )


def quack(problem: Problem) -> Step:
    """Return a step of QuACK's chunked cross entropy, with its default chunk.

    It returns the sum or the mean over all tokens, and its backward pass takes one scalar. It
    therefore cannot compute a GRPO loss, whose tokens have different coefficients. The signatures
    are from Dao-AILab/quack at c8ec3170, version 0.6.4. There, QuACK chooses between two paths.
    "scaled exponentials" (sm_90, bf16, V a multiple of 128) stores exponentials in 16 bits.
    "chunked logits" stores logits. Its tuner would try about 44 configurations for each product, so
    it is off.
    """
    from quack.linear_cross_entropy import chunked_linear_cross_entropy, scaled_exp_lce_supported

    inputs = (problem.hidden, problem.weight, problem.labels)
    options: dict[str, Any] = {"chunk_size": QUACK_ROWS, "reduction": "mean"}
    is_fused = scaled_exp_lce_supported(*inputs[:2], **options)
    step = ours.differentiate(
        problem, lambda: chunked_linear_cross_entropy(*inputs, **options, tuned=False)
    )
    path = "scaled exponentials" if is_fused else "chunked logits"
    return dataclasses.replace(step, path=path)


def liger_loss(problem: Problem) -> Step:
    """Return a step of Liger's chunked GRPO loss without KL, with one completion per chunk."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    head = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=EPSILON, epsilon_high=EPSILON, loss_type="dapo"
    )
    hidden = problem.hidden.unflatten(0, (COMPLETIONS, -1))
    target_ids, old_logps, mask = (
        x.view(COMPLETIONS, -1) for x in (problem.target_ids, problem.old_logps, problem.mask)
    )
    inputs = (hidden, problem.weight, target_ids, mask, problem.advantages)
    return ours.differentiate(problem, lambda: head(*inputs, old_per_token_logps=old_logps)[0])


# ---- from logits ----


def plain_logits_loss(logits: Tensor, target_ids: Tensor, *arguments: Tensor | int) -> Tensor:
    """Compute the loss from logits (B, L + 1, V) in plain torch.

    The last of the L + 1 rows is masked instead of sliced off, because slicing would copy the
    logits.
    """
    logps = -F.cross_entropy(logits.flatten(0, 1).float(), target_ids, reduction="none")
    return ours.dapo(logps, *arguments)  # type: ignore[arg-type]


def plain_logits(compile_it: bool, problem: Problem) -> Step:
    function: Callable[..., Tensor] = plain_logits_loss
    if compile_it:
        function = torch.compile(plain_logits_loss, dynamic=False)
    *tensors, count = problem.target_ids, *ours.dapo_arguments(problem)
    arguments = (*map(spread, tensors), count)
    return ours.differentiate_logits(problem, lambda logits: function(logits, *arguments))


def needs_hopper(device: str, dtype: torch.dtype) -> str | None:
    is_gpu = device == "cuda" and torch.cuda.is_available()
    if not is_gpu or torch.cuda.get_device_capability() != (9, 0):
        return "its CuTe-DSL kernels need an sm_90 GPU"
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed"
    return None if dtype == torch.bfloat16 else "takes bf16 only"


def as_loss(logps: Logps, problem: Problem) -> Step:
    call, arguments = logps(problem), ours.dapo_arguments(problem)
    return ours.differentiate(problem, lambda: ours.dapo(call(), *arguments))


def as_cross_entropy(logps: Logps, problem: Problem) -> Step:
    call = logps(problem)
    return ours.differentiate(problem, lambda: ours.mean_nll(call(), problem))


def as_logps(logps: Logps, problem: Problem, gradient: bool) -> Step:
    return ours.logps_step(problem, logps(problem), gradient)


# Libraries that compute logps. For each name: the function that prepares the logps, the required
# package, and the `why_not` function.
LOGPS: dict[str, tuple[Logps, str | None, Callable[[str, torch.dtype], str | None]]] = {
    "plain torch": (plain, None, runs_anywhere),
    "torch.compile": (compiled, None, runs_anywhere),
    "TRL": (trl, "trl", runs_anywhere),
    "CCE": (cce, "cut_cross_entropy", runs_anywhere),
    "Liger SM90": (liger_sm90, "liger_kernel", needs_hopper),
}


def from_logps(prepare: Callable[..., Step]) -> list[Provider]:
    """Return a provider for each library in LOGPS. Its step is `prepare(logps, problem)`."""
    return [
        Provider(name, "peer", partial(prepare, logps), needs, why_not)
        for name, (logps, needs, why_not) in LOGPS.items()
    ]


def loss_peers() -> list[Provider]:
    found = [
        x._replace(prepare=compiled_loss) if x.name == "torch.compile" else x
        for x in from_logps(as_loss)
    ]
    return [*found, Provider("Liger", "peer", liger_loss, needs="liger_kernel")]


def cross_entropy_peers() -> list[Provider]:
    quack_peer = Provider("QuACK cross entropy", "peer", quack, "quack", needs_hopper)
    return [quack_peer, *from_logps(as_cross_entropy)]


def logits_peers() -> list[Provider]:
    return [
        Provider("plain torch", "peer", partial(plain_logits, False)),
        Provider("torch.compile", "peer", partial(plain_logits, True)),
    ]


# ---- all providers ----
def providers_of(operation: str) -> list[Provider]:
    """Return the providers of an operation: its limits, grpo_fast and other libraries."""
    if operation == "linear_grpo_loss":
        return [*ours.gemm_limits(3), *ours.providers(ours.loss), *loss_peers()]
    if operation == "linear_grpo_loss_frozen":
        found = [*ours.gemm_limits(2), *ours.providers(ours.loss), *loss_peers()]
        return [x._replace(prepare=partial(frozen, x)) for x in found]
    if operation == "linear_cross_entropy":
        found = ours.providers(ours.cross_entropy)
        return [*ours.gemm_limits(3), *found, *cross_entropy_peers()]
    if operation in ("linear_logps", "linear_logps_backward"):
        gradient = operation.endswith("backward")
        found = ours.gemm_limits(3 if gradient else 1)
        found += ours.providers(ours.logps, gradient=gradient)
        return found + from_logps(partial(as_logps, gradient=gradient))
    inplace = operation.endswith("inplace")
    found = ours.providers(ours.logits_loss, inplace=inplace)
    return [ours.COPY, *found, *(() if inplace else logits_peers())]


def frozen(provider: Provider, problem: Problem) -> Step:
    """Return the step of a provider for a weight that does not require grad."""
    return provider.prepare(problem.frozen)
