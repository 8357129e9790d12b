"""Self-tests of this machine: kernels, attention, a rollout, and a run that is resumed."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast import LossConfig, TeacherHead, linear_divergence, linear_grpo_loss
from grpo_fast.attention.dispatch import SELF_TEST_TOLERANCE, Kind, candidates, self_test
from grpo_fast.data import reason
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.doctor.diagnosis import diagnose, noise_of
from grpo_fast.kernels import route
from grpo_fast.objective.divergences import DIVERGENCES
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.train import loop
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.runs.checkpoint import checkpoints_in
from grpo_fast.train.runs.export import export

ERRORS = (
    "loss and logps against fp64", "gradients against fp64", "same bits again, and alone",
    "no divergence from itself",
)  # fmt: skip
BACKENDS = ("torch", "cpu", "triton")
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (9, 1, 17, 5)
HIDDEN = 64
VOCABULARY = 4096  # enough columns for the large kernels
HEAD_DIM = 64  # of the attention kernels
LOGPS = 1e-5  # allowed absolute error in any dtype
GRADIENTS = {torch.float32: 2e-6, torch.bfloat16: 3e-3}  # allowed relative L2 error
MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.3,
}  # fmt: skip
RUN = (
    "steps=2", "checkpoint.every=1", "checkpoint.keep=2", "optim.schedule=constant",
    "rollout.prompts_per_step=2", "rollout.group_size=4", "data.n_test=4", "eval.every=0",
    "log.progress=false", "log.completions_every=0", "model.config.hidden_size=16",
    "model.config.intermediate_size=32", "model.config.num_hidden_layers=1",
)  # fmt: skip
PROMPTS = ["3 1 2", "5", "0 9 8 7 6 5 4", "39 38 37 36"]


@dataclass(frozen=True)
class Check:
    """The result of one self-test."""

    name: str
    error: float | None  # None: it did not run
    bound: float  # up to which the error is allowed
    note: str = ""  # why it did not run, or failed

    @property
    def ok(self) -> bool:
        """Whether it passed. A self-test that cannot run here passes; one that raised fails."""
        return self.error is None or self.error <= self.bound


class Problem(NamedTuple):
    """Inputs of the loss."""

    hidden: Tensor  # (T, H)
    weight: Tensor  # (V, H)
    targets: Tensor  # (T,)
    advantages: Tensor  # (B,)
    old_logps: Tensor  # (T,)
    cu_seqlens: Tensor  # (B+1,)


def self_checks() -> list[Check]:
    """Run every self-test on the device that training would take."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [*kernel_checks(device), *attention_checks(device), *run_checks(device)]


def checked(names: Sequence[str], bounds: Sequence[float], run: Callable[..., Any]) -> list[Check]:
    """Return a check for each error that `run` returns; if it raises, the first one is infinite."""
    try:
        return [Check(*each) for each in zip(names, run(), bounds, strict=True)]
    except Exception as broken:  # a kernel may fail in any way, and the other checks go on
        return [Check(names[0], float("inf"), bounds[0], reason(broken))]


def kernel_checks(device: torch.device) -> Iterator[Check]:
    """Check the loss of every backend against fp64."""
    for backend, dtype in product(BACKENDS, DTYPES):
        missing = route.unavailable(backend, device.type)
        name = f"{backend} {str(dtype).removeprefix('torch.')}"
        if missing is not None:
            yield Check(name, None, 0.0, missing.splitlines()[0])
            continue
        run = partial(kernel_errors, problem(dtype, device), backend)
        names = [f"{name}: {error}" for error in ERRORS]
        yield from checked(names, (LOGPS, GRADIENTS[dtype], 0.0, 0.0), run)


def attention_checks(device: torch.device) -> Iterator[Check]:
    """Check every attention kernel against explicit scores."""
    for dtype, extra in product(DTYPES, ("", ", window", ", softcap")):
        kind = Kind(
            device.type, dtype, HEAD_DIM, has_window=extra == ", window",
            has_softcap=extra == ", softcap", gpu=device.index,
        )  # fmt: skip
        for provider in candidates(kind):
            name = f"attention {provider.name} {str(dtype).removeprefix('torch.')}{extra}"
            run = partial(map, self_test, [provider.attend], [kind])
            yield from checked([name], [SELF_TEST_TOLERANCE[dtype]], run)


def run_checks(device: torch.device) -> Iterator[Check]:
    """Check a rollout against the trainer, and a resumed run against an uninterrupted one."""
    config = ModelConfig(config=MODEL, tokenizer="symbols", device=str(device))
    torch.manual_seed(0)
    policy = load_policy(config, build_symbol_tokenizer([str(i) for i in range(40)]))
    sampling = Sampling(max_new_tokens=24, temperature=0.8)
    name = "rollout: logps against the trainer's"
    run = partial(diagnose, policy, TransformersEngine(policy), PROMPTS, sampling)
    yield from checked([name], [noise_of(policy)], lambda: [run().mean])
    name = "checkpoint: a resumed run's weights, bit for bit"
    yield from checked([name], [0.0], lambda: [resumed_differences()])


def problem(dtype: torch.dtype, device: torch.device) -> Problem:
    """Return completions of four lengths, one of a single token; some ratios exceed the clip."""
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    hidden = torch.randn(total, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5).to(dtype)
    targets = torch.randint(VOCABULARY, (total,), generator=generator)
    logps = _logps(hidden.double(), weight.double(), targets)
    old = logps.float() + 0.3 * torch.randn(total, generator=generator)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    advantages = torch.tensor([1.0, -0.5, -1.0, 0.5])
    inputs = Problem(hidden, weight, targets, advantages, old, ends)
    return Problem(*(tensor.to(device) for tensor in inputs))


def computed(p: Problem, backend: str) -> list[Tensor]:
    """Return loss, logps, dH and dW of the clipped loss by a backend, in fp64 on the CPU."""
    hidden, weight = (x.detach().clone().requires_grad_() for x in (p.hidden, p.weight))
    out = linear_grpo_loss(
        hidden, weight, p.targets, p.advantages, LossConfig(loss_type="grpo"),
        cu_seqlens=p.cu_seqlens, old_logps=p.old_logps, backend=backend,
    )  # fmt: skip
    grads = torch.autograd.grad(out.loss, (hidden, weight))
    return [x.detach().double().cpu() for x in (out.loss, out.logps, *grads)]


def explicit(p: Problem) -> list[Tensor]:
    """Return the same as `computed`, by explicit logits in fp64."""
    hidden, weight = (x.detach().double().cpu().requires_grad_() for x in (p.hidden, p.weight))
    logps = _logps(hidden, weight, p.targets.cpu())
    advantages = p.advantages.double().cpu().repeat_interleave(torch.tensor(LENGTHS))
    ratio = (logps - p.old_logps.double().cpu()).exp()
    terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = torch.stack([part.mean() for part in terms.split(list(LENGTHS))]).mean()
    grads = torch.autograd.grad(loss, (hidden, weight))
    return [x.detach() for x in (loss, logps, *grads)]


def kernel_errors(p: Problem, backend: str) -> tuple[float, float, float, float]:
    """Return the ERRORS of a backend. NaN stays NaN."""
    # 1. Absolute error of loss and logps, relative L2 error of dH and dW.
    first, again, truth = computed(p, backend), computed(p, backend), explicit(p)
    pairs = list(zip(first, truth, strict=True))
    values = torch.stack([(a - b).abs().max() for a, b in pairs[:2]]).max()
    gradients = torch.stack([(a - b).norm() / b.norm() for a, b in pairs[2:]]).max()
    # 2. Numbers that change in a second run, or if a completion is computed alone.
    start, end = p.cu_seqlens[2:4].tolist()
    alone = p._replace(
        hidden=p.hidden[start:end], targets=p.targets[start:end], advantages=p.advantages[2:3],
        old_logps=p.old_logps[start:end], cu_seqlens=p.cu_seqlens[2:4] - p.cu_seqlens[2],
    )  # fmt: skip
    changed = sum(int((a != b).sum()) for a, b in zip(first, again, strict=True))
    changed += int((computed(alone, backend)[1] != first[1][start:end]).sum())
    return float(values), float(gradients), float(changed), own_divergence(p, backend)


def own_divergence(p: Problem, backend: str) -> float:
    """Return the largest divergence from itself; inf if different states have no divergence."""
    largest = 0.0
    for kind, is_own in product(DIVERGENCES, (True, False)):
        teacher = TeacherHead(p.hidden if is_own else p.hidden.roll(1, 0), p.weight)
        values = linear_divergence(p.hidden, p.weight, teacher, kind, backend=backend).values
        if is_own:
            largest = max(largest, float(values.abs().max()))
        elif not (values > 0.1).all():
            return float("inf")
    return largest


def resumed_differences() -> float:
    """Count weights that differ between a run of two steps and one resumed after the first."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        full = Path(folder, "full")
        resumed = Path(folder, "resumed")
        loop.train(load_recipe("sort", [*RUN, f"output_dir={full}"]))
        shutil.copytree(full, resumed)
        newest, first = checkpoints_in(resumed)
        shutil.rmtree(newest)
        loop.train(load_recipe("sort", [*RUN, f"output_dir={resumed}", "resume=auto"]))
        ends = [load_file(run / "model" / "model.safetensors") for run in (full, resumed)]
        start = load_file(export(first, Path(folder, "first")) / "model.safetensors")
    if all(torch.equal(start[name], ends[0][name]) for name in start):
        raise RuntimeError("the second step changed no weight")
    return float(sum(int((ends[0][name] != ends[1][name]).sum()) for name in ends[0]))


def _logps(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return (hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
