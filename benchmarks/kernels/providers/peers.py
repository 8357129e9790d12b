"""The peers, called as their own documentation says.

Most give logps; the objective is then two lines of torch. A package that is not installed, or a
device or dtype that it does not take, makes its provider say so: nothing is imitated.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.problem import EPSILON, Problem, spread
from benchmarks.kernels.providers.base import (
    Provider,
    dapo,
    dapo_arguments,
    differentiate,
    differentiate_logits,
    differentiate_logps,
    without_gradient,
)
from benchmarks.kernels.shapes import COMPLETIONS
from benchmarks.measure import Step

IGNORED = -100
# Problem -> (() -> logps (N,)); what a masked row gets does not matter.
Logps = Callable[[Problem], Callable[[], Tensor]]


def plain_logps(hidden: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
    """What one writes first: all logits, then cross entropy in fp32."""
    return -F.cross_entropy((hidden @ weight.T).float(), target_ids, reduction="none")


def plain_loss(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    count: int,
) -> Tensor:
    return dapo(plain_logps(hidden, weight, target_ids), old, advantages, mask, count)


def plain(problem: Problem) -> Callable[[], Tensor]:
    return lambda: plain_logps(problem.hidden, problem.weight, problem.target_ids)


def compiled(problem: Problem) -> Callable[[], Tensor]:
    function = torch.compile(plain_logps, dynamic=False)
    return lambda: function(problem.hidden, problem.weight, problem.target_ids)


def compiled_loss(problem: Problem) -> Step:
    """The logps and the objective in one graph."""
    function, arguments = torch.compile(plain_loss, dynamic=False), dapo_arguments(problem)
    return differentiate(
        problem, lambda: function(problem.hidden, problem.weight, problem.target_ids, *arguments)
    )


def trl(problem: Problem) -> Callable[[], Tensor]:
    """`GRPOTrainer`'s fused head (trl.trainer.utils.add_fused_lm_head), logps only.

    On a GPU it scores active rows.
    """
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE  # the trainer's own constant
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
    """Cut Cross-Entropy (torch_compile without a GPU); masked rows are ignored targets."""
    from cut_cross_entropy import linear_cross_entropy

    implementation, targets = "cce" if problem.hidden.is_cuda else "torch_compile", ignored(problem)
    return lambda: (
        -linear_cross_entropy(
            problem.hidden, problem.weight, targets, reduction="none", impl=implementation
        ).float()
    )


def liger_sm90(problem: Problem) -> Callable[[], Tensor]:
    """Liger's store-free scaled cross entropy (CuTe-DSL) for Hopper."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction,
    )

    targets = ignored(problem)
    return lambda: (
        -LigerFusedLinearScaledCrossEntropyFunction.apply(problem.hidden, problem.weight, targets)
    )


def verl(problem: Problem) -> Callable[[], Tensor]:
    """verl's Triton kernel; it gives the entropy, too."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda: linear_cross_entropy(
        problem.hidden, problem.weight, problem.target_ids, 1.0, "none"
    )[0]


def ignored(problem: Problem) -> Tensor:
    mask = problem.mask_or_none
    return problem.target_ids if mask is None else problem.target_ids.masked_fill(~mask, IGNORED)


def liger_loss(problem: Problem) -> Step:
    """Liger's chunked loss with its own defaults (one completion per chunk, compiled), KL off."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    head = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, epsilon_low=EPSILON, epsilon_high=EPSILON, loss_type="dapo"
    )
    padded = (COMPLETIONS, -1)
    hidden = problem.hidden.unflatten(0, padded)
    target_ids, old_logps, mask = (
        x.view(padded) for x in (problem.target_ids, problem.old_logps, problem.mask)
    )
    return differentiate(
        problem,
        lambda: head(
            hidden,
            problem.weight,
            target_ids,
            mask,
            problem.advantages,
            old_per_token_logps=old_logps,
        )[0],
    )


def quack_dense(problem: Problem) -> Step:
    """QuACK's chunked linear cross entropy, mean reduction: no per-token coefficients."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return differentiate(
        problem,
        lambda: chunked_linear_cross_entropy(problem.hidden, problem.weight, problem.target_ids),
    )


def torch_dense(chunked: bool) -> Callable[[Problem], Step]:
    """torch's own fused linear cross entropy, mean reduction."""

    def prepare(problem: Problem) -> Step:
        options = torch.nn.LinearCrossEntropyOptions() if chunked else None
        return differentiate(
            problem,
            lambda: F.linear_cross_entropy(
                problem.hidden, problem.weight, problem.target_ids, options=options
            ),
        )

    return prepare


# ---- from logits ----


def plain_logits_loss(logits: Tensor, target_ids: Tensor, *arguments: Tensor | int) -> Tensor:
    """All rows, the spare ones masked: a slice of the logits would be copied by the flattening."""
    logps = -F.cross_entropy(logits.flatten(0, 1).float(), target_ids, reduction="none")
    return dapo(logps, *arguments)  # type: ignore[arg-type]


def logits_arguments(problem: Problem) -> tuple:
    old, advantages, mask, count = dapo_arguments(problem)
    return spread(problem.target_ids), spread(old), spread(advantages), spread(mask), count


def plain_logits(compile_it: bool) -> Callable[[Problem], Step]:
    def prepare(problem: Problem) -> Step:
        function = (
            torch.compile(plain_logits_loss, dynamic=False) if compile_it else plain_logits_loss
        )
        arguments = logits_arguments(problem)
        return differentiate_logits(problem, lambda logits: function(logits, *arguments))

    return prepare


def liger_triton(inplace: bool) -> Callable[[Problem], Step]:
    """Liger's fused GRPO loss from (B, L + 1, V) logits."""

    def prepare(problem: Problem) -> Step:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss

        padded = (COMPLETIONS, -1)
        target_ids, old_logps, mask = (
            x.view(padded) for x in (problem.target_ids, problem.old_logps, problem.mask)
        )

        def loss(logits: Tensor) -> Tensor:
            return triton_grpo_loss(
                logits, old_logps, None, target_ids, problem.advantages, mask, temperature=1.0,
                beta=0.0, eps_low=EPSILON, eps_high=EPSILON, inplace=inplace, loss_type="dapo",
                reduce=True, num_items_in_batch=problem.count,
            )[0]  # fmt: skip

        return differentiate_logits(problem, loss, inplace)

    return prepare


# ---- why one cannot run ----


def needs_gpu(device: str, dtype: torch.dtype) -> str | None:
    return None if device == "cuda" else "its Triton kernels need a GPU"


def needs_hopper(device: str, dtype: torch.dtype) -> str | None:
    if (
        device != "cuda"
        or not torch.cuda.is_available()
        or torch.cuda.get_device_capability() != (9, 0)
    ):
        return "its CuTe-DSL kernels need an sm_90 GPU"
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed"
    return None if dtype == torch.bfloat16 else "takes bf16 only"


def needs_dense(device: str, dtype: torch.dtype) -> str | None:
    has = hasattr(F, "linear_cross_entropy")
    return None if has else "torch.nn.functional has no linear_cross_entropy (torch < 2.13)"


def as_loss(logps: Logps) -> Callable[[Problem], Step]:
    def prepare(problem: Problem) -> Step:
        call, arguments = logps(problem), dapo_arguments(problem)
        return differentiate(problem, lambda: dapo(call(), *arguments))

    return prepare


def as_logps(logps: Logps, gradient: bool) -> Callable[[Problem], Step]:
    def prepare(problem: Problem) -> Step:
        call = logps(problem)
        return differentiate_logps(problem, call) if gradient else without_gradient(call)

    return prepare


# name -> logps, package, why it cannot run, fp32 buffers of N·V
LOGPS: dict[str, tuple[Logps, str | None, Callable[[str, torch.dtype], str | None], float]] = {
    "plain torch": (plain, None, lambda device, dtype: None, 3.0),
    "torch.compile": (compiled, None, lambda device, dtype: None, 2.0),
    "TRL": (trl, "trl", lambda device, dtype: None, 0.0),
    "CCE": (cce, "cut_cross_entropy", lambda device, dtype: None, 0.0),
    "Liger SM90": (liger_sm90, "liger_kernel", needs_hopper, 0.0),
    "verl": (verl, "verl", needs_gpu, 0.0),
}


def logps_peers(gradient: bool) -> list[Provider]:
    return [
        Provider(
            name, "peer", as_logps(logps, gradient), needs, why_not, wide if gradient else wide - 1
        )
        for name, (logps, needs, why_not, wide) in LOGPS.items()
    ]


def loss_peers() -> list[Provider]:
    own = {"torch.compile": compiled_loss}
    found = [
        Provider(name, "peer", own.get(name) or as_loss(logps), needs, why_not, wide)
        for name, (logps, needs, why_not, wide) in LOGPS.items()
    ]
    return [
        *found,
        Provider("Liger", "peer", liger_loss, needs="liger_kernel"),
        Provider("QuACK", "dense", quack_dense, needs="quack", why_not=needs_hopper),
        Provider(
            "F.linear_cross_entropy",
            "dense",
            torch_dense(chunked=False),
            why_not=needs_dense,
            wide_logits=2.0,
        ),
        Provider(
            "F.linear_cross_entropy, chunked",
            "dense",
            torch_dense(chunked=True),
            why_not=needs_dense,
        ),
    ]


def logits_peers(inplace: bool) -> list[Provider]:
    liger = Provider(
        "Liger Triton", "peer", liger_triton(inplace), needs="liger_kernel", why_not=needs_gpu
    )
    if inplace:
        return [liger]
    return [
        Provider("plain torch", "peer", plain_logits(compile_it=False), wide_logits=2.0),
        Provider("torch.compile", "peer", plain_logits(compile_it=True), wide_logits=1.0),
        liger,
    ]
