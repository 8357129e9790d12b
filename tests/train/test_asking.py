"""Tests of whether questions use a chat template or plain text, and of the log lines about this."""

import pytest
from transformers import AutoTokenizer

from grpo_fast import rollout
from grpo_fast.data import Example
from grpo_fast.data.splits import Splits
from grpo_fast.data.tokenizer import has_chat_template
from grpo_fast.rewards import scorer_for
from grpo_fast.train.config import DataConfig
from grpo_fast.train.evaluation.command import run_eval
from grpo_fast.train.evaluation.questions import SHOWN_PROMPT, asking_lines, data_lines
from tests.command_line import invoke, refused
from tests.data.test_data import write_lines
from tests.tiny import tiny_folder

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


def test_an_evaluation_says_how_it_asked_its_speed_and_a_sample(models, questions):
    result = invoke("eval", models[1], f"data={questions}", "task=jsonl", "max_new_tokens=4")
    lines = result.output.splitlines()
    assert lines[0] == f"{models[1]}:" and lines[1].startswith("questions are asked through ")
    assert lines[2:4] == ["  | [user] 0+2?", "  | [assistant]"]
    assert " tokens in " in lines[4] and lines[4].endswith("tokens/s")
    assert "first sample: " in lines[5] and "gold answer '2'; strict: " in lines[5]
    assert lines[6].startswith("greedy (n=4") and " ± " in result.output


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
    expected = Splits(data, 0, tokenizer)
    plain = Splits(data, 0)
    path.unlink()
    found = plain.with_shots(tokenizer)
    assert [*found.train] == [*expected.train] != [*plain.train]
    assert [*found.test] == [*expected.test]


def test_the_command_data_shows_worked_examples(models, tmp_path):
    rows = [{"question": f"{i}+2?", "answer": f"{i + 2}"} for i in range(9)]
    path = str(write_lines(tmp_path / "q.jsonl", *rows))
    words = ["n_test=2", "shots_tokens=60", "chat=false"]
    data = DataConfig(task="jsonl", path=path, n_test=2, shots_tokens=60, chat=False)
    [first, *_] = Splits(data, 0, AutoTokenizer.from_pretrained(models[0])).train
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
