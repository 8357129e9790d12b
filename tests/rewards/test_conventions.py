"""Tests of reward functions that have the signature of TRL, verl, OpenRLHF or grpo_fast."""

import math
import sys

import pytest
import torch
from pydantic import ValidationError

from grpo_fast.data import Example
from grpo_fast.data.prompts import Form, in_chat
from grpo_fast.data.records import parse_record
from grpo_fast.rewards import build_rewards, check_examples, score
from grpo_fast.rewards.conventions import convention_of, signature_of
from grpo_fast.train.config import DataConfig, RewardConfig
from grpo_fast.train.config.recipes import load_recipe
from tests.reward_specs import own as own_set
from tests.reward_specs import spec
from tests.train.tiny_runs import logged, sort

MODULE = """
import asyncio

import torch


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "fail" in solution_str:
        raise ValueError("boom")
    number = extra_info.get("index", 100)
    return len(solution_str) + 10 * (ground_truth in solution_str) + number + len(data_source or "")


async def awaited_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    return {"score": float(len(solution_str)), "acc": True}


def task_score(data_source, solution_str, ground_truth, extra_info=None):
    score = awaited_score(data_source, solution_str, ground_truth)
    return asyncio.create_task(score)


def future_rewards(queries, prompts, labels):
    return asyncio.ensure_future(asyncio.sleep(0, [1.0] * len(queries)))


def runs_a_loop(completions):
    return asyncio.run(asyncio.sleep(0, [2.0] * len(completions)))


def short_score(solution_str, ground_truth, method="strict"):
    return float(solution_str == ground_truth and method == "lenient")


def any_of(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str in ground_truth["target"])


def any_keyword(**kwargs):
    return float(sorted(kwargs) == ["data_source", "extra_info", "ground_truth", "solution_str"])


def reward_func(queries, prompts, labels):
    said = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([float(label in text) for text, label in zip(said, labels)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"n": rewards}}


def other_names(q, p, l, **kwargs):
    return torch.tensor([len(a) - len(b) + len(c) for a, b, c in zip(q, p, l)])


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, completions, **kwargs):
        return [self.scale * len(text) for text in completions]


def run_state(completions, trainer_state, log_extra, log_metric, **kwargs):
    log_metric("letters", float(sum(map(len, completions))))
    log_extra("twice", [text + text for text in completions])
    step, last = trainer_state.global_step, trainer_state.max_steps
    assert (trainer_state.epoch > 0) == (step > 0)
    return [float(i % 2) + 10 * step + 100 * last for i, _ in enumerate(completions)]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("conventions") / "mine.py"
    path.write_text(MODULE)
    return path


@pytest.fixture(params=[False, True], ids=["worker", "here"])
def build(file, request):
    def make(name, convention=None, **options):
        options |= {"convention": convention, "in_process": request.param}
        return build_rewards([spec(f"{file}:{name}", **options)])

    return make


ROWS = [
    {"data_source": "x", "prompt": [{"role": "user", "content": "q"}], "extra_info": {"index": 3},
     "reward_model": {"style": "rule", "ground_truth": "ab"}},
    {"data_source": "xy", "prompt": [{"role": "user", "content": "r"}], "extra_info": None,
     "reward_model": {"style": "rule", "ground_truth": "#### 7"}},
]  # fmt: skip
EXAMPLES = [parse_record("row", row, gsm8k=False) for row in ROWS]
SENT = ["<user>q", "<user>r"]


def found(rewards, texts=("abc", "no #### 7"), examples=EXAMPLES):
    result = score(rewards, examples, list(texts), [[1], [2, 3]], SENT)
    return result.total.tolist()


def test_verls_compute_score(build):
    rewards = build("compute_score", "verl")
    check_examples(rewards, EXAMPLES, "training")
    assert found(rewards) == [3 + 10 + 3 + 1, 9 + 10 + 100 + 2]
    assert found(build("awaited_score", "verl")) == [3.0, 9.0]
    assert found(build("task_score", "verl"), ("abc", "ab")) == [3.0, 2.0]
    assert found(build("any_keyword", "verl")) == [1.0, 1.0]
    lenient = build("short_score", "verl", method="lenient")
    assert found(lenient, ("ab", "#### 7")) == [1.0, 1.0]  # gets the unparsed answer


def test_a_score_of_verl_that_fails_costs_its_own_sample(build):
    one, other = found(build("compute_score", "verl"), ("fail", "abc"))
    assert math.isnan(one) and other == 3 + 100 + 2


def test_verls_ground_truth_may_be_a_mapping(build):
    row = {**ROWS[0], "reward_model": {"ground_truth": {"target": ["a", "b"]}}}
    example = parse_record("row", row, gsm8k=False)
    rewards = build("any_of", "verl")
    check_examples(rewards, [example], "training")
    assert found(rewards, ("b", "c"), [example] * 2) == [1.0, 0.0]
    with pytest.raises(ValueError, match="an answer in every training example"):
        check_examples(build_rewards([spec("exact_match")]), [example], "training")


def test_openrlhfs_reward_func(build):
    rewards = build("reward_func", "openrlhf")
    check_examples(rewards, EXAMPLES, "training")
    assert found(rewards) == [1.0, 1.0]
    assert found(rewards, ("x", "7")) == [0.0, 0.0]
    assert found(build("other_names", "openrlhf")) == [3 + 2, 9 + 6]
    assert found(build("future_rewards", "openrlhf")) == [1.0, 1.0]
    assert found(build("runs_a_loop", "grpo_fast")) == [2.0, 2.0]


@pytest.mark.parametrize(("name", "convention"), [("compute_score", "verl"),
                                                  ("reward_func", "openrlhf")])  # fmt: skip
def test_an_answer_is_needed_before_the_run(build, name, convention):
    with pytest.raises(ValueError, match="an answer in every training example"):
        check_examples(build(name, convention), [Example("q", None, None)], "training")


def test_options_of_a_class_are_its_constructors(build):
    assert found(build("Scaled", scale=2.0), ("ab", "c"), [Example("p", None, None)] * 2) == [4, 2]


SHARED = """
from helper import START

state = {"calls": START}


def counts(completions, **kwargs):
    state["calls"] += 1
    return [state["calls"]] * len(completions)


def reads(completions):
    import late_helper

    return [state["calls"] + late_helper.NOTHING] * len(completions)


def epoch(completions, trainer_state, **kwargs):
    state = trainer_state
    return [state.epoch + len(state.log_history)] * len(completions)
"""


@pytest.mark.parametrize("here", [False, True])
def test_functions_of_one_file_share_its_module_and_import_its_neighbours(tmp_path, here):
    (tmp_path / "helper.py").write_text("START = 10")
    (tmp_path / "late_helper.py").write_text("NOTHING = 0")
    (tmp_path / "shared.py").write_text(SHARED)
    names = ("counts", "reads", "epoch")
    path = list(sys.path)
    try:
        rewards = build_rewards(
            [spec(f"{tmp_path}/shared.py:{name}", in_process=here) for name in names]
        )
        rewards.progress["epoch"] = 0.5
        found = [rewards(["p"], ["a"], ["x"]).per_fn for _ in range(2)]
    finally:
        sys.path[:] = path
        for name in ("helper", "late_helper", "shared"):
            sys.modules.pop(name, None)
    assert [per_fn["counts"].item() for per_fn in found] == [11, 12]
    assert [per_fn["reads"].item() for per_fn in found] == [11, 12]
    assert found[0]["epoch"].item() == 0.5


KINDS = """
def kinds(prompts, completions, **kwargs):
    return [10 * isinstance(p, list) + isinstance(c, list) for p, c in zip(prompts, completions)]


def own(prompts, completions):
    return [len(p) for p in prompts]
"""


@pytest.mark.parametrize("here", [False, True])
def test_texts_stay_texts_when_the_chat_template_is_used(tmp_path, here):
    (tmp_path / "kinds.py").write_text(KINDS)
    names = ("kinds", "own")
    rewards = build_rewards(
        [spec(f"{tmp_path}/kinds.py:{name}", in_process=here) for name in names]
    )
    message = {"role": "user", "content": "q?"}
    data = DataConfig(
        task="jsonl", path=".", system_prompt="Be brief", prompt_template="{question}!"
    )
    rows = [parse_record("row", {"prompt": "q?"}, gsm8k=False)] * 2
    rows.append(parse_record("row", {"prompt": [message]}, gsm8k=False))
    examples = [in_chat(rows[0]), Form.of(data).apply(rows[1]), rows[2]]
    assert all(isinstance(example.prompt, list) for example in examples)
    found = score(rewards, examples, ["a"] * 3)
    assert found.per_fn["kinds"].tolist() == [0, 0, 11]
    assert found.per_fn["own"].tolist() == [2, 3, 1]  # "q?", "q?!", and one message


def test_a_slow_sample_is_named_with_its_prompt(tmp_path, caplog):
    file = tmp_path / "slow.py"
    file.write_text(
        "import time\n\n\ndef alone(completions):\n"
        "    time.sleep(60 * ('slow' in completions))\n    return [1.0] * len(completions)\n\n\n"
        "alone.per_sample = True\n\n\ndef batch(completions):\n    return alone(completions)\n"
    )
    for name, said in (
        ("alone", "slow.py:alone took longer than 1 s (sample 1 of 3, with the prompt 'second')"),
        ("batch", "batch took longer than 1 s (in a call with 3 samples, the first with the "),
    ):
        rewards = build_rewards([spec(f"{file}:{name}", timeout=1)], max_failures=1.0)
        result = rewards(["first", "second", "third"], ["a", "slow", "b"], [""] * 3)
        lost = [False, True, False] if name == "alone" else [True] * 3
        assert result.total.isnan().tolist() == lost and said in caplog.text


def own(completions, answers): ...
def own_with_columns(completions, answers, **columns): ...
def own_lengths(completion_lengths): ...
def bare(completions): ...
def bare_column(completions, level): ...
def trl(completions, **kwargs): ...
def trl_column(prompts, completions, answer, **kwargs): ...
def trl_state(completions, trainer_state): ...
def both(completions, answers, log_metric): ...
def verl(data_source, solution_str, ground_truth): ...
def openrlhf(queries, prompts, labels): ...


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (own, "grpo_fast"), (own_with_columns, "grpo_fast"), (own_lengths, "grpo_fast"),
        (bare, "grpo_fast"), (bare_column, "grpo_fast"), (trl, "trl"), (trl_column, "trl"),
        (trl_state, "trl"), (both, r"write \{trl: FUNCTION\} or \{grpo_fast: FUNCTION\}"),
        (verl, r"write \{verl: FUNCTION\}"), (openrlhf, r"write \{openrlhf: FUNCTION\}"),
        (max, "write a Python function that calls it"),
    ],
)  # fmt: skip
def test_a_convention_is_recognised_or_must_be_named(function, expected):
    if "write" in expected:
        with pytest.raises(ValueError, match=expected):
            convention_of(signature_of(function))
    else:
        assert convention_of(signature_of(function)) == expected


def test_a_column_answers_makes_our_convention_unsure(tmp_path):
    file = tmp_path / "unsure.py"
    file.write_text(
        "def f(completions, answers, **kwargs):\n    return [float(a) for a in answers]"
    )
    row = {"prompt": "q", "answer": "1", "answers": "2"}
    examples = [parse_record("row", row, gsm8k=False)]
    rewards = build_rewards([spec(f"{file}:f", in_process=True)])
    with pytest.raises(ValueError, match=r"f: .*\{trl: FUNCTION\} or \{grpo"):
        check_examples(rewards, examples, "training")
    for convention, expected in (("trl", 2.0), ("grpo_fast", 1.0)):
        rewards = build_rewards([spec(f"{file}:f", in_process=True, convention=convention)])
        check_examples(rewards, examples, "training")
        assert score(rewards, examples, ["x"]).total.tolist() == [expected]


def test_a_column_chat_prompts_belongs_to_the_data():
    rewards = own_set(lambda completions, chat_prompts: [float(x) for x in chat_prompts])
    rows = [{"prompt": "q", "answer": "1", "chat_prompts": 7}, {"prompt": "q", "answer": "1"}]
    examples = [parse_record("row", row, gsm8k=False) for row in rows]
    assert score(rewards, examples[:1], ["x"]).total.tolist() == [7.0]
    with pytest.raises(ValueError, match="a field 'chat_prompts' in every training example"):
        check_examples(rewards, examples, "training")


def test_one_word_in_the_configuration(file, tmp_path):
    words = [f"rewards={{verl: {file}:compute_score}}"]
    reward = load_recipe("gsm8k-tiny", words).rewards[0]
    assert (reward.name, reward.convention) == (f"{file}:compute_score", "verl")
    weighted = RewardConfig.model_validate({"trl": "m:f", "weight": 2.0})
    assert (weighted.name, weighted.convention, weighted.weight) == ("m:f", "trl", 2.0)
    assert RewardConfig.model_validate(weighted.model_dump()) == weighted
    for wrong in ({"verl": "m:f", "name": "g"}, {"verl": "m:f", "trl": "m:f"},
                  {"name": "m:f", "convention": "skyrl"}):  # fmt: skip
        with pytest.raises(ValidationError):
            RewardConfig.model_validate(wrong)


def test_a_run_passes_its_state_and_logs_what_functions_log(file, tmp_path, capsys):
    from pyarrow import parquet

    rows = sort(
        tmp_path / "run", f"rewards=[{file}:run_state]", "steps=2", "log.completions_every=1",
        "rollout.dynamic={rounds: 1}",
    )  # fmt: skip
    assert "reward run_state: called as trl calls it\n" in capsys.readouterr().out
    means = [row["rewards/run_state/mean"] for row in rows]
    assert means == pytest.approx([200.5, 210.5])
    assert all(row["logged/letters"] > 0 for row in logged(tmp_path / "run") if "loss" in row)
    [table, *_] = sorted((tmp_path / "run").rglob("*.parquet"))
    for row in parquet.read_table(table).to_pylist():
        assert row["extra/twice"] == row["completion"] * 2
    assert torch.isfinite(torch.tensor(means)).all()
