"""The pinned names and signatures: other code is written against them."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import grpo_fast

SIGNATURES = {
    "linear_logps": (
        "hidden lm_head_weight target_ids",
        dict(
            bias=None,
            temperature=1.0,
            softcap=None,
            logit_scale=1.0,
            return_entropy=False,
            backend="auto",
        ),
    ),
    "logits_logps": (
        "logits target_ids",
        dict(temperature=1.0, softcap=None, logit_scale=1.0, return_entropy=False, backend="auto"),
    ),
    "grpo_loss": (
        "logps advantages config",
        dict(
            completion_mask=None,
            cu_seqlens=None,
            old_logps=None,
            ref_logps=None,
            sampling_logps=None,
            entropy=None,
            num_items_in_batch=None,
            num_completions_in_batch=None,
        ),
    ),
    "linear_grpo_loss": (
        "hidden lm_head_weight target_ids advantages config",
        dict(
            bias=None,
            completion_mask=None,
            cu_seqlens=None,
            old_logps=None,
            ref_logps=None,
            sampling_logps=None,
            num_items_in_batch=None,
            num_completions_in_batch=None,
            backend="auto",
            validate="auto",
        ),
    ),
    "logits_grpo_loss": (
        "logits target_ids advantages config",
        dict(
            completion_mask=None,
            cu_seqlens=None,
            old_logps=None,
            ref_logps=None,
            sampling_logps=None,
            num_items_in_batch=None,
            num_completions_in_batch=None,
            backend="auto",
            validate="auto",
            inplace=False,
        ),
    ),
}
# Keywords that came after the pinned ones: optional, so that no pinned call changes.
ADDED = {
    "linear_logps": dict(hidden_rows=None, support=None, group=None),
    "logits_logps": dict(support=None),
    "linear_grpo_loss": dict(
        hidden_rows=None, support=None, grad_filter=None, divergence=None, group=None
    ),
    "logits_grpo_loss": dict(support=None),
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


def test_names():
    assert set(grpo_fast.__all__) == NAMES
    for name in NAMES:
        assert getattr(grpo_fast, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    positional, keywords = SIGNATURES[name]
    parameters = inspect.signature(getattr(grpo_fast, name)).parameters
    by_kind = {
        kind: [p for p in parameters.values() if p.kind == kind] for kind in inspect._ParameterKind
    }
    assert [p.name for p in by_kind[inspect.Parameter.POSITIONAL_OR_KEYWORD]] == positional.split()
    assert {
        p.name: p.default for p in by_kind[inspect.Parameter.KEYWORD_ONLY]
    } == keywords | ADDED.get(name, {})


def test_group_advantages_signature():
    parameters = inspect.signature(grpo_fast.group_advantages).parameters
    assert (
        list(parameters)[:2] == ["rewards", "mode"] and parameters["mode"].default == "normalized"
    )
    assert parameters["group_size"].kind is inspect.Parameter.KEYWORD_ONLY
    assert parameters["group_size"].default is inspect.Parameter.empty


def test_config_fields_and_defaults():
    fields = {f.name: f.default for f in dataclasses.fields(grpo_fast.LossConfig)}
    assert {k: fields[k] for k in CONFIG} == CONFIG
    assert fields["epsilon_high"] is None and fields["aggregation"] is None
    assert grpo_fast.LossConfig.__dataclass_params__.frozen


def test_output_fields():
    out = grpo_fast.grpo_loss(torch.zeros(1, 2), torch.ones(1), grpo_fast.LossConfig())
    assert isinstance(out, grpo_fast.LossOutput)
    assert (
        isinstance(out.metrics, dict)
        and out.entropy is None
        and out.loss.dim() == 0
        and out.logps.shape == (1, 2)
    )


def test_metrics_are_of_the_call_whenever_they_are_read():
    """They may be computed late, but a caller who reuses a buffer in between must not change
    them.
    """
    logps, old = torch.full((1, 3), -1.0), torch.full((1, 3), -1.5)
    out = grpo_fast.grpo_loss(logps, torch.ones(1), grpo_fast.LossConfig(), old_logps=old)
    again = grpo_fast.grpo_loss(logps, torch.ones(1), grpo_fast.LossConfig(), old_logps=old)
    expected = {k: v.clone() for k, v in again.metrics.items()}
    old.fill_(-9.0)
    logps.fill_(-7.0)
    for name, value in out.metrics.items():
        assert torch.equal(value, expected[name]), name


def test_three_lines_replace_a_trainers_loss():
    """The README's promise: hidden states, head, ids, advantages in; a scalar with gradients
    out.
    """
    hidden = torch.randn(2, 5, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    out = grpo_fast.linear_grpo_loss(
        hidden, weight, torch.randint(50, (2, 5)), torch.tensor([1.0, -1.0]), grpo_fast.LossConfig()
    )
    out.loss.backward()
    assert hidden.grad.shape == hidden.shape and weight.grad.shape == weight.shape


def test_the_package_says_that_it_is_typed():
    from pathlib import Path

    assert (Path(grpo_fast.__file__).parent / "py.typed").is_file()  # pyproject.toml ships it
