"""Tests of `grpo-fast eval`: settings from a recipe, and the comparison of two models."""

import json
from pathlib import Path

import pytest

from grpo_fast import rollout
from grpo_fast.train.config.recipes import load_recipe, save_config
from grpo_fast.train.evaluation.command import Source, is_model, read_settings, run_eval
from tests.command_line import RECIPE as RECIPE_FILE
from tests.command_line import invoke, refused, write_recipe
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
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [tiny_folder(folder / f"m{seed}", seed=seed) for seed in (0, 1)]


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


def test_a_plain_model_is_asked_as_the_recipe_says(models, recipe, asked):
    found = run_eval(models[:1], [f"recipe={recipe}"])
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


def test_a_setting_counts_before_the_recipe(models, recipe, asked):
    words = [f"recipe={recipe}", "n=3", "samples=2", "top_k=0", "max_new_tokens=2", "temperature=2"]
    found = run_eval(models[:1], [*words, "system_prompt=Other."])
    assert found["sampled"]["eval_n"] == 3 and found["sampled"]["eval_samples"] == 2
    assert "eval_pass@2" in found["sampled"] and "eval_pass@4" not in found["sampled"]
    _, prompts, options = asked[1].args
    assert (options.temperature, options.top_p, options.top_k) == (2.0, 0.8, 0)
    assert options.max_new_tokens == 2 and prompts[0][0]["content"] == "Other."


def test_long_prompts_are_skipped_before_the_questions_are_counted(
    models, recipe, tmp_path, asked, caplog
):
    questions = ["1+2?" * 40, "2+2?", "3+3?", "4+4?" * 40]
    lines = [{"question": text, "answer": "#### 4"} for text in questions]
    write_lines(tmp_path / "test.jsonl", *lines)
    words = [f"recipe={recipe}", "samples=1", "k=[]", "temperature=0", "max_prompt_tokens=160"]
    found = run_eval(models, words)  # the same questions for both models
    assert {metric.n for metric in found["greedy"].values()} == {2}
    shown = [[messages[-1]["content"] for messages in call.args[1]] for call in asked]
    assert [[text[:4] for text in each] for each in shown] == [["2+2?", "3+3?"]] * 2
    assert "2 test prompts have more tokens, and are skipped" in caplog.text


def test_the_training_split_is_not_read(models, recipe, tmp_path):
    """Check that a bad row in the training file does not prevent an evaluation."""
    write_lines(tmp_path / "train.jsonl", "{")
    found = run_eval(models[:1], [f"recipe={recipe}", "samples=1", "k=[]"])
    assert found["greedy"]["eval_n"] == 2


def settings_of(*words, recipe=None):
    """Return the configuration for evaluating a model that is not a run's folder."""
    named = [] if recipe is None else [f"recipe={recipe}"]
    return read_settings([Source("m", "m", None)], [*words, *named], False)[1]


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
    with pytest.raises(ValueError, match="model: expected a run that has ended and saved its mod"):
        Source.of(str(tmp_path))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="got a checkpoint; `grpo-fast export .* OUT` writes"):
        Source.of(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")  # now it is a model's folder
    assert Source.of(str(tmp_path)).run is None


def test_a_recipes_code_needs_leave(models, recipe, tmp_path, monkeypatch):
    code = "def score(prompts, completions, answers):\n    return [0.25] * len(prompts)\n"
    (tmp_path / "planted_eval.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["eval", models[0], f"recipe={recipe}", "samples=1"]
    text = Path(recipe).read_text()
    Path(recipe).write_text(text.replace("gsm8k_format", "'planted_eval:score'"))
    assert refused(invoke(*words), "planted_eval:score", "own.yaml", "--allow-code")
    assert "rewards/score                 0.2500" in invoke(*words, "--allow-code").output
    assert refused(invoke("eval", models[0], "recipe=gsm8k-tinny"), "gsm8k-tinny", "nearest")


def test_two_models_get_the_same_questions_and_random_numbers(models, recipe, asked):
    words = [f"recipe={recipe}", "n=3"]
    found = run_eval(models, words)
    first, second = ([(c.args[1], c.options["group_size"], c.options["seed"]) for c in calls]
                     for calls in (asked[:2], asked[2:]))  # fmt: skip
    assert first == second
    assert {"accuracy_strict", "accuracy_lenient", "reward", "pass@4"} <= found["sampled"].keys()
    same = run_eval([models[0], models[0]], [f"recipe={recipe}"])
    for metrics in same.values():
        for metric in metrics.values():
            assert (metric.difference, metric.p, metric.n) == (0.0, 1.0, 2)
            assert metric.a == metric.b
    for letter, model in zip("ab", models, strict=True):
        alone = run_eval([model], words)
        for mode, metrics in found.items():
            for name, metric in metrics.items():
                assert getattr(metric, letter) == pytest.approx(alone[mode][f"eval_{name}"])


def test_two_models_on_the_command_line(models, recipe, tmp_path):
    out = tmp_path / "both.json"
    words = ("eval", *models, f"recipe={recipe}", "samples=1", f"out={out}")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    assert f"A: {models[0]}\nB: {models[1]}\n" in result.output
    assert "B − A, n=2 questions" in result.output and "p = " in result.output
    written = json.loads(out.read_text())
    assert written["models"] == {"a": models[0], "b": models[1]}
    assert set(written["greedy"]["accuracy_strict"]) == {"a", "b", "difference", "se", "p", "n"}
    assert invoke(*words).exit_code == 0  # overwrites its earlier results
    assert refused(invoke("eval", *models, models[0], "n=1"), "expected key=value, got")
    assert is_model("owner/name") and is_model(models[0])
    assert not is_model("n") and not is_model("data=a/b.jsonl")


def test_runs_of_two_tasks_are_not_compared(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    other = RECIPE_FILE.replace("{task: sort, digits: 3, n_test: 8}", "{task: open}").replace(
        "sort_positions", "distinct_words"
    )
    first, second = write_recipe(tmp_path / "one"), write_recipe(tmp_path / "two", other)
    for path in (first, second):
        assert invoke("train", path, "steps=0", "log.progress=false").exit_code == 0
    runs = [str(tmp_path / name / "run") for name in ("one", "two")]
    assert refused(invoke("eval", *runs), "expected two runs of one task", "sort", "open")
