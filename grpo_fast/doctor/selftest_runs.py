"""Self-tests that take a model: what is sampled is what is trained on, what is saved goes on."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.doctor.diagnosis import diagnose
from grpo_fast.doctor.search import noise_of
from grpo_fast.doctor.selftest import Check, timed
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.train import loop
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.runs.checkpoint import checkpoints_in
from grpo_fast.train.runs.export import export

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
SYMBOLS = [str(i) for i in range(40)]
PROMPTS = ["3 1 2", "5", "0 9 8 7 6 5 4", "39 38 37 36"]


def run_checks(device: torch.device) -> Iterator[Check]:
    """A rollout against the trainer's forward pass, and a run that is left and goes on."""
    config = ModelConfig(config=MODEL, tokenizer="symbols", device=str(device))
    torch.manual_seed(0)
    policy = load_policy(config, build_symbol_tokenizer(SYMBOLS))
    yield timed(
        "rollout: logps against the trainer's", noise_of(policy),
        lambda: rollout_error(policy),
    )  # fmt: skip
    yield timed("checkpoint: a resumed run's weights, bit for bit", 0.0, resumed_differences)


def rollout_error(policy: Any) -> float:
    """Nats per token on average."""
    sampling = Sampling(max_new_tokens=24, temperature=0.8)
    return diagnose(policy, TransformersEngine(policy), PROMPTS, sampling).mean


def resumed_differences() -> float:
    """Weights that differ between a run of two steps and one that goes on after the first."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        whole, resumed = Path(folder, "whole"), Path(folder, "resumed")
        loop.train(load_recipe("sort", [*RUN, f"output_dir={whole}"]))
        first = checkpoints_in(whole)[-1]
        loop.train(load_recipe("sort", [*RUN, f"output_dir={resumed}", f"resume={first}"]))
        ends = [load_file(x / "model" / "model.safetensors") for x in (whole, resumed)]
        start = load_file(export(first, Path(folder, "first")) / "model.safetensors")
    if all(torch.equal(start[name], ends[0][name]) for name in start):
        raise RuntimeError("the second step changed no weight")
    return float(sum(int((ends[0][name] != ends[1][name]).sum()) for name in ends[0]))
