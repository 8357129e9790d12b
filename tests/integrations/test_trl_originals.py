"""Tests that TRL samples if a function that `generate` uses was replaced, or if a hook was added.

`fast_path` must name the function or the hook.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.16")
peft = importlib.import_module("peft")
transformers = importlib.import_module("transformers")
utils = importlib.import_module("transformers.generation.utils")
cases = importlib.import_module("tests.integrations.trl_cases")
fast = importlib.import_module("grpo_fast.integrations.trl.trainer")
originals = importlib.import_module("grpo_fast.integrations.trl.originals")

Mixin = utils.GenerationMixin
Llama = transformers.LlamaForCausalLM


def wrapped(function: Any) -> Callable[..., Any]:
    """Return a wrapper of `function` that has the same name and module."""

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return wrapper


# Each entry has a class, the method to replace, and the name of this method in the expected reason.
CLASSES: dict[str, tuple[Any, str, str]] = {
    "mixin": (Mixin, "generate", "model.generate"),
    "class": (Llama, "generate", "model.generate"),
    "sample": (Mixin, "_sample", "model._sample"),
    "criteria": (Mixin, "_get_stopping_criteria", "model._get_stopping_criteria"),
    "inputs": (Llama, "prepare_inputs_for_generation", "model.prepare_inputs_for_generation"),
    "static": (Mixin, "_expand_inputs_for_generation", "model._expand_inputs_for_generation"),
    "top_k": (utils.TopKLogitsWarper, "__call__", "transformers.generation.TopKLogitsWarper"),
    "top_k_made": (utils.TopKLogitsWarper, "__init__", "transformers.generation.TopKLogitsWarper"),
    "end": (utils.EosTokenCriteria, "__call__", "transformers.generation.EosTokenCriteria"),
}


@pytest.fixture(scope="module")
def trainers(model_path, tmp_path_factory):
    """Return a trainer without LoRA, and two with LoRA, one for each class of PEFT models."""
    out = tmp_path_factory.mktemp("originals")
    options = {"plain": {}, "lora": {"lora": {}}, "task": {"lora": {"task_type": "CAUSAL_LM"}}}
    return {
        name: cases.trainer(fast.FastGRPOTrainer, model_path, out, **given)
        for name, given in options.items()
    }


@pytest.mark.parametrize("case", CLASSES)
def test_a_replaced_method_of_a_class(trainers, monkeypatch, case):
    cls, name, reason = CLASSES[case]
    assert not isinstance(trainers["plain"]._sampling(), str)
    original = getattr(cls, name, None) or getattr(Llama, name)
    monkeypatch.setattr(cls, name, wrapped(original), raising=False)
    said = str(trainers["plain"]._sampling())
    assert reason in said and "is not transformers' own" in said


@pytest.mark.parametrize("name", ["generate", "_sample", "forward"])
def test_what_was_replaced_before_the_trainer_was_built(model_path, tmp_path, monkeypatch, name):
    """Check that methods which were replaced before the trainer was built are found.

    TRL stores the `forward` of the model in the closure of its fused head. The trainer must also
    find a replaced `forward` in this closure.
    """
    monkeypatch.setattr(Llama, name, wrapped(getattr(Llama, name)), raising=False)
    trainer = cases.trainer(fast.FastGRPOTrainer, model_path, tmp_path)
    assert trainer._sampling() == f"model.{name} is not transformers' own"


@pytest.mark.parametrize("name", ["TopPLogitsWarper", "StoppingCriteriaList"])
def test_another_class_in_the_place_of_a_part(trainers, monkeypatch, name):
    monkeypatch.setattr(utils, name, type(name, (getattr(utils, name),), {}))
    assert f"transformers.generation.{name} is not" in trainers["plain"]._sampling()


ATTRIBUTES = {
    "generate": lambda lm, model: (lm, "generate", "model.generate"),
    "sample": lambda lm, model: (lm, "_sample", "model._sample"),
    "forward": lambda lm, model: (lm, "forward", "model.forward"),
    "head": lambda lm, model: (lm.lm_head, "forward", "lm_head.forward"),
    "outer": lambda lm, model: (model, "generate", "model.generate"),
    "outer_forward": lambda lm, model: (model, "forward", "model.forward"),
    "outer_class": lambda lm, model: (type(model), "forward", "model.forward"),
}


@pytest.mark.parametrize("kind", ["plain", "lora", "task"])
@pytest.mark.parametrize("how", [wrapped, functools.partial])
@pytest.mark.parametrize("case", ATTRIBUTES)
def test_a_replaced_attribute(trainers, monkeypatch, case, how, kind):
    trainer = trainers[kind]
    owner, name, reason = ATTRIBUTES[case](trainer._lm, trainer.model)
    if case == "outer_class" and kind == "plain":
        pytest.skip("TRL holds the forward that the class had")
    assert not isinstance(trainer._sampling(), str)
    replacement = how(getattr(owner, name))
    if isinstance(owner, type):
        monkeypatch.setattr(owner, name, replacement)
    else:
        # With pytest 8.0, undoing `setattr` leaves an attribute in the instance, which hides the
        # method of its class from all tests that follow.
        monkeypatch.setitem(vars(owner), name, replacement)
    assert trainer._sampling() == f"{reason} is not transformers' own"


HOOKED = {  # module with a hook, and the expected reason
    "": "a forward hook of model",
    "lm_head": "a forward hook of lm_head",
    "model.layers.0": "a forward hook was added after the trainer was built",
}


@pytest.mark.parametrize("pre", [False, True])
@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_of_somebody_else(trainers, name, pre):
    trainer = trainers["plain"]
    module = trainer._lm.get_submodule(name)
    register = module.register_forward_pre_hook if pre else module.register_forward_hook
    with register(lambda *_: None):
        assert HOOKED[name] in str(trainer._sampling())
    assert not isinstance(trainer._sampling(), str)


def test_a_bound_method_of_the_model_is_the_original(trainers, monkeypatch):
    trainer = trainers["plain"]
    monkeypatch.setitem(vars(trainer._lm), "generate", trainer._lm.generate)
    assert not isinstance(trainer._sampling(), str)


def test_the_replacement_decides_the_tokens(model_path, tmp_path, monkeypatch):
    def generate(self: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.nn.functional.pad(input_ids, (0, 3), value=7)

    monkeypatch.setattr(Mixin, "generate", generate)
    trainer = cases.trainer(fast.FastGRPOTrainer, model_path, tmp_path, max_steps=1)
    del trainer._generate_single_turn
    drawn, _ = trainer._generate_single_turn([[5, 6, 7], [8, 9]], None, {}, 1)
    assert {token for ids in drawn for token in ids} == {7}
    assert trainer.fast_path["rollouts"].startswith("TRL's: ")
