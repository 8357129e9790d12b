"""One GRPO step three ways, small; the full size: `grpo-fast bench step`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.trainers import step as bench_step
from benchmarks.trainers.step_providers import make_problem, prepare
from grpo_fast.train.config import ModelConfig
from tests.tiny import tiny_model

VOCAB = 512
NAMES = ("shared", "packed", "padded")


def options(**changes):
    fields = {"tokens_per_microbatch": 1 << 40, "padded_rows": None, **changes}
    return SimpleNamespace(model=ModelConfig(path="x", device="cpu"), **fields)


def prompts(count, tokens):
    if Path(bench_step.GSM8K).is_dir():
        return bench_step.k_shot_prompts(str(bench_step.GSM8K), count, tokens, VOCAB)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, VOCAB, (count, tokens), generator=generator).tolist()


@pytest.fixture(scope="module")
def problem():
    return make_problem(prompts(2, 500), group_size=4, longest=16, vocab=VOCAB)


@pytest.mark.parametrize(("family", "budget"), [("llama", 1 << 40), ("qwen3", 700)])
def test_shared_packed_and_padded_are_one_step(problem, family, budget):
    """In fp32: loss, gradients and metrics within 1e-5 (relative) of the padded step's."""
    model = tiny_model(family, vocab_size=VOCAB, max_position_embeddings=4096)
    chosen = options(tokens_per_microbatch=budget)
    providers = {name: prepare(name, model, problem, chosen) for name in NAMES}
    shared, packed, padded = (providers[name].tokens for name in NAMES)
    assert 3 * shared < packed < padded
    errors = bench_step.verify(providers, problem, tolerance=1e-5)
    assert set(errors) == set(NAMES)


def test_a_wrong_step_is_not_timed(problem):
    model = tiny_model("llama", vocab_size=VOCAB, max_position_embeddings=4096)
    providers = {name: prepare(name, model, problem, options()) for name in ("shared", "padded")}
    with torch.no_grad():
        providers["shared"].policy.lm.model.layers[0].mlp.down_proj.weight[0, 0] += 1.0
    with pytest.raises(SystemExit, match="shared differs from padded"):
        bench_step.verify(providers, problem, tolerance=1e-5)
