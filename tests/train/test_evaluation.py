"""Tests of the evaluation: its numbers, its settings, and how questions are asked."""

import itertools
import json
import math
import statistics
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from grpo_fast import rollout
from grpo_fast.data import Example
from grpo_fast.data.splits import Splits
from grpo_fast.data.tokenizer import has_chat_template
from grpo_fast.rewards import REWARDS, RewardSet, WeightedReward, scorer_for
from grpo_fast.train.config import DataConfig, EvalConfig, load_recipe
from grpo_fast.train.config.words import save_config
from grpo_fast.train.evaluate import (
    SHOWN_PROMPT,
    asking_lines,
    data_lines,
    evaluate,
    find_model,
    mean_and_error,
    pass_at_k,
    read_settings,
    run_eval,
)
from tests.command_line import invoke, refused
from tests.data.test_data import write_lines
from tests.tiny import tiny_folder

FORMAT = RewardSet([WeightedReward("gsm8k_format", 2.0, REWARDS["gsm8k_format"])])


@pytest.fixture
def evaluated(monkeypatch):
    """Return a function that evaluates a policy with given replies.

    The completion of a prompt's i-th sample is `replies[prompt][i]`. The attribute `calls` of the
    function lists the prompts and the seed of each call of `rollout.generate`.
    """

    def run(replies, questions, options, rewards=FORMAT, seed=0):
        def generate(policy, prompts, sampling, *, group_size, seed, engine):
            assert sampling.batch_size is None and sampling.temperature == options.temperature
            run.calls.append((list(prompts), seed))
            texts = [replies[p][s] for p in prompts for s in range(group_size)]
            return SimpleNamespace(texts=texts, completion_ids=[[1]] * len(texts))

        run.calls = []
        monkeypatch.setattr(rollout, "generate", generate)
        monkeypatch.setattr(rollout, "prompt_texts", lambda policy, prompts: prompts)
        return evaluate(None, questions, rewards, "gsm8k", options, seed)

    return run


def examples(*answers):
    return [Example(f"q{i}", answer, None) for i, answer in enumerate(answers)]


def test_greedy_strict_and_lenient(evaluated):
    replies = {"q0": ["#### 1"], "q1": ["it is 2"], "q2": ["#### 9"], "q3": ["?"]}
    questions = examples("1", "2", "3", "4")
    metrics, _ = evaluated(replies, questions, EvalConfig(batch_size=3))
    assert metrics["eval_accuracy_strict"] == 0.25 and metrics["eval_accuracy_lenient"] == 0.5
    assert metrics["eval_accuracy_strict_se"] == pytest.approx(statistics.stdev([1, 0, 0, 0]) / 2)
    assert metrics["eval_reward"] == 1.0
    assert metrics["eval_reward_se"] == pytest.approx(statistics.stdev([2, 0, 2, 0]) / 2)
    assert metrics["eval_rewards/gsm8k_format"] == 0.5
    assert metrics["eval_n"] == 4 and metrics["eval_samples"] == 1
    assert [prompts for prompts, _ in evaluated.calls] == [["q0", "q1", "q2"], ["q3"]]


def test_the_first_sample_is_shown_with_its_verdict(evaluated):
    def line(reply, answer):
        return evaluated({"q0": [reply]}, examples(answer), EvalConfig())[1]

    assert line("It is 5", "5") == (
        "first sample: 'It is 5'; strict: no answer, wrong; lenient: '5', right; gold: '5'"
    )
    assert line("y" * 300, None) == f"first sample: '… {'y' * 200}'"


def test_sampled_standard_error_is_over_questions(evaluated):
    replies = {"q0": ["#### 1"] * 4, "q1": ["no", "#### 2", "it is 2", "#### 2"], "q2": ["x"] * 4}
    options = EvalConfig(samples=4, temperature=0.7, batch_size=8)
    metrics, _ = evaluated(replies, examples("1", "2", "3"), options, seed=3)
    rates = [1.0, 0.5, 0.0]
    assert metrics["eval_accuracy_strict"] == metrics["eval_pass@1"] == 0.5
    error = statistics.stdev(rates) / math.sqrt(3)
    assert metrics["eval_accuracy_strict_se"] == pytest.approx(error)
    assert metrics["eval_pass@2"] == pytest.approx((1 + 5 / 6 + 0) / 3)
    assert metrics["eval_pass@4"] == pytest.approx(2 / 3)
    assert metrics["eval_pass@1_lenient"] == pytest.approx((1 + 3 / 4 + 0) / 3)
    assert metrics["eval_maj@4"] == pytest.approx(2 / 3)  # no answer is no vote
    seeds = [("evaluate", 3), ("evaluate", 5)]
    assert evaluated.calls == list(zip([["q0", "q1"], ["q2"]], seeds, strict=True))


@pytest.mark.parametrize(("n", "correct"), [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (6, 6), (8, 3)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n, correct):
    samples = [True] * correct + [False] * (n - correct)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(samples, k))
        share = sum(map(any, subsets)) / len(subsets)
        assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-12)
    assert pass_at_k(100_000, 1, 10) == pytest.approx(1e-4)  # binomials would overflow a float


def test_maj_at_k_averages_over_blocks_of_k_samples(evaluated):
    """Check that samples after the last complete block are not used."""
    said = {"q0": [1, "1.0", 1, 9, 9], "q1": [9, 1, "1.0", 9, 1]}  # 1 and 1.0 are one answer
    replies = {question: [f"#### {x}" for x in answers] for question, answers in said.items()}
    options = EvalConfig(samples=5, temperature=1.0)
    found, _ = evaluated(replies, examples("1", "1"), options)
    assert found["eval_maj@2"] == 0.75  # blocks (1 1) (1 9) and (9 1) (1 9): 1 and 0.5
    assert found["eval_maj@1"] == 0.6 and found["eval_maj@5_lenient"] == 1.0
    assert found["eval_maj@4"] == 0.5  # the block (9 1 1 9) is a tie, which 9 wins
    sizes = {name.partition("@")[2] for name in found if name.startswith("eval_maj@")}
    assert {size for size in sizes if size.isdecimal()} == {"1", "2", "4", "5"}


def test_lost_rewards_do_not_count_in_the_mean_and_its_error(evaluated):
    def touchy(*, prompts, completions, answers):
        return [math.nan if c == "bad" else 1.0 for c in completions]

    replies = {"q0": ["bad", "bad"], "q1": ["bad", "ok"], "q2": ["ok", "ok"]}
    rewards = RewardSet([WeightedReward("f", 1.0, touchy)], max_failures=1.0)
    options = EvalConfig(samples=2, temperature=1.0)
    metrics, _ = evaluated(replies, examples("1", "2", "3"), options, rewards)
    assert metrics["eval_reward"] == 1.0 and metrics["eval_reward_se"] == 0.0
    assert mean_and_error([2.0, 4.0]) == (3.0, 1.0)
    assert mean_and_error([2.0])[0] == 2.0 and math.isnan(mean_and_error([2.0])[1])
    assert all(map(math.isnan, mean_and_error([])))
    with pytest.raises(ValueError, match="examples: expected at least one"):
        evaluated({}, [], EvalConfig())


# -------------------------------------------------------------------------- Settings of the command
RECIPE = """
model: {path: nowhere}
data: {task: gsm8k, path: DATA, system_prompt: 'Be terse.', prompt_template: answer_tag}
rewards: [{name: gsm8k_format, weight: 3.0}, {name: gsm8k_correct_lenient}]
rollout: {max_new_tokens: 5}
eval: {n: 2, samples: 4, temperature: 0.9, top_p: 0.8, top_k: 7}
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
    assert {"eval_pass@1", "eval_pass@2", "eval_pass@4_lenient"} <= found["sampled"].keys()
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
    return read_settings("m", [*words, *named], False)


def test_chat_is_switched_off_by_a_setting():
    recipe = "gsm8k-qwen2.5-0.5b"
    assert settings_of(recipe=recipe).data.chat
    assert not settings_of("chat=false", recipe=recipe).data.chat
    task = ["data=x.jsonl", "task=jsonl"]
    assert not settings_of(*task).data.chat and settings_of(*task, "chat=true").data.chat
    with pytest.raises(ValueError, match="data: expected a file, a folder, a hub id or a section"):
        settings_of("data=5")


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
        find_model(str(tmp_path))
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="no model in .*; `grpo-fast export .* OUT` writes"):
        find_model(str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text("kl: {into: reward}")
    with pytest.raises(ValueError, match="kl: unknown key") as error:
        find_model(str(tmp_path))
    assert "another version of grpo_fast" in error.value.__notes__[0]
    (tmp_path / "model").rmdir()
    (tmp_path / "config.json").write_text("{}")  # now it is a model's folder
    assert find_model(str(tmp_path))[1] is None


def test_results_are_written_and_one_model_is_evaluated(model, recipe, tmp_path):
    out = tmp_path / "metrics.json"
    words = ("eval", model, f"recipe={recipe}", "samples=1", f"out={out}")
    result = invoke(*words)
    assert result.exit_code == 0 and "greedy (n=2 questions, 1 sample(s) each)" in result.output
    assert json.loads(out.read_text())["greedy"]["eval_n"] == 2
    assert refused(invoke("eval", model, model), "settings: expected key=value, got '")


# -------------------------------------------------------------------------- How questions are asked
SYSTEM = {"role": "system", "content": "####"}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Save a model without a chat template and a model with one, and return both folders."""
    folder = tmp_path_factory.mktemp("models")
    plain, chat = (tiny_folder(folder / name, seed=0) for name in ("plain", "chat"))
    tokenizer = AutoTokenizer.from_pretrained(chat)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(chat)
    return plain, chat


@pytest.fixture
def questions(tmp_path):
    lines = [{"question": f"{i}+2?", "answer": str(i + 2)} for i in range(4)]
    return str(write_lines(tmp_path / "q.jsonl", *lines))


def test_the_template_is_used_where_the_tokenizer_has_one(models, questions, spied):
    asked = spied(rollout, "generate")
    words = [f"data={questions}", "task=jsonl", "max_new_tokens=2"]
    for model, setting, is_chat in (
        (0, [], False), (1, [], True), (1, ["chat=false"], False), (0, ["chat=true"], True),
        (0, ["system_prompt=S"], True),
    ):  # fmt: skip
        said = []
        say = lambda *lines: said.extend(lines)  # noqa: B023, E731
        run_eval(models[model], [*words, *setting], say=say)
        first = asked[-1].args[1][0]
        assert isinstance(first, list) == is_chat, setting
        assert ("chat template (chat=false" in said[1]) == is_chat
    data = DataConfig(task="jsonl", path=questions, chat=False)
    line, *_ = asking_lines(data, AutoTokenizer.from_pretrained(models[1]), "q", "chat")
    assert "as plain text, although the model has a chat template (chat=true" in line


def test_an_evaluation_says_how_it_asked_and_shows_a_sample(models, questions):
    result = invoke("eval", models[1], f"data={questions}", "task=jsonl", "max_new_tokens=4")
    lines = result.output.splitlines()
    assert lines[0] == f"{models[1]}:" and lines[1].startswith("questions are asked through ")
    assert lines[2:4] == ["  | [user] 0+2?", "  | [assistant]"]
    assert "first sample: " in lines[4] and lines[4].endswith("; gold: '2'")
    assert "; strict: " in lines[4] and lines[4].count(", wrong; ") == 2
    assert lines[5].startswith("greedy (n=4") and " ± " in result.output


def test_training_asks_as_an_evaluation_does(models, questions, tmp_path, spied):
    asked = spied(rollout, "generate")
    words = [
        "data.task=jsonl", f"data={questions}", "rewards=exact_match", "steps=1",
        "rollout.max_new_tokens=2", "rollout.group_size=2", "rollout.prompts_per_step=2",
        "log.progress=false", "warm_start=null", "data.prompt_template=null", "eval.n=2",
    ]  # fmt: skip
    for i, model in enumerate(models):
        run = tmp_path / f"run{i}"
        result = invoke("train", "gsm8k-tiny", f"model={model}", f"output_dir={run}", *words)
        assert result.exit_code == 0, result.output
        assert {type(p) for call in asked for p in call.args[1]} == {(str, list)[i]}
        way = ("questions are asked as plain text;", "through the model's chat template")[i]
        assert way in result.output and "+2?" in result.output.partition("first prompt:")[2]
        asked.clear()
        assert invoke("eval", str(run), "n=1").exit_code == 0
        assert isinstance(asked[0].args[1][0], (str, list)[i])
        asked.clear()


def test_only_questions_of_files_are_sent_as_chat(models):
    tokenizer = AutoTokenizer.from_pretrained(models[1])
    assert has_chat_template(tokenizer)
    splits = Splits(DataConfig(task="sort", digits=3), 0).for_tokenizer(tokenizer)
    assert isinstance(splits.train[0].prompt, str) and not splits.data.chat
    lines = asking_lines(splits.data, tokenizer, splits.train[0].prompt)
    assert lines[0] == "questions are asked as plain text; the first prompt:"


def test_worked_examples_do_not_read_the_data_again(models, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    rows = [{"question": f"{i}+2?", "answer": f"{i + 2}"} for i in range(9)]
    path = write_lines(tmp_path / "q.jsonl", *rows)
    data = DataConfig(task="jsonl", path=str(path), n_test=2, shots_tokens=60)
    plain = Splits(data, 0)
    path.unlink()
    found = plain.for_tokenizer(tokenizer)
    unshot = plain.for_tokenizer(tokenizer, with_shots=False)
    assert [*found.train] != [*unshot.train] == [*plain.train]
    assert all("+2?" in e.prompt.partition("+2?")[2] for e in [*found.train, *found.test])


def test_the_command_data_shows_worked_examples(models, tmp_path):
    rows = [{"question": f"{i}+2?", "answer": f"{i + 2}"} for i in range(9)]
    path = str(write_lines(tmp_path / "q.jsonl", *rows))
    words = ["n_test=2", "shots_tokens=60", "chat=false"]
    data = DataConfig(task="jsonl", path=path, n_test=2, shots_tokens=60, chat=False)
    [first, *_] = Splits(data, 0).for_tokenizer(AutoTokenizer.from_pretrained(models[0])).train
    assert str(first.prompt).count("+2?") > 2
    shown = data_lines(path, [*words, f"model={models[0]}"])
    assert "\n".join(shown).count("  | " + str(first.prompt).replace("\n", "\n  | ")) == 1
    with pytest.raises(ValueError, match="shots_tokens: expected model=MODEL"):
        data_lines(path, words)


def test_a_long_prompt_is_shown_without_its_middle(models):
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    text = "a" * 5000 + "b" * 5000
    (_, line) = asking_lines(DataConfig(task="open"), tokenizer, text)
    assert len(line) < SHOWN_PROMPT + 20 and " … " in line and line.endswith("b")


def test_a_folder_that_does_not_exist_is_named(questions):
    for model in ("nowhere", "runs/nowhere", "/nowhere"):
        result = invoke("eval", model, f"data={questions}", "task=jsonl")
        assert refused(result, f"'{model}': no such folder")
    assert refused(invoke("eval", "nowhere"), "data: ", "no folder 'nowhere' exists here")


@pytest.mark.parametrize(
    ("prompt", "solution"), [([SYSTEM], None), ("2+2?", "2 + 2 = 4\n#### 4")]
)  # fmt: skip
def test_a_format_in_messages_or_in_the_solution_is_required(prompt, solution):
    scorer = scorer_for("jsonl", Example(prompt, "4", solution))
    assert scorer.is_right(scorer.strict("#### 4")) and not scorer.is_right(scorer.strict("4"))
