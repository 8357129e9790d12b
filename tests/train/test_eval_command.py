"""Tests of `grpo-fast eval`: settings from a recipe, and custom code."""

import json
from pathlib import Path

import pytest

from grpo_fast import rollout
from grpo_fast.train.config.recipes import load_recipe, save_config
from grpo_fast.train.evaluation.command import Source, read_settings, run_eval
from tests.command_line import invoke, refused
from tests.data.test_data import write_lines
from tests.tiny import tiny_folder

RECIPE = """
model: {path: nowhere}
data: {task: gsm8k, path: DATA, system_prompt: 'Be terse.', prompt_template: answer_tag}
rewards: [{name: gsm8k_format, weight: 3.0}, {name: gsm8k_correct_lenient}]
rollout: {max_new_tokens: 5}
eval: {n: 2, samples: 4, temperature: 0.9, top_p: 0.8, top_k: 7, k: [1, 4]}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model") / "m", seed=0)


@pytest.fixture
def recipe(tmp_path):
    """Write a recipe whose data set has three test questions. Return the path of the recipe."""
    for name, count in (("train", 2), ("test", 3)):
        lines = [{"question": f"{name} {i}+2?", "answer": f"#### {i + 2}"} for i in range(count)]
        write_lines(tmp_path / f"{name}.jsonl", *lines)
    path = tmp_path / "own.yaml"
    path.write_text(RECIPE.replace("DATA", str(tmp_path)))
    return str(path)


@pytest.fixture
def asked(spied):
    """Return a list to which each call of `rollout.generate` is appended."""
    return spied(rollout, "generate")


def test_a_plain_model_is_asked_as_the_recipe_says(model, recipe, asked):
    found = run_eval(model, [f"recipe={recipe}"])
    assert set(found) == {"greedy", "sampled"} and found["sampled"]["eval_n"] == 2
    assert {"eval_pass@1", "eval_pass@4", "eval_pass@4_lenient"} <= found["sampled"].keys()
    assert "eval_pass@2" not in found["sampled"]
    named = {"eval_rewards/gsm8k_format", "eval_rewards/gsm8k_correct_lenient"}
    assert named <= found["greedy"].keys()
    (_, prompts, greedy), (_, _, options) = (call.args for call in asked)
    system, user = prompts[0]
    assert system == {"role": "system", "content": "Be terse."}
    assert user["content"].startswith("test 0+2?") and "<answer>" in user["content"]
    assert [call.options["group_size"] for call in asked] == [1, 4] and greedy.temperature == 0
    assert (options.temperature, options.top_p, options.top_k) == (0.9, 0.8, 7)
    assert options.max_new_tokens == greedy.max_new_tokens == 5


def test_a_setting_counts_before_the_recipe(model, recipe, asked):
    words = [f"recipe={recipe}", "n=3", "samples=2", "top_k=0", "max_new_tokens=2", "temperature=2"]
    found = run_eval(model, [*words, "system_prompt=Other."])
    assert found["sampled"]["eval_n"] == 3 and found["sampled"]["eval_samples"] == 2
    assert "eval_pass@2" in found["sampled"] and "eval_pass@4" not in found["sampled"]
    _, prompts, options = asked[1].args
    assert (options.temperature, options.top_p, options.top_k) == (2.0, 0.8, 0)
    assert options.max_new_tokens == 2 and prompts[0][0]["content"] == "Other."


def settings_of(*words, recipe=None):
    """Return the configuration for evaluating a model that is not a run's folder."""
    named = [] if recipe is None else [f"recipe={recipe}"]
    return read_settings(Source("m", "m", None), [*words, *named], False)[1]


def test_chat_is_switched_off_by_a_setting():
    recipe = "gsm8k-qwen2.5-0.5b"
    assert settings_of(recipe=recipe).data.chat
    assert not settings_of("chat=false", recipe=recipe).data.chat
    task = ["data=x.jsonl", "task=jsonl"]
    assert not settings_of(*task).data.chat and settings_of(*task, "chat=true").data.chat
    smol = settings_of("k=2", recipe="gsm8k-smollm2-1.7b").eval
    assert smol.samples == 8 and smol.k == [2]
    assert settings_of("eval.samples=2", recipe="gsm8k-smollm2-1.7b").eval.k == []
    with pytest.raises(ValueError, match="data: expected a file, a folder, a hub id or a section"):
        settings_of("data=5")
    with pytest.raises(ValueError, match="eval.k: expected values up to samples = 8, got"):
        settings_of("k=9", recipe="gsm8k-smollm2-1.7b")


def test_rewards_of_the_words_replace_the_default_rewards():
    task = ["data=x.jsonl", "task=jsonl"]
    assert [reward.name for reward in settings_of(*task).rewards] == ["exact_match"]
    words = [*task, "rewards=distinct_words"]
    assert [reward.name for reward in settings_of(*words).rewards] == ["distinct_words"]


@pytest.mark.parametrize("word", ["model=x", "trust_remote_code=true"])
def test_a_setting_does_not_name_the_model(word):
    with pytest.raises(ValueError, match="model: expected the model as the first argument"):
        settings_of(word, recipe="sort")


def test_a_run_without_its_model_is_refused_by_that_name(tmp_path):
    save_config(load_recipe("sort"), tmp_path / "config.yaml")
    with pytest.raises(ValueError, match="model: expected a model, or a run that has ended and"):
        Source.of(str(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="no model in .*; `grpo-fast export .* OUT` writes"):
        Source.of(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")  # now it is a model's folder
    assert Source.of(str(tmp_path)).run is None


def test_a_recipes_code_needs_leave(model, recipe, tmp_path, monkeypatch):
    code = "def score(prompts, completions, answers):\n    return [0.25] * len(prompts)\n"
    (tmp_path / "planted_eval.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["eval", model, f"recipe={recipe}", "samples=1"]
    text = Path(recipe).read_text()
    Path(recipe).write_text(text.replace("gsm8k_format", "'planted_eval:score'"))
    assert refused(invoke(*words), "planted_eval:score", "own.yaml", "--allow-code")
    assert "rewards/score                 0.2500" in invoke(*words, "--allow-code").output
    assert refused(invoke("eval", model, "recipe=gsm8k-tinny"), "gsm8k-tinny", "nearest")


def test_results_are_written_and_one_model_is_evaluated(model, recipe, tmp_path):
    out = tmp_path / "metrics.json"
    words = ("eval", model, f"recipe={recipe}", "samples=1", f"out={out}")
    result = invoke(*words)
    assert result.exit_code == 0 and "greedy (n=2 questions, 1 sample(s) each)" in result.output
    assert json.loads(out.read_text())["greedy"]["eval_n"] == 2
    assert refused(invoke("eval", model, model), "evaluate each model alone, got '")
