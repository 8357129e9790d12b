"""Self-tests for this machine: kernels, attention, a small model, a rollout and a resumed run."""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_fast import LossConfig, linear_grpo_loss, linear_logps
from grpo_fast.attention import check_tolerance
from grpo_fast.attention.dispatch import Kind, candidates, pair_of
from grpo_fast.data import reason
from grpo_fast.data.splits import Splits
from grpo_fast.doctor.diagnosis import DoctorSettings, examine_engine
from grpo_fast.kernels import route
from grpo_fast.kernels.agree import Pair
from grpo_fast.rollout.engine import NOISE
from grpo_fast.rollout.own.engine import LOOP, gap_of
from grpo_fast.train import loop
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.folder import checkpoints_in
from grpo_fast.train.models.loading import build_tokenizer, load_policy, packed_gap
from grpo_fast.train.models.policy import Policy

ERRORS = ("loss and logps against fp64", "gradients against fp64", "same bits again, and alone")
BACKENDS = ("torch", "cpu", "triton")
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = [9, 1, 17, 5]  # tokens of each completion
HIDDEN = 64
VOCABULARY = 4096  # large enough to select the kernels for large vocabularies
HEAD_DIM = 64  # head dimension in the tests of attention kernels
LOGPS = 1e-5  # allowed absolute error of loss and logps in any dtype
GRADIENTS = {torch.float32: 2e-6, torch.bfloat16: 3e-3}  # allowed relative error
MODEL = ("model.config.hidden_size=16", "model.config.intermediate_size=32",
         "model.config.num_hidden_layers=1")  # fmt: skip
RUN = (
    *MODEL,
    "steps=2", "checkpoint.every=1", "checkpoint.keep=2", "optim.schedule=constant",
    "rollout.prompts_per_step=2", "rollout.group_size=4", "data.n_test=4", "eval.every=0",
    "log.progress=false", "log.completions_every=0",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """Result of one self-test."""

    name: str
    error: float | None  # measured error; None if the self-test did not run
    bound: float  # largest allowed error
    note: str = ""  # why the self-test failed or did not run

    @property
    def ok(self) -> bool:
        """Return True if the error is within the bound or the self-test cannot run here."""
        return self.error is None or self.error <= self.bound

    @property
    def line(self) -> str:
        """Return the result as one line of text."""
        if self.error is None:
            return f"skipped  {self.name} {self.note}"
        word = "ok" if self.ok else "FAILED"
        return f"{word:8} {self.name} {self.error:.1e} (allowed {self.bound:.1e}) {self.note}"


def self_checks() -> list[Check]:
    """Run every self-test on the GPU, or on the CPU if there is no GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [
        *kernel_checks(device), *attention_checks(device), *model_checks(device),
        *run_checks(device),
    ]  # fmt: skip


def checked(name: str, bound: float, gap: Callable[[], float]) -> Check:
    """Measure a gap. An exception counts as an infinite gap."""
    try:
        return Check(name, gap(), bound)
    except Exception as error:  # a kernel may raise any exception; the other tests must still run
        return Check(name, float("inf"), bound, reason(error))


def kernel_checks(device: torch.device) -> Iterator[Check]:
    """Compare loss and gradients of every backend with an fp64 reference."""
    for backend, dtype in product(BACKENDS, DTYPES):
        missing = route.unavailable(backend, device.type)
        name = f"{backend} {str(dtype).removeprefix('torch.')}"
        if missing is not None:
            yield Check(name, None, 0.0, missing.splitlines()[0])
            continue
        for error, pair in kernel_pairs(random_inputs(dtype, device), backend).items():
            yield checked(f"{name}: {error}", pair.bar, pair.gap)


def attention_checks(device: torch.device) -> Iterator[Check]:
    """Compare every attention kernel with a reference that computes the full score matrix."""
    for dtype, extra in product(DTYPES, ("", ", window", ", softcap")):
        is_special = extra == ", window", extra == ", softcap"
        kind = Kind(device.type, dtype, HEAD_DIM, *is_special, gpu=device.index)
        for provider in candidates(kind):
            pair = pair_of(provider.attend, kind)
            name = f"attention {provider.name} {str(dtype).removeprefix('torch.')}{extra}"
            yield checked(name, pair.bar, pair.gap)


def model_checks(device: torch.device) -> Iterator[Check]:
    """Compare packed rows and our sampling loop with the forward pass of a small model."""
    config = load_recipe("sort", [f"model.device={device}", *MODEL])
    bound = check_tolerance(torch.float32)

    @functools.cache
    def policy() -> Policy:
        torch.manual_seed(config.seed)
        return load_policy(config.model, build_tokenizer(config.model, Splits(config.data, 0)))

    def packed() -> float:
        unshared = policy().unshared
        if unshared is not None:  # loading the policy has found a difference
            raise ValueError(unshared)
        return packed_gap(policy())

    def sampled() -> float:
        with policy().generation():
            return gap_of(policy(), LOOP)

    yield checked("packed rows: logps against the model's", bound, packed)
    yield checked("our loop: logps against the model's", bound, sampled)


def run_checks(device: torch.device) -> Iterator[Check]:
    """Compare a rollout with the trainer, and a resumed run with an uninterrupted run."""
    words = [f"model.device={device}", "rollout.temperature=0.8", "rollout.max_new_tokens=24"]
    config = load_recipe("sort", [*words, "model.config.initializer_range=0.3"])
    name = "rollout: logps against the trainer's"
    small = DoctorSettings(n=4)
    yield checked(name, NOISE[torch.float32], lambda: examine_engine(small, config).mean)
    yield checked("checkpoint: a resumed run's weights, bit for bit", 0.0, resumed_differences)


def random_inputs(dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Return random inputs of the loss for the kernel tests.

    The old log-probabilities differ enough from the current ones that some ratios are clipped.
    """
    generator = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    hidden = torch.randn(total, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5).to(dtype)
    targets = torch.randint(VOCABULARY, (total,), generator=generator)
    logps = linear_logps(hidden.double(), weight.double(), targets, backend="torch")
    inputs = {
        "hidden": hidden, "lm_head_weight": weight, "target_ids": targets,
        "advantages": torch.tensor([1.0, -0.5, -1.0, 0.5]),
        "old_logps": logps + 0.3 * torch.randn(total, generator=generator),
        "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0).int(),
    }  # fmt: skip
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def fused_results(inputs: dict[str, Tensor], backend: str) -> list[Tensor]:
    """Compute the fused loss and its gradients with a backend.

    Returns:
        Loss, log-probabilities, and the flattened gradients of `hidden` and `weight`, in fp64 on
        the CPU.
    """
    hidden = inputs["hidden"].detach().requires_grad_()
    weight = inputs["lm_head_weight"].detach().requires_grad_()
    leaves = {"hidden": hidden, "lm_head_weight": weight}
    options: Any = {**inputs, **leaves, "backend": backend}
    out = linear_grpo_loss(config=LossConfig(loss_type="grpo"), **options)
    gradients = torch.autograd.grad(out.loss, (hidden, weight))
    flat = (x.flatten() for x in gradients)
    return [x.detach().double().cpu() for x in (out.loss, out.logps, *flat)]


def kernel_pairs(inputs: dict[str, Tensor], backend: str) -> dict[str, Pair]:
    """Return one pair for each name in `ERRORS`."""
    exact = {name: x.cpu() for name, x in inputs.items()}
    exact |= {name: exact[name].double() for name in ("hidden", "lm_head_weight")}
    start, end = inputs["cu_seqlens"][2:4].tolist()
    third = {name: inputs[name][start:end] for name in ("hidden", "target_ids", "old_logps")}
    third["advantages"] = inputs["advantages"][2:3]
    third["cu_seqlens"] = inputs["cu_seqlens"][2:4] - start

    def ours() -> list[Tensor]:
        return fused_results(inputs, backend)

    def theirs() -> list[Tensor]:
        return fused_results(exact, "torch")

    # Results must depend neither on the run nor on the rest of the batch.
    def with_alone() -> list[Tensor]:
        found = ours()
        return [*found, found[1][start:end]]

    def again() -> list[Tensor]:
        return [*ours(), fused_results({**inputs, **third}, backend)[1]]

    bar = GRADIENTS[inputs["hidden"].dtype]
    pairs = (
        Pair(lambda: ours()[:2], lambda: theirs()[:2], (), LOGPS, in_nats=True),
        Pair(lambda: ours()[2:], lambda: theirs()[2:], (), bar, by_norm=True),
        Pair(with_alone, again, (), 0.0, in_nats=True),
    )
    return dict(zip(ERRORS, pairs, strict=True))


def resumed_differences() -> float:
    """Count the weights that differ between an uninterrupted and a resumed run of two steps.

    The second run resumes from the checkpoint of the first step.
    """
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        full = Path(folder, "full")
        resumed = Path(folder, "resumed")
        loop.train(load_recipe("sort", [*RUN, f"output_dir={full}"]))
        shutil.copytree(full, resumed)
        # Remove the results of the second step, so that the resumed run must write them.
        shutil.rmtree(checkpoints_in(resumed)[0])
        shutil.rmtree(resumed / "model")
        loop.train(load_recipe("sort", [*RUN, f"output_dir={resumed}", "resume=auto"]))
        expected, found = (load_file(x / "model" / "model.safetensors") for x in (full, resumed))
    return float(sum(int((expected[name] != found[name]).sum()) for name in expected))
