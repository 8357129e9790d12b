"""Providers, which are implementations of an operation: grpo_fast, other libraries, and limits.

A limit is the time of the matrix products that the operation needs, or the time of a copy of its
logits. Each library is called as its documentation recommends.

Most of these libraries only compute logps. Plain torch code then computes the loss from the logps.
If a library is not installed, or does not support the device or dtype, it is not timed, and the
table shows the reason.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.operations import COMPLETIONS
from benchmarks.kernels.problem import EPSILON, Problem, spread
from benchmarks.measure import Result, Step
from grpo_fast import LossConfig, Support, linear_grpo_loss, linear_logps, logits_grpo_loss
from grpo_fast.kernels import route

# Function of a device type and a dtype. It returns the reason why a provider cannot run, or None.
WhyNot = Callable[[str, torch.dtype], str | None]


class Provider(NamedTuple):
    """An implementation of an operation, which a benchmark measures.

    Attributes:
        name: name in the tables.
        role: "ours" (grpo_fast), "peer" (a different library) or "limit".
        prepare: function that returns the `Step` of a `Problem`.
        needs: package that the provider imports, or None.
        why_not: function that returns the reason why the provider cannot run, or None if the
            provider runs on every device.
    """

    name: str
    role: str
    prepare: Callable[[Problem], Step]
    needs: str | None = None
    why_not: WhyNot | None = None

    def missing(self, device: str, dtype: torch.dtype) -> str | None:
        """Return the reason why the provider cannot run, or None if it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return self.why_not(device, dtype) if self.why_not else None


# ---- steps and losses for all providers ----
def differentiate(problem: Problem, loss_of: Callable[[], Tensor]) -> Step:
    """Return a step that computes a loss and its gradients.

    The gradients are those with respect to hidden and, if it requires grad, the weight.
    """
    inputs = {"grad_hidden": problem.hidden}
    if problem.weight.requires_grad:
        inputs["grad_weight"] = problem.weight

    def run() -> Result:
        loss = loss_of()
        gradients = torch.autograd.grad(loss, list(inputs.values()))
        return {"loss": loss.detach(), **dict(zip(inputs, gradients, strict=True))}

    return Step(run)


def logps_step(problem: Problem, logps_of: Callable[[], Tensor], gradient: bool) -> Step:
    """Return a step that computes logps.

    If `gradient` is True, the step back-propagates `problem.grad_logps` through the logps.
    """

    def without_gradient() -> Result:
        with torch.no_grad():
            return {"logps": logps_of()}

    if not gradient:
        return Step(without_gradient)
    upstream = problem.grad_logps

    def run() -> Result:
        logps = logps_of()
        inputs = (problem.hidden, problem.weight)
        gradients = torch.autograd.grad(logps, inputs, upstream.to(logps.dtype))
        return {"logps": logps.detach(), "grad_hidden": gradients[0], "grad_weight": gradients[1]}

    return Step(run)


def differentiate_logits(
    problem: Problem, loss_of: Callable[[Tensor], Tensor], inplace: bool = False
) -> Step:
    """Return a step that computes a loss and its gradient with respect to the logits (B, L + 1, V).

    With `inplace`, the loss writes the gradient over the logits. The logits are then restored
    before each call.
    """
    buffer = problem.logits.clone() if inplace else problem.logits

    def run() -> Result:
        logits = buffer.detach().requires_grad_()
        loss = loss_of(logits)
        (gradient,) = torch.autograd.grad(loss, logits)
        return {"loss": loss.detach(), "grad_logits": gradient.flatten(0, 1)}

    if not inplace:
        return Step(run)
    return Step(run, lambda: buffer.copy_(problem.logits), buffer.nbytes)


def dapo(logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return the loss "dapo" of logps (N,): Σ mask·(-min(r·A, clip(r)·A)) / count.

    Libraries that only compute logps use this loss. `count` is the number of active tokens.
    """
    ratio = torch.exp(logps - old_logps)
    clipped = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON)
    return -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum() / count


def mean_nll(logps: Tensor, problem: Problem) -> Tensor:
    """Return the mean cross entropy of the unmasked tokens, given their logps (N,)."""
    return -(logps * problem.mask).sum() / problem.count


def dapo_arguments(problem: Problem) -> tuple[Tensor, Tensor, Tensor, int]:
    return problem.old_logps, problem.token_advantages, problem.mask, problem.count


# ---- limits ----
def gemms(count: int, compute_dtype: torch.dtype | None, problem: Problem) -> Step:
    """Return a step that runs matrix products.

    The products write to buffers that are allocated before the timing. If the logits are too large,
    they are computed in blocks of rows.

    Args:
        count: 1 for hidden·Wᵀ, 2 to add the product for the gradient of hidden, and 3 to add the
            product for the gradient of the weight.
        compute_dtype: dtype of the products, or None for the dtype of the inputs. With float32,
            16-bit inputs are converted before the timing. Some CPUs compute fp32 products faster
            than 16-bit products.
        problem: the problem whose hidden states and weight are multiplied.
    """
    dtype = compute_dtype or problem.hidden.dtype
    hidden, weight = problem.hidden.detach().to(dtype), problem.weight.detach().to(dtype)
    n, _, v = problem.shape
    rows = min(n, max(512, 2**34 // (v * dtype.itemsize)))
    logits = torch.empty(rows, v, dtype=dtype, device=hidden.device)
    grad_logits = torch.empty_like(logits).normal_(std=1e-3) if count > 1 else logits
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> Result:
        for start in range(0, n, rows):
            h = hidden[start : start + rows]
            torch.mm(h, weight.T, out=logits[: len(h)])
            if count > 1:
                torch.mm(grad_logits[: len(h)], weight, out=grad_hidden[start : start + rows])
            if count > 2:
                torch.mm(grad_logits[: len(h)].T, h, out=grad_weight)
        return {}

    return Step(run)


def copy(problem: Problem) -> Step:
    """Return a step that copies the logits, which reads and writes N·V elements."""
    source = problem.logits
    target = torch.empty_like(source)

    def run() -> Result:
        target.copy_(source)
        return {}

    return Step(run)


def only_16_bit(device: str, dtype: torch.dtype) -> str | None:
    if dtype == torch.float32:
        return "the same as the limit in the dtype of the inputs"
    return None if device == "cpu" else "on a GPU, 16-bit products are faster"


def gemm_limits(count: int) -> list[Provider]:
    name = {1: "one GEMM", 2: "two GEMMs", 3: "three GEMMs"}[count]
    return [
        Provider(name, "limit", partial(gemms, count, None)),
        Provider(f"{name}, fp32", "limit", partial(gemms, count, torch.float32), None, only_16_bit),
    ]


# ---- grpo_fast ----
BACKENDS = ("auto", "torch", "cpu", "triton")
CONFIG = LossConfig(loss_type="dapo", epsilon_low=EPSILON, epsilon_high=EPSILON)


def why_not_ours(backend: str, device: str, dtype: torch.dtype) -> str | None:
    if backend == "triton" and device == "cpu":
        return "its kernels need a GPU"
    return route.unavailable(backend, device) if backend not in ("auto", "torch") else None


def support_of(problem: Problem) -> Support | None:
    ids = problem.support_ids
    if ids is None:
        return None
    return Support(ids.flatten(), torch.arange(len(ids) + 1, device=ids.device) * ids.shape[1])


def our_loss(backend: str, problem: Problem) -> Step:
    """Return a step that runs `linear_grpo_loss` and its backward pass."""
    mask, support = problem.mask_or_none, support_of(problem)
    return differentiate(
        problem,
        lambda: linear_grpo_loss(
            problem.hidden, problem.weight, problem.target_ids, problem.advantages, CONFIG,
            completion_mask=mask, cu_seqlens=problem.cu_seqlens, old_logps=problem.old_logps,
            num_items_in_batch=problem.count, backend=backend, support=support,
        ).loss,
    )  # fmt: skip


def our_logps(backend: str, problem: Problem) -> Callable[[], Tensor]:
    """Compute logps with `linear_logps`. Masked rows get the target id -100."""
    inputs = (problem.hidden, problem.weight, problem.labels)
    support = support_of(problem)
    return lambda: linear_logps(*inputs, backend=backend, support=support)


def our_logits_loss(backend: str, problem: Problem, inplace: bool) -> Step:
    """Return a step that runs `logits_grpo_loss` on logits (B, L + 1, V).

    The unused last row of each completion is masked.
    """
    shape = (COMPLETIONS, -1)
    targets, old_logps, mask = (
        spread(x).view(shape) for x in (problem.target_ids, problem.old_logps, problem.mask.bool())
    )

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return logits_grpo_loss(
            logits, targets, problem.advantages, CONFIG, completion_mask=mask,
            old_logps=old_logps, num_items_in_batch=problem.count, backend=backend,
            inplace=inplace,
        ).loss  # fmt: skip

    return differentiate_logits(problem, loss_of, inplace)


def our_providers(prepare: Callable[[str, Problem], Step]) -> list[Provider]:
    """Return a provider for each backend. Its step is `prepare(backend, problem)`."""
    return [
        Provider(
            f"grpo_fast ({name})", "ours", partial(prepare, name),
            why_not=partial(why_not_ours, name),
        )
        for name in BACKENDS
    ]  # fmt: skip


def ours_from_logps(prepare: Callable[..., Step]) -> list[Provider]:
    """Return a provider for each backend. Its step is `prepare(logps, problem)`."""
    return our_providers(lambda name, problem: prepare(partial(our_logps, name), problem))


# ---- other libraries, from hidden states ----
QUACK_ROWS = 4096  # the default chunk of QuACK
# Type of a function that prepares a problem. It returns a function without arguments that computes
# the logps, (N,). The logps of masked rows are not compared.
Logps = Callable[[Problem], Callable[[], Tensor]]


def plain_logps(hidden: Tensor, weight: Tensor, target_ids: Tensor) -> Tensor:
    """Return the fp32 logps (N,) of the targets, computed from all logits at once."""
    return -F.cross_entropy((hidden @ weight.T).float(), target_ids, reduction="none")


def plain_loss(hidden: Tensor, weight: Tensor, target_ids: Tensor, *arguments: Any) -> Tensor:
    return dapo(plain_logps(hidden, weight, target_ids), *arguments)


def plain(problem: Problem) -> Callable[[], Tensor]:
    return lambda: plain_logps(problem.hidden, problem.weight, problem.target_ids)


def compiled(problem: Problem) -> Callable[[], Tensor]:
    function = torch.compile(plain_logps, dynamic=False)
    return lambda: function(problem.hidden, problem.weight, problem.target_ids)


def compiled_loss(problem: Problem) -> Step:
    """Return a step in which torch.compile compiles the logps and the loss as one graph."""
    function, arguments = torch.compile(plain_loss, dynamic=False), dapo_arguments(problem)
    return differentiate(
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
    step = differentiate(
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
    return differentiate(problem, lambda: head(*inputs, old_per_token_logps=old_logps)[0])


def needs_hopper(device: str, dtype: torch.dtype) -> str | None:
    is_gpu = device == "cuda" and torch.cuda.is_available()
    if not is_gpu or torch.cuda.get_device_capability() != (9, 0):
        return "its CuTe-DSL kernels need an sm_90 GPU"
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed"
    return None if dtype == torch.bfloat16 else "takes bf16 only"


def as_loss(logps: Logps, problem: Problem) -> Step:
    call, arguments = logps(problem), dapo_arguments(problem)
    return differentiate(problem, lambda: dapo(call(), *arguments))


def as_cross_entropy(logps: Logps, problem: Problem) -> Step:
    call = logps(problem)
    return differentiate(problem, lambda: mean_nll(call(), problem))


def as_logps(logps: Logps, problem: Problem, gradient: bool) -> Step:
    return logps_step(problem, logps(problem), gradient)


# Libraries that compute logps. For each name: the function that prepares the logps, the required
# package, and the `why_not` function.
LOGPS: dict[str, tuple[Logps, str | None, WhyNot | None]] = {
    "plain torch": (plain, None, None),
    "torch.compile": (compiled, None, None),
    "TRL": (trl, "trl", None),
    "CCE": (cce, "cut_cross_entropy", None),
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


# ---- other libraries, from logits ----
def plain_logits_loss(logits: Tensor, target_ids: Tensor, *arguments: Tensor | int) -> Tensor:
    """Compute the loss from logits (B, L + 1, V) in plain torch.

    The last of the L + 1 rows is masked instead of sliced off, because slicing would copy the
    logits.
    """
    logps = -F.cross_entropy(logits.flatten(0, 1).float(), target_ids, reduction="none")
    return dapo(logps, *arguments)  # type: ignore[arg-type]


def plain_logits(compile_it: bool, problem: Problem) -> Step:
    function: Callable[..., Tensor] = plain_logits_loss
    if compile_it:
        function = torch.compile(plain_logits_loss, dynamic=False)
    *tensors, count = problem.target_ids, *dapo_arguments(problem)
    arguments = (*map(spread, tensors), count)
    return differentiate_logits(problem, lambda logits: function(logits, *arguments))


# ---- all providers of an operation ----
def providers_of(operation: str) -> list[Provider]:
    """Return the providers of an operation: its limits, grpo_fast and other libraries."""
    if operation == "linear_grpo_loss":
        return [*gemm_limits(3), *our_providers(our_loss), *loss_peers()]
    if operation == "linear_grpo_loss_frozen":
        found = [*gemm_limits(2), *our_providers(our_loss), *loss_peers()]
        return [x._replace(prepare=partial(frozen, x)) for x in found]
    if operation == "linear_cross_entropy":
        quack_peer = Provider("QuACK cross entropy", "peer", quack, "quack", needs_hopper)
        found = [*gemm_limits(3), *ours_from_logps(as_cross_entropy), quack_peer]
        return found + from_logps(as_cross_entropy)
    if operation in ("linear_logps", "linear_logps_backward"):
        gradient = operation.endswith("backward")
        prepare = partial(as_logps, gradient=gradient)
        limits = gemm_limits(3 if gradient else 1)
        return limits + ours_from_logps(prepare) + from_logps(prepare)
    inplace = operation.endswith("inplace")
    found = [Provider("device copy", "limit", copy)]
    found += our_providers(partial(our_logits_loss, inplace=inplace))
    if not inplace:
        found.append(Provider("plain torch", "peer", partial(plain_logits, False)))
        found.append(Provider("torch.compile", "peer", partial(plain_logits, True)))
    return found


def frozen(provider: Provider, problem: Problem) -> Step:
    """Return the step of a provider for a weight that does not require grad."""
    return provider.prepare(problem.frozen)
