"""Small test batches for the loss functions, and a function that calls any of these functions.

Each batch contains difficult inputs. Its completions have different lengths, one completion is
empty, and one has masked tokens between active tokens, like the output of a tool. The advantages
are positive, negative and 0. The log ratios are on both sides of every clip bound, and so far from
the bounds that fp32 rounding cannot change whether a token is clipped.

Masked tokens have ordinary values here. `poisoned` in test_fuzz.py replaces these values with NaN,
inf and invalid ids.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_fast
from grpo_fast.kernels import route
from grpo_fast.objective.losses import OBJECTIVES
from tests import oracles

IS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available() and not IS_INTERPRETER  # the interpreter needs CPU tensors
LOSSES = tuple(oracles.ORACLES)
AGGREGATIONS = (
    "sequence_mean", "token_mean_local", "fixed_length", "token_mean_global", "sequence_sum",
)  # fmt: skip
BY_TOKEN = ("gspo_token", "gmpo", "vespo", "dppo_tv", "dppo_kl", "kimi", "dro")
SEQUENCE_LOSSES = tuple(x for x in LOSSES if x not in BY_TOKEN)
LEVELS = ("token", "sequence", "sequence_sum")
LOSS_LEVELS = (
    *((x, "token") for x in LOSSES if x != "gspo"),
    *((x, "sequence") for x in SEQUENCE_LOSSES),
    *((x, "sequence_sum") for x in SEQUENCE_LOSSES if x != "gspo"),
)
# Loss types with the same per-token function differ only in their aggregation, and no kernel
# computes the aggregation. To save time, kernel tests therefore use one loss type for each
# per-token function at the level "token". At the levels with one ratio per completion, they use
# `grpo` and `gspo`.
OF_A_LEAF = {OBJECTIVES[x].function: x for x, level in reversed(LOSS_LEVELS) if level == "token"}
LEAVES_AND_LEVELS = tuple(
    (x, level)
    for x, level in LOSS_LEVELS
    if (x in OF_A_LEAF.values() if level == "token" else x in ("grpo", "gspo"))
)
LAYOUTS = ("padded", "packed")
FUNCTIONS = ("logps", "logits", "linear")


class Fused(str):
    """Backend name that makes conftest.py select the fused kernels, even for small heads.

    The fused kernels compute from hidden states. Small heads would otherwise use other kernels.
    """


def row_backends() -> list:
    """Return the backends to test in this process.

    These are "torch" and "cpu" (our C++ kernels, csrc). If csrc cannot be built, the tests of "cpu"
    are skipped with the reason. Under Triton's interpreter (kernels/test_triton_interpreter.py),
    the only backend is "triton".
    """
    if IS_INTERPRETER:
        return [pytest.param("triton", id="triton")]
    reason = route.unavailable("cpu", "cpu")
    mark = [pytest.mark.skip(reason=f"backend cpu: {reason}")] if reason else []
    cpu = [
        pytest.param(Fused("cpu"), id="cpu-fused", marks=mark),
        pytest.param("cpu", id="cpu", marks=mark),
    ]
    return [pytest.param("torch", id="torch"), *cpu]


BACKENDS = row_backends()
# Backends for tests that use `call` or `run`, which move the arguments of "triton" to a GPU.
EVERYWHERE = [*BACKENDS, pytest.param("triton", id="gpu", marks=pytest.mark.gpu)]
EVERYWHERE = EVERYWHERE if HAS_GPU else BACKENDS
# Backends for tests of functions that do not take hidden states.
ENGINES = [p for p in BACKENDS if p.id != "cpu-fused"]

# These log ratios have both signs and are inside and outside the clip range. None is close to 0 or
# to a clip bound (log 0.8, log 1.28, log 1.5 and log 3), so rounding cannot change a result.
LOG_RATIOS = (-1.1, -0.45, -0.12, 0.07, 0.16, 0.55, 0.85, 1.35)
REF_DIFFERENCES = (-0.7, -0.3, 0.05, 0.25, 0.6)
SAMPLING_DIFFERENCES = (-0.5, -0.1, 0.2, 0.4, 1.4)  # the default bound is log 3 = 1.0986


@dataclass
class Case:
    hidden: Tensor  # (B, L, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    ids: Tensor  # (B, L) int64
    mask: Tensor  # (B, L) bool
    advantages: Tensor  # (B,) or (B, L)
    old: Tensor | None  # (B, L)
    ref: Tensor | None  # (B, L)
    sampling: Tensor | None = None  # (B, L)
    options: dict[str, Any] = field(default_factory=dict)
    num_items: float | None = None
    num_completions: float | None = None
    # True at the ids that the sampler kept, shape (B, L, V), bool. If all V ids of a token are
    # kept, the `Support` stores an empty set for this token, because an empty set means all ids.
    kept: Tensor | None = None

    def but(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)

    def with_options(self, **options: Any) -> Case:
        return self.but(options={**self.options, **options})

    @property
    def exact_logits(self) -> Tensor:
        """Return the logits in fp64, shape (B, L, V)."""
        raw = self.hidden.double() @ self.weight.double().T
        return raw if self.bias is None else raw + self.bias.double()

    @property
    def logits(self) -> Tensor:
        """Return the logits in the dtype of `hidden`, shape (B, L, V).

        They are the input of the loss functions that start from logits.
        """
        return self.exact_logits.to(self.hidden.dtype)


def options_for(
    loss_type: str, level: str = "token", aggregation: str | None = None, **more: Any
) -> dict[str, Any]:
    """Return loss options that make a batch of `make_case` reach every branch of the loss."""
    options: dict[str, Any] = {"loss_type": loss_type, "epsilon_low": 0.2, "epsilon_high": 0.28}
    if loss_type == "cispo":
        options["epsilon_high"] = 1.5
    if loss_type in ("dppo_tv", "dppo_kl"):
        # Use small bounds, so that some tokens exceed them. The probabilities are about 1/V, so
        # the differences between the old and the current policy are small too.
        small = 0.008 if loss_type == "dppo_tv" else 0.004
        options.update(epsilon_low=small, epsilon_high=small * 1.25)
    if loss_type in ("kimi", "dro"):
        options["beta"] = 0.3
    if level != "token":
        options["importance_sampling_level"] = level
    if aggregation is not None:
        options["aggregation"] = aggregation
    resolved = aggregation or oracles.DEFAULT_AGGREGATION[loss_type]
    if resolved == "fixed_length":
        options["max_completion_length"] = 9
    return {**options, **more}


def pick(generator: torch.Generator, choices: tuple[float, ...], shape: tuple[int, ...]) -> Tensor:
    """Return random elements of `choices`, each with random noise from 0 to 0.02 added.

    Returns:
        A tensor of the given shape, fp64.
    """
    index = torch.randint(len(choices), shape, generator=generator)
    moved = 0.02 * torch.rand(shape, generator=generator)
    return torch.tensor(choices, dtype=torch.float64)[index] + moved


def default_mask() -> Tensor:
    lengths = torch.tensor([7, 3, 0, 5, 6])
    mask = torch.arange(7)[None, :] < lengths[:, None]
    mask[3, 1:3] = False  # a hole in the mask, as for the output of a tool
    mask[4, 0] = False
    return mask


def make_case(
    seed: int = 0, *, H: int = 8, V: int = 23, mask: Tensor | None = None, dtype=torch.float32,
    bias: bool = True, per_token_advantages: bool = False, sampling: bool = False,
    scale: float = 1.0, support: bool = False, **options: Any,
) -> Case:  # fmt: skip
    """Build a random padded batch as a `Case`.

    The old, reference and sampling logps differ from the current logps by small log ratios. The
    current logps are computed in fp64.
    """
    g = torch.Generator().manual_seed(seed)
    mask = default_mask() if mask is None else mask
    B, L = mask.shape
    hidden = (scale * torch.randn(B, L, H, generator=g)).to(dtype)
    weight = (scale * torch.randn(V, H, generator=g) / H**0.5).to(dtype)
    b = (0.3 * torch.randn(V, generator=g)).to(dtype) if bias else None
    ids = torch.randint(V, (B, L), generator=g)
    advantages = torch.tensor([1.3, -0.8, 0.6, -1.7, 0.9, -0.4, 0.0])[torch.arange(B) % 7]
    kept = kept_ids(seed, ids, V) if support else None
    case = Case(
        hidden, weight, b, ids, mask, advantages, None, None, options=dict(options), kept=kept
    )
    lp, _ = exact_logps(case)
    old = torch.clamp(lp - pick(g, LOG_RATIOS, (B, L)), max=-1e-3)
    ref = torch.clamp(lp + pick(g, REF_DIFFERENCES, (B, L)), max=-1e-3)
    sampler = torch.clamp(old - pick(g, SAMPLING_DIFFERENCES, (B, L)), max=-1e-3)
    if per_token_advantages:
        advantages = advantages[:, None] + torch.randn(B, L, generator=g)
    return case.but(
        advantages=advantages.float(), old=old.float(), ref=ref.float(),
        sampling=sampler.float() if sampling else None,
    )  # fmt: skip


def kept_ids(seed: int, ids: Tensor, V: int) -> Tensor:
    """Return a random set of kept token ids for each token, shape (B, L, V), bool.

    Each set contains the target id. About one fifth of the sets contain all V ids.
    """
    g = torch.Generator().manual_seed(seed)
    share = torch.rand((*ids.shape, 1), generator=g)
    kept = torch.rand((*ids.shape, V), generator=g) < share
    kept[torch.rand(ids.shape, generator=g) < 0.2] = True
    return kept.scatter_(-1, ids[..., None], True)


def support_of(kept: Tensor, mask: Tensor) -> grpo_fast.Support:
    """Convert masks of kept ids to a `Support` that stores the ids of each row in random order.

    Masked rows get invalid ids, because no function may read the ids of a masked row.

    Args:
        kept: True at the kept ids, shape (N, V), bool.
        mask: True at the active rows, shape (N,), bool.
    """
    rows = []
    for t, row in enumerate(kept):
        ids = row.nonzero().squeeze(1)
        # The order must not depend on the position of the row, because a test compares a selection
        # of rows bit for bit, and the last bit of a row's lse depends on the order.
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(len(ids)))
        rows.append(ids[order] if mask[t] else torch.tensor([-7, len(row) + 3, -7]))
        rows[-1] = rows[-1][:0] if mask[t] and row.all() else rows[-1]
    lengths = torch.tensor([0, *map(len, rows)])
    return grpo_fast.Support(torch.cat([lengths[:0], *rows]), lengths.cumsum(0))


# ----------------------------------------------------------
# Conversion between layouts
def spans(mask: Tensor) -> list[int]:
    """Return the number of rows that each completion has in the packed layout.

    The packed layout stores a completion up to its last active token. Masked tokens before the last
    active token are stored too.
    """
    positions = torch.arange(1, mask.shape[1] + 1)
    return [int((positions * m).max()) if m.numel() else 0 for m in mask]


def pack(tensor: Tensor | None, lengths: list[int]) -> Tensor | None:
    """Convert a tensor from the padded layout (B, L, …) to the packed layout (T, …)."""
    if tensor is None:
        return None
    pieces = [tensor[b, :n] for b, n in enumerate(lengths)]
    return torch.cat(pieces) if pieces else tensor.new_zeros((0, *tensor.shape[2:]))


def unpack(tensor: Tensor, lengths: list[int], L: int) -> Tensor:
    """Convert a tensor from the packed layout (T, …) to (B, L, …), with zeros as padding."""
    out = tensor.new_zeros((len(lengths), L, *tensor.shape[1:]))
    start = 0
    for b, n in enumerate(lengths):
        out[b, :n] = tensor[start : start + n]
        start += n
    return out


def cu_seqlens_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


# ----------------------------------------------------------
# Calls of the loss functions
@dataclass
class Result:
    loss: Tensor
    metrics: dict[str, Tensor]
    logps: Tensor  # (B, L), 0 where the packed layout has no row
    entropy: Tensor | None
    # Maps the input's name ("logps", "entropy", "logits", "hidden", "weight" or "bias") to its
    # gradient in the padded layout.
    grads: dict[str, Tensor]
    raw: Any  # the `LossOutput`, whose tensors are in the layout of the call

    def named(self) -> dict[str, Tensor]:
        """Return all outputs, metrics and gradients, keyed by name."""
        found = {"loss": self.loss, "logps": self.logps}
        if self.entropy is not None:
            found["entropy"] = self.entropy
        found |= {f"metrics/{name}": x for name, x in self.metrics.items()}
        return found | {f"d{name}": x for name, x in self.grads.items()}


# Maps each function to the names of the arguments that receive gradients. `Result.grads` uses the
# shorter name "weight" for `lm_head_weight`.
LEAVES = {
    "linear": ("hidden", "lm_head_weight", "bias"), "logits": ("logits",),
    "logps": ("logps", "entropy"),
}  # fmt: skip
LOSSES_OF = {"linear": "linear_grpo_loss", "logits": "logits_grpo_loss", "logps": "grpo_loss"}


def arguments(function: str, case: Case, layout: str = "padded") -> dict[str, Any]:
    """Return the keyword arguments of a public loss function for a case.

    The tensors have the given layout, "padded" or "packed".
    """
    lengths, o = spans(case.mask), oracles.resolve(case.options)
    lay = (lambda x: x) if layout == "padded" else (lambda x: pack(x, lengths))
    needs_ref = o.beta != 0 and o.loss_type not in ("kimi", "dro")
    given: dict[str, Any] = {
        "advantages": lay(case.advantages) if case.advantages.dim() == 2 else case.advantages,
        "config": grpo_fast.LossConfig(**case.options), "completion_mask": lay(case.mask),
        "old_logps": lay(case.old), "ref_logps": lay(case.ref) if needs_ref else None,
        "sampling_logps": lay(case.sampling), "num_items_in_batch": case.num_items,
        "num_completions_in_batch": case.num_completions,
    }  # fmt: skip
    if layout == "packed":
        given["cu_seqlens"] = cu_seqlens_of(lengths)
    if function == "logps":
        given["logps"], entropy = map(lay, reference_logps(case))
        reads = o.entropy_coef or o.top_entropy_quantile < 1 or case.options.get("compute_entropy")
        return given | ({"entropy": entropy} if reads else {})
    if case.kept is not None:
        given["support"] = support_of(lay(case.kept).flatten(0, -2), lay(case.mask).flatten())
    given |= {"target_ids": lay(case.ids), "backend": "torch"}
    if function == "logits":
        return given | {"logits": lay(case.logits)}
    return given | {"hidden": lay(case.hidden), "lm_head_weight": case.weight, "bias": case.bias}


def call(function: str, case: Case, layout: str = "padded", **changes: Any):
    """Call a public loss function with the tensors of a case. Return its `LossOutput`.

    `changes` replace some of the arguments that `arguments` returns.
    """
    given = {**arguments(function, case, layout), **changes}
    backend = given.pop("backend", None) if function == "logps" else given.get("backend")
    device = on_device(backend)
    if device == "cpu":
        return getattr(grpo_fast, LOSSES_OF[function])(**given)
    out = getattr(grpo_fast, LOSSES_OF[function])(**moved(given, device))
    names = ("loss", "logps", "entropy", "metrics", "divergence")
    return SimpleNamespace(**{name: moved(getattr(out, name), "cpu") for name in names})


def on_device(backend: str | None) -> str:
    """Return the device on which a backend runs. Triton's interpreter needs CPU tensors."""
    return "cuda" if backend == "triton" and HAS_GPU else "cpu"


def moved(x: Any, device: str) -> Any:
    """Return x with all its tensors on a device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: moved(value, device) for name, value in x.items()}
    if isinstance(x, list):
        return [moved(value, device) for value in x]
    if not isinstance(x, tuple):
        return x
    values = [moved(value, device) for value in x]
    return type(x)(*values) if hasattr(x, "_fields") else tuple(values)


def leaves_of(function: str, case: Case, layout: str = "padded") -> dict[str, Tensor]:
    """Return copies of the arguments that receive gradients, keyed by argument name."""
    given = arguments(function, case, layout)
    named = {name: given.get(name) for name in LEAVES[function]}
    return {name: x.detach().clone() for name, x in named.items() if x is not None}


def run(
    function: str, case: Case, *, layout: str = "padded", upstream: float = 1.0,
    view: Callable[[Tensor], Tensor] = lambda x: x, frozen: Collection[str] = (), **changes: Any,
) -> Result:  # fmt: skip
    """Call a public loss function and its backward pass on a case.

    `view` changes the memory layout of the tensors that receive gradients. `frozen` names tensors
    that receive none.

    Returns:
        The outputs and the gradients, converted to the padded layout.
    """
    lengths, L = spans(case.mask), case.mask.shape[1]
    back = (lambda x: x) if layout == "padded" else (lambda x: unpack(x, lengths, L))
    leaves = leaves_of(function, case, layout)
    if on_device(changes.get("backend")) == "cuda":
        leaves = moved(leaves, "cuda")  # before `view`, because a move may drop the layout
    frozen = {"lm_head_weight" if name == "weight" else name for name in frozen}
    leaves = {name: view(x).requires_grad_(name not in frozen) for name, x in leaves.items()}
    out = call(function, case, layout, **leaves, **changes)
    (out.loss * upstream).backward()
    grads: dict[str, Tensor] = {}
    for name, leaf in leaves.items():
        if not leaf.requires_grad:
            assert leaf.grad is None
            continue
        grad = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).cpu()
        is_of_rows = name not in ("lm_head_weight", "bias")
        grads[name.removeprefix("lm_head_")] = back(grad) if is_of_rows else grad
    entropy = None if out.entropy is None else back(out.entropy)
    return Result(out.loss.detach(), out.metrics, back(out.logps), entropy, grads, out)


def exact_logps(case: Case) -> tuple[Tensor, Tensor]:
    """Compute the logps and entropies of a case with the fp64 oracle, each of shape (B, L)."""
    raw = case.exact_logits.flatten(0, 1)
    o = oracles.resolve(case.options)
    rule = {"temperature": o.temperature, "softcap": o.softcap, "logit_scale": o.logit_scale}
    kept = None if case.kept is None else case.kept.flatten(0, 1)
    ids = case.ids.flatten().clamp(0, raw.shape[1] - 1)
    found = oracles.logps_and_entropy(raw, ids, kept=kept, **rule)
    return tuple(x.reshape(case.ids.shape) for x in found)


def reference_logps(case: Case) -> tuple[Tensor, Tensor]:
    """Return logps and entropies as inputs of `grpo_loss`, each of shape (B, L) in fp32."""
    return tuple(x.float() for x in exact_logps(case))


def truth(function: str, case: Case):
    """Compute the expected result of a loss function with the fp64 oracle.

    Returns:
        A namespace with `loss`, `losses` (the loss per token) and a gradient `<name>_grad` for each
        input, all in fp64.
    """
    given = dict(
        mask=case.mask, old=case.old, ref=case.ref, sampling=case.sampling,
        num_items=case.num_items, num_completions=case.num_completions,
    )  # fmt: skip
    own = case.advantages, case.options
    if function == "linear":
        head = case.hidden, case.weight, case.ids
        return oracles.oracle_from_hidden(*head, *own, bias=case.bias, kept=case.kept, **given)
    if function == "logits":
        return oracles.oracle_from_logits(case.logits, case.ids, *own, kept=case.kept, **given)
    logps, entropy = reference_logps(case)
    return oracles.oracle_from_logps(logps, *own, entropy=entropy, **given)


# ----------------------------------------------------------
# Comparison with the oracle
def relative_l2(value: Tensor, true: Tensor) -> float:
    """Compute the relative L2 error ‖value − true‖ / ‖true‖ in fp64.

    Return ‖value‖ if `true` is 0.
    """
    error = (value.double() - true.double()).norm().item()
    size = true.double().norm().item()
    return error / size if size > 0 else error


def worst_row(value: Tensor, true: Tensor) -> float:
    """Compute the largest relative L2 error of a row. Rows in which `true` is 0 are ignored."""
    error = (value.double() - true).reshape(len(true), -1).norm(dim=1)
    size = true.double().reshape(len(true), -1).norm(dim=1)
    return (error / size)[size > 0].max().item()


def check(
    function: str, case: Case, *, loss_tol: float = 2e-6, grad_tol: float = 1e-5, **how: Any
) -> Result:
    """Call `run`, check its loss and gradients against the fp64 oracle, and return its result.

    Also check that the gradients of masked rows are 0.
    """
    result, expected = run(function, case, **how), truth(function, case)
    total = sum(x.abs().sum().item() for x in expected.losses)
    losses = result.loss.item(), expected.loss.item()
    scale = max(1.0, abs(losses[1]), total / max(1, int(case.mask.sum())))
    assert abs(losses[0] - losses[1]) <= loss_tol * scale, losses
    for name, grad in result.grads.items():
        error = relative_l2(grad, getattr(expected, f"{name}_grad"))
        assert error <= grad_tol, f"d{name}: relative L2 {error:.2e} > {grad_tol:.0e}"
        if name not in ("weight", "bias"):
            assert (grad[~case.mask] == 0).all(), f"d{name}: a masked row got a gradient"
    return result


def assert_seen(case: Case, function: str, backend: str, layout: str = "padded", **more) -> None:
    """Check that the loss and each gradient of a case with a NaN or an infinity are not finite.

    The gradient of given entropies does not depend on the row, so it may be finite.
    """
    result = run(function, case, backend=backend, layout=layout, **more)
    assert not math.isfinite(result.loss.item()), "the loss is finite"
    for name, grad in result.grads.items():
        assert name == "entropy" or not grad.isfinite().all(), f"d{name} is finite"
        if name not in ("weight", "bias"):
            assert (grad[~case.mask] == 0).all(), f"d{name}: a masked row got something"
