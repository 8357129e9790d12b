"""Tests that pin the public names, signatures and defaults, because other code relies on them."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch

import grpo_fast

TOKENS = dict.fromkeys(
    "completion_mask cu_seqlens old_logps ref_logps sampling_logps num_items_in_batch "
    "num_completions_in_batch".split()
)
RULE = dict(temperature=1.0, softcap=None, logit_scale=1.0, return_entropy=False, backend="auto")
LOSS = dict(backend="auto", validate="auto")
HEAD = dict(bias=None, hidden_rows=None, support=None, group=None)
SIGNATURES = {
    "linear_logps": ("hidden lm_head_weight target_ids", HEAD | RULE),
    "logits_logps": ("logits target_ids", RULE | dict(support=None)),
    "grpo_loss": ("logps advantages config", TOKENS | dict(entropy=None)),
    "linear_grpo_loss": (
        "hidden lm_head_weight target_ids advantages config",
        HEAD | TOKENS | LOSS | dict(grad_filter=None, divergence=None),
    ),
    "logits_grpo_loss": (
        "logits target_ids advantages config",
        TOKENS | LOSS | dict(inplace=False, support=None),
    ),
}
NAMES = {
    *SIGNATURES, "Correction", "DivergenceTerm", "LossConfig", "LossOutput", "Support",
    "TeacherHead", "TeacherTopK", "group_advantages", "linear_divergence",
}  # fmt: skip
CONFIG = dict(
    loss_type="dapo", epsilon_low=0.2, delta=None, beta=0.0, kl_estimator="k3",
    kl_times_ratio=False, temperature=1.0, softcap=None, logit_scale=1.0,
    importance_sampling_level="token", max_completion_length=None, entropy_coef=0.0,
    top_entropy_quantile=1.0, sapo_temperature_pos=1.0,
    sapo_temperature_neg=1.05, compute_entropy=False,
)  # fmt: skip


def test_names_and_that_the_package_is_typed():
    assert set(grpo_fast.__all__) == NAMES
    assert (Path(grpo_fast.__file__).parent / "py.typed").is_file()  # type checkers need it


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    positional, keywords = SIGNATURES[name]
    parameters = inspect.signature(getattr(grpo_fast, name)).parameters
    named = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    first = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert first == positional.split() and named == keywords


def test_group_advantages_signature():
    said = str(inspect.signature(grpo_fast.group_advantages))
    assert re.match(r"\(rewards: \S+, mode: \S+ = 'normalized', \*, group_size: .* = None,", said)


def test_config_fields_and_defaults():
    fields = {f.name: f.default for f in dataclasses.fields(grpo_fast.LossConfig)}
    assert {k: fields[k] for k in CONFIG} == CONFIG
    assert fields["epsilon_high"] is None and fields["aggregation"] is None
    assert grpo_fast.LossConfig.__dataclass_params__.frozen


def test_output_fields():
    out = grpo_fast.grpo_loss(torch.zeros(1, 2), torch.ones(1), grpo_fast.LossConfig())
    assert isinstance(out, grpo_fast.LossOutput)
    assert isinstance(out.metrics, dict) and out.entropy is None
    assert out.loss.dim() == 0 and out.logps.shape == (1, 2)
