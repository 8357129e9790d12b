"""Tests of reasoning-gym as a source of data and rewards, with a stand-in for the package.

The last test runs with the package itself: pip install 'grpo_fast[gym]'.
"""

import importlib.util
import sys
from contextlib import nullcontext

import pytest

from grpo_fast.__main__ import main
from grpo_fast.data.readers import GYM_TEST, gym_rows
from grpo_fast.errors import RewardError
from grpo_fast.rewards import isolated, rules
from grpo_fast.rewards.conventions import RewardFailure
from grpo_fast.rewards.workers.gym_scores import check_arithmetic
from grpo_fast.train.config import load_recipe
from tests.command_line import invoke, refused
from tests.train.runs import TINY_SORT, train_recipe

# A generator of sums whose items depend on seed + index, as in the package. The scorers of `lists`
# and `terms` execute answers. `tuples` compares an answer with a tuple.
FACTORY = """
import random
from sympy.parsing.sympy_parser import parse_expr

class Sums:
    def __init__(self, size=500, seed=0, largest=9):
        assert largest > 0, "largest must be positive"
        self.seed = seed
        self.largest = largest

    def __getitem__(self, index):
        draw = random.Random(self.seed + index)
        a = draw.randint(0, self.largest)
        b = draw.randint(0, self.largest)
        metadata = {"seed": self.seed + index, "pair": (a, b)}
        return {"question": f"{a} + {b} =", "answer": str(a + b), "metadata": metadata}

    def score_answer(self, answer, entry):
        if answer == entry["answer"]:
            return 1.0
        return 0.5 if entry["answer"] in answer else 0.0

class Lists(Sums):
    def score_answer(self, answer, entry):
        if answer == entry["answer"]:
            return 1.0
        try:
            return 0.25 if eval(answer) == [1, 2] else 0.0
        except Exception:
            return 0.0

class Terms(Sums):
    def score_answer(self, answer, entry):
        try:
            return float(parse_expr(answer) == int(entry["answer"]))
        except Exception:
            return 0.01

class Strict(Sums):
    def score_answer(self, answer, entry):
        return float(int(answer) == int(entry["answer"]))

class Tuples(Sums):
    def score_answer(self, answer, entry):
        return float(entry["metadata"]["pair"] == tuple(entry["metadata"]["pair"]))

DATASETS = {"sums": Sums, "lists": Lists, "terms": Terms, "strict": Strict, "tuples": Tuples}

def create_dataset(name, **options):
    return DATASETS[name](**options)
"""


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    """Install the stand-in for this process and for the worker process."""
    folder = tmp_path / "packages" / "reasoning_gym"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "factory.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(folder.parent))
    forget()
    # A separate worker, because the shared worker may run without the stand-in.
    worker = isolated.IsolatedReward(isolated.path_of(rules.GYM_SCORES), timeout=120.0)
    monkeypatch.setattr(rules, "built_in", lambda *_, **__: worker)
    yield
    worker.close()
    forget()


def forget():
    """Let the next import of reasoning_gym read its files again."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "reasoning_gym"]:
        del sys.modules[name]


def entries(name, count, **options):
    train, _ = gym_rows(f"reasoning_gym:{name}", {"size": count, **options}, 1)
    return [row["entry"] for _, row in train]


def score(entry, *completions):
    return rules.reasoning_gym(completions=completions, entry=[entry] * len(completions))


def test_one_word_trains_with_the_scorer_as_the_reward(tmp_path):
    words = ["data=reasoning_gym:sums", "data.options.size=40", "data.options.largest=30"]
    words += [*TINY_SORT, "data.n_test=12", "rollout.max_new_tokens=3", "data.chat=false"]
    config = load_recipe("sort", words)
    assert [reward.name for reward in config.rewards] == ["reasoning_gym"]
    before = load_recipe("sort", ["rewards=exact_match", *words])
    assert [reward.name for reward in before.rewards] == ["exact_match"]
    summary, rows = train_recipe(tmp_path / "run", "sort", *words)
    assert summary["before"]["eval_n"] == 12
    assert all(0 <= row["rewards/reasoning_gym/mean"] <= 1 for row in rows)


def test_held_out_items_share_no_seed_with_training_items():
    parts = gym_rows("reasoning_gym:sums", {"size": 20, "seed": GYM_TEST - 20}, 30)
    train, test = ([row["entry"]["metadata"]["seed"] for _, row in rows] for rows in parts)
    assert train == list(range(GYM_TEST - 20, GYM_TEST))
    assert test == list(range(GYM_TEST, GYM_TEST + 30))


def test_the_scorer_gets_the_marked_answer_of_the_final_part():
    [entry] = entries("sums", 1)
    gold = entry["answer"]
    thought = "<think>1</think>"
    said = [f" {gold}\n", f"<think>{gold}</think> none", f"{thought}So <answer>{gold}"]
    said += [f"{thought}So <answer>{gold}</answer>", f"#### {gold}", f"it is {gold}"]
    assert score(entry, *said) == [1.0, 0.0, 0.5, 1.0, 1.0, 0.5]


def test_answers_are_not_executed(tmp_path):
    file = tmp_path / "written"
    [lists, terms, sums] = [entries(name, 1)[0] for name in ("lists", "terms", "sums")]
    code = f"[open({str(file)!r}, 'w').close(), 1, 2][1:]"
    assert score(lists, code, "[1, 2]", lists["answer"]) == [0.0, 0.25, 1.0]
    a, b = terms["metadata"]["pair"]
    code = f"{a} + {b} + 0*len([open({str(file)!r}, 'w')])"
    assert score(terms, code, f"{a} + {b}", f"sqrt({b}**2) + {a}") == [0.01, 1.0, 1.0]
    # The path may contain the digits of the answer, which this scorer gives half a point.
    assert score(sums, code)[0] < 1 and not file.exists()


def test_an_answer_that_a_scorer_cannot_read_has_score_0():
    [entry] = entries("strict", 1)
    assert score(entry, "[1, 2]", entry["answer"], "") == [0.0, 1.0, 0.0]


SMALL = [
    "x**2 + 3**4", "(x**2 + 1)**3", "2**-3", "9**99", "x**(1/2)", "x**0.5", "x**2.0", "2**(3-1)",
    "x**((1/2))", "x**(n+1)", "log(x,2)", "2^3",
]  # fmt: skip
LARGE = [
    "9**9**9", "9**(9**9)", "9**1000", "((9**99)**99)**9", "2**(9*9)", "9**sqrt(10**18)",
    "9**Abs(99999999)", "9**exp(99)", "9^9^9",
]  # fmt: skip
CODE = [
    "I.sin(2)", "E.sqrt(9)", "x.y", "S.pi", "1 << 99",
    "().__class__", "exec(chr(49))", "(lambda: 1)()", "'a'*9", "x[0]", "[i for i in y]",
    "sqrt(f'{x}')", "sin(x, y=1)", "(x := 2)", "print(1)", "1 if x else 2",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, None) for text in SMALL),
        *((text, "powers up to") for text in LARGE),
        *((text, "expected arithmetic") for text in CODE),
    ],
)
def test_only_text_with_arithmetic_is_evaluated(text, said):
    with nullcontext() if said is None else pytest.raises(ValueError, match=said):
        check_arithmetic(text)


def test_two_numbers_without_an_operator_are_refused():
    with pytest.raises(SyntaxError):
        check_arithmetic("5 5")


def test_a_data_set_whose_own_answer_fails_in_the_worker_is_refused():
    [entry] = entries("tuples", 1)
    with pytest.raises((RewardFailure, RewardError), match="tuples cannot be scored"):
        score(entry, "1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=reasoning_gym:sum"], "'sum'; nearest: sums"),
        (["data=reasoning_gym:sums", "data.options.size=0"], "a size above 0"),
        (["data=reasoning_gym:sums", f"data.options.seed={GYM_TEST}"], "seed + size <="),
        (["data=reasoning_gym:sums", "data.options.largest=0"], "largest must be positive"),
        (["data=reasoning_gym:sums", "data.options.smallest=0"], "smallest"),
        (["data=mine.jsonl", "data.options.size=9"], "data.options: expected none without"),
    ],
)
def test_refusals(tmp_path, words, message):
    words = [*words, f"output_dir={tmp_path / 'run'}"]
    assert refused(invoke("train", "own-data", *words), message)


@pytest.mark.parametrize(
    ("package", "source", "extra"),
    [("reasoning_gym", "reasoning_gym:sums", "gym"), ("datasets", "openai/gsm8k", "train")],
)
def test_a_missing_package_is_named_with_its_command(monkeypatch, package, source, extra):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", ["grpo-fast", "data", source])
    message = f"the package {package}.* is missing; pip install 'grpo-fast.{extra}.'"
    with pytest.raises(SystemExit, match=message):
        main()


def test_data_shows_rows():
    said = invoke("data", "reasoning_gym:sums", "options.size=300", "options.largest=500").stdout
    assert "training and 128 test examples" in said and "entry" in said
    assert " + " in said and "gold answer: " in said


def test_the_package_itself(package, monkeypatch):
    monkeypatch.undo()
    forget()
    if importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning-gym is not installed: pip install 'grpo_fast[gym]'")
    for name in ("chain_sum", "countdown", "basic_arithmetic", "bitwise_arithmetic"):
        first, second = entries(name, 2, seed=7)
        found = score(first, first["answer"], "print(1)")
        assert found[0] == 1 and found[1] < 0.1 and first["question"] != second["question"]
