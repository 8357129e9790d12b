"""Tests of custom reward functions of every convention, in this process and in a worker."""

import math
import os

import pytest

from grpo_fast.data import Example
from grpo_fast.data.prompts import Form
from grpo_fast.data.records import parse_record
from grpo_fast.rewards import RewardError, build_rewards, check_examples, score
from grpo_fast.train.config import DataConfig, load_recipe
from tests.reward_specs import ask, spec
from tests.train.runs import sort

MODULE = r"""
import asyncio, collections, decimal, itertools, os, sys
import numpy as np
import torch
from helper import START


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if "fail" in solution_str:
        raise ValueError("boom")
    number = extra_info.get("index", 100)
    return len(solution_str) + 10 * (ground_truth in solution_str) + number + len(data_source or "")


async def awaited_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    return {"score": float(len(solution_str)), "acc": True}


def task_score(data_source, solution_str, ground_truth, extra_info=None):
    return asyncio.create_task(awaited_score(data_source, solution_str, ground_truth))


def short_score(solution_str, ground_truth, method="strict"):
    return float(solution_str == ground_truth and method == "lenient")


def any_of(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str in ground_truth["target"])


def reward_func(queries, prompts, labels):
    said = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([float(label in text) for text, label in zip(said, labels)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"n": rewards}}


def other_names(q, p, l, **kwargs):
    return torch.tensor([len(a) - len(b) + len(c) for a, b, c in zip(q, p, l)])


async def awaited(completions):
    return await asyncio.sleep(0, [2.0] * len(completions))


def runs_a_loop(completions):
    return asyncio.run(awaited(completions))


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, completions, **kwargs):
        return [self.scale * len(text) for text in completions]


def run_state(completions, trainer_state, **kwargs):
    step, last = trainer_state.global_step, trainer_state.max_steps
    assert (trainer_state.epoch > 0) == (step > 0) and trainer_state.log_history == []
    return [float(i % 2) + 10 * step + 100 * last for i, _ in enumerate(completions)]


def logs(completions, log_metric):
    log_metric("letters", 1.0)


def kinds(prompts, completions, **kwargs):
    return [10 * isinstance(p, list) + isinstance(c, list) for p, c in zip(prompts, completions)]


def sizes(prompts, completions):
    return [len(p) for p in prompts]


def helped(completions):
    import late_helper

    return [START + late_helper.NOTHING] * len(completions)


def pid(completions):
    return [os.getpid()] * len(completions)


def asks(*, completion_ids, completion_lengths, level, unit=1):
    return [100 * ids[-1] + 10 * n + l * unit for ids, n, l in
            zip(completion_ids, completion_lengths, level, strict=True)]


def everything(**columns):
    names = {"answers", "completion_ids", "completion_lengths", "completions", "level", "prompts"}
    return [float({*columns} == names | {"prefills"})] * len(columns["prompts"])


def rewrites(prompts, completions):
    prompts[0][0]["content"] = "other"
    return [1.0]


def leaves(completions):
    sys.exit(3)


def interrupted(completions):
    raise KeyboardInterrupt("now")


class Silent(Exception):
    def __str__(self):
        raise ValueError


def silent(completions):
    raise Silent


def of_kind(prompts, completions):
    n = len(completions)
    return {
        "decimal": [decimal.Decimal("0.5")] * n,
        "0-d bf16 tensor": [torch.tensor(0.5, dtype=torch.bfloat16)] * n,
        "array": np.full(n, 0.5, dtype=np.float32),
        "tensor": torch.full((n,), 0.5),
        "generator": (0.5 for _ in range(n)),
        "dict": {i: 1.0 for i in range(n)},
        "set": {float(i) for i in range(n)},
        "string": "1" * n,
        "none": None,
        "number": 1.0,
        "endless": itertools.repeat(1.0),
        "one more": [1.0] * (n + 1),
        "one less": [1.0] * (n - 1),
        "strings": ["1"] * n,
        "nested list": [[1.0]] * n,
        "complex": [1j] * n,
        "nan": [float("nan")] * n,
        "infinity": [np.float32("inf")] * n,
        "beyond fp32": [1e39] * n,
    }[prompts[0]]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("conventions") / "mine.py"
    path.write_text(MODULE)
    path.with_name("helper.py").write_text("START = 10")
    path.with_name("late_helper.py").write_text("NOTHING = 0")
    return path


@pytest.fixture(params=[False, True], ids=["worker", "here"])
def here(request):
    return request.param


@pytest.fixture
def build(file, here):
    def make(*names, convention=None, **options):
        options |= {"convention": convention, "in_process": here}
        return build_rewards([spec(f"{file}:{name}", **options) for name in names])

    return make


ROWS = [
    {"data_source": "x", "prompt": [{"role": "user", "content": "q"}], "extra_info": {"index": 3},
     "reward_model": {"style": "rule", "ground_truth": "ab"}},
    {"data_source": "xy", "prompt": [{"role": "user", "content": "r"}], "extra_info": None,
     "reward_model": {"style": "rule", "ground_truth": "#### 7"}},
]  # fmt: skip
JSONL = DataConfig(task="jsonl", path=".")
EXAMPLES = [parse_record("row", row, JSONL) for row in ROWS]
TEXTS = ("abc", "no #### 7")


def found(rewards, texts=TEXTS, examples=EXAMPLES):
    result = score(rewards, examples, list(texts), [[1], [2, 3]], ["<user>q", "<user>r"])
    return result.total.tolist()


@pytest.mark.parametrize(
    ("name", "convention", "texts", "expected"),
    [
        ("compute_score", "verl", TEXTS, [3 + 10 + 3 + 1, 9 + 10 + 100 + 2]),
        ("compute_score", "verl", ("fail", "abc"), [math.nan, 3 + 100 + 2]),
        ("awaited_score", "verl", TEXTS, [3.0, 9.0]),
        ("task_score", "verl", ("abc", "ab"), [3.0, 2.0]),
        ("reward_func", "openrlhf", TEXTS, [1.0, 1.0]),
        ("reward_func", "openrlhf", ("x", "7"), [0.0, 0.0]),
        ("other_names", "openrlhf", TEXTS, [3 + 2, 9 + 6]),
        ("awaited", "grpo_fast", TEXTS, [2.0, 2.0]),
        ("runs_a_loop", None, TEXTS, [2.0, 2.0]),
        ("helped", None, TEXTS, [10.0, 10.0]),
    ],
)
def test_a_function_of_each_convention(build, name, convention, texts, expected):
    rewards = build(name, convention=convention)
    check_examples(rewards, EXAMPLES, "training")
    assert found(rewards, texts) == pytest.approx(expected, nan_ok=True)


def test_options_are_those_of_the_function_or_of_the_constructor(build):
    lenient = build("short_score", convention="verl", method="lenient")
    assert found(lenient, ("ab", "#### 7")) == [1.0, 1.0]  # gets the unparsed answer
    assert found(build("Scaled", scale=2.0), ("ab", "c")) == [4, 2]
    with pytest.raises(ValueError, match="asks cannot be used: .*unexpected .* argument 'units'"):
        build("asks", units=2)


def test_a_ground_truth_may_be_a_mapping(build):
    row = {**ROWS[0], "reward_model": {"ground_truth": {"target": ["a", "b"]}}}
    example = parse_record("row", row, JSONL)
    rewards = build("any_of", convention="verl")
    check_examples(rewards, [example], "training")
    assert found(rewards, ("b", "c"), [example] * 2) == [1.0, 0.0]
    with pytest.raises(ValueError, match="an answer in every training example"):
        check_examples(build_rewards([spec("exact_match")]), [example], "training")


@pytest.mark.parametrize(
    ("name", "convention", "said"),
    [
        ("compute_score", "verl", "an answer in every training example"),
        ("reward_func", "openrlhf", "an answer in every training example"),
        ("compute_score", None, r"asks for data_source: .* needs convention: verl"),
        ("reward_func", None, r"asks for queries: .* needs convention: openrlhf"),
        ("run_state", None, r"asks for trainer_state: .* needs convention: trl"),
        ("asks", None, "asks for level: .* got 1 of 1 without, first 'question"),
        ("logs", "trl", "asks for log_metric: expected a field 'log_metric'"),
    ],
)
def test_what_a_function_needs_is_asked_for_before_the_run(build, name, convention, said):
    with pytest.raises(ValueError, match=said):
        check_examples(
            build(name, convention=convention), [Example("question?", None, None)], "training"
        )


def test_functions_get_what_they_name(build):
    # The option unit=2 of `asks` must win over the column `unit` of the data.
    examples = [Example(f"p{i}", None, None, {"level": i, "unit": 9}) for i in range(3)]
    ids = [[5], [5, 6], [5, 6, 7]]
    result = score(build("asks", unit=2), examples, ["a"] * 3, ids)
    assert result.total.tolist() == [510.0, 622.0, 734.0]
    examples = [Example("p", None, None, {"level": 1}), Example("q", None, None)]
    assert score(build("everything"), examples, ["a"] * 2, ids[:2]).total.tolist() == [1.0] * 2


def test_texts_stay_texts_when_the_chat_template_is_used(build):
    message = {"role": "user", "content": "q?"}
    data = DataConfig(
        task="jsonl", path=".", system_prompt="Be brief", prompt_template="{question}!"
    )
    rows = [parse_record("row", {"prompt": "q?"}, JSONL)] * 2
    rows.append(parse_record("row", {"prompt": [message]}, JSONL))
    examples = [
        Form("{question}", None, True).apply(rows[0]),
        Form.of(data).apply(rows[1]),
        rows[2],
    ]
    assert all(isinstance(example.prompt, list) for example in examples)
    kinds = score(build("kinds", convention="trl"), examples, ["a"] * 3)
    assert kinds.total.tolist() == [0, 0, 11]
    sizes = score(build("sizes"), examples, ["a"] * 3)
    assert sizes.total.tolist() == [2, 3, 1]  # "q?", "q?!", and one message
    prompts = [[dict(message)]]
    ask(build("rewrites"), prompts, ["a"], ["x"])
    assert prompts == [[message]]


def test_a_function_runs_in_a_worker_unless_in_process_is_set(build, here):
    rewards = build("pid")
    pids = [ask(rewards, ["p"], ["a"], ["x"]).total.item() for _ in range(2)]
    assert (pids[0] == os.getpid()) == here and pids[0] == pids[1]


KINDS = {
    0.5: ("decimal", "0-d bf16 tensor", "array", "tensor", "generator"),
    "not_a_number": (
        "strings", "nested list", "complex", "nan", "infinity", "beyond fp32",
    ),
    "0 in a dict": ("dict",), "0 in a set": ("set",), "0 in a str": ("string",),
    "0 in a NoneType": ("none",), "0 in a float": ("number",), "more in a repeat": ("endless",),
    "more in a list": ("one more",), "2 in a list": ("one less",),
}  # fmt: skip


def test_values_are_numbers_or_lost_and_lists_have_the_right_length(build, caplog):
    rewards = build("of_kind")
    for expected, kinds in KINDS.items():
        for kind in kinds:
            rewards.recent["of_kind"] = []
            batch = [kind] * 3, ["a"] * 3, ["x"] * 3
            if str(expected).endswith(("number", "0.5")):
                result = ask(rewards, *batch)
                lost = {expected: 3} if isinstance(expected, str) else {}
                assert result.reasons["of_kind"] == lost, kind
                assert result.total.tolist() == pytest.approx(
                    [math.nan if lost else expected] * 3, nan_ok=True
                )
            else:
                with pytest.raises(RewardError, match=f"one value per .* 3 values.*got {expected}"):
                    ask(rewards, *batch)
    assert len(caplog.records) == 1  # only the first failure is logged
    assert "not a finite number: '1'" in caplog.text


def test_a_function_that_exits_costs_its_samples(file):
    rewards = build_rewards([spec(f"{file}:leaves")])
    result = ask(rewards, ["p"] * 2, ["a"] * 2, ["x"] * 2)
    assert result.total.isnan().all() and "SystemExit: 3" in rewards.last_error["leaves"]


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("mine.py:interrupted", KeyboardInterrupt, "now"),
        ("leaving.py:f", ValueError, "could not import .*: SystemExit: 4"),
        ("mine.py:silent", None, "Silent: no text"),
    ],
)
def test_errors_of_functions_in_this_process(file, name, error, said):
    """Check that Ctrl-C ends a run, an exit at import is refused, and other errors cost samples."""
    file.with_name("leaving.py").write_text("raise SystemExit(4)")

    def call():
        rewards = build_rewards([spec(str(file.with_name(name)), in_process=True)])
        assert ask(rewards, ["p"], ["a"], ["x"]).total.isnan().all()
        return rewards.last_error["silent"]

    if error is None:
        assert call() == said
    else:
        with pytest.raises(error, match=said):
            call()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("{file}:nothing", "a function 'nothing' in .*got only: compute_score"),
        ("{file}x.py:f", "No such file"),
        ("{file}", "a custom function 'package.module:function' or 'file.py:function', got"),
        ("no_such_module:f", "could not import 'no_such_module'"),
        ("gsm8k_corect", "nearest: gsm8k_correct"),
    ],
)
def test_a_function_that_is_not_found_is_refused(file, here, name, why):
    with pytest.raises(ValueError, match=f"rewards: .*{why}"):
        build_rewards([spec(name.format(file=file), in_process=here)])


def test_a_file_in_the_home_folder_and_two_functions_of_one_name(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    twice = [spec("~/mine.py:pid", label=label) for label in ("one", "two")]
    assert [reward.name for reward in build_rewards(twice).rewards] == ["one", "two"]
    with pytest.raises(ValueError, match="expected different names"):
        build_rewards([spec("~/mine.py:pid", in_process=True)] * 2)


def test_a_convention_in_the_configuration(file):
    words = [f"rewards={{name: {file}:compute_score, convention: verl}}"]
    reward = load_recipe("gsm8k-tiny", words).rewards[0]
    assert (reward.name, reward.convention) == (f"{file}:compute_score", "verl")
    with pytest.raises(ValueError, match="rewards.0.trl: unknown key; here it is .*convention=trl"):
        load_recipe("sort", ["rewards={trl: m:f}"])
    with pytest.raises(ValueError, match="rewards.0.convention: .* got 'skyrl'"):
        load_recipe("sort", ["rewards={name: m:f, convention: skyrl}"])


def test_a_run_passes_its_state(file, tmp_path):
    rows = sort(tmp_path / "run", f"rewards={{name: {file}:run_state, convention: trl}}", "steps=2")
    means = [row["rewards/run_state/mean"] for row in rows]
    assert means == pytest.approx([200.5, 210.5])
