"""Tests of custom functions in workers, the columns that they receive, and lost samples."""

import importlib.util
import os

import pytest

from grpo_fast import rewards as package
from grpo_fast.data import Example
from grpo_fast.rewards import RewardSet, WeightedReward, build_rewards, check_examples
from grpo_fast.rewards import score as score_examples
from grpo_fast.rewards.isolated import IsolatedReward, path_of
from grpo_fast.rewards.scoring import EXPRESSIONS as EXPRESSIONS_WORKER
from tests.reward_specs import spec

MODULE = """
import os, time


def pid(completions):
    return [os.getpid()] * len(completions)


def moody(completions):
    if "hang" in completions: time.sleep(60)
    if "die" in completions: os._exit(3)
    if "raise" in completions: raise ValueError("boom")
    return [{"nan": float("nan"), "text": "1"}.get(c, 1.0) for c in completions]


moody.per_sample = True


def asks(*, completion_ids, completion_lengths, level, unit=1):
    return [100 * ids[-1] + 10 * n + l * unit for ids, n, l in
            zip(completion_ids, completion_lengths, level, strict=True)]


def everything(**columns):
    names = {"answers", "completion_ids", "completion_lengths", "completions", "level", "prompts"}
    names |= {"answer", "prefills", "trainer_state", "log_extra", "log_metric", "unit"}
    return [float({*columns} == names and len(columns["level"]) == len(columns["prompts"]))
            for _ in columns["prompts"]]


class Keywords:
    # An instance must not be mistaken for a functools.partial.
    per_sample = True

    def __init__(self, keywords):
        self.keywords, self.func = keywords, len

    def __call__(self, completions):
        if "raise" in completions: raise ValueError("boom")
        if "late" in completions: raise TimeoutError("no answer")
        if "why" in completions: raise Why("its why is no reason of ours")
        return [float(text in self.keywords) for text in completions]


class Why(Exception):
    @property
    def why(self): raise KeyError


def unnamed(completions, /):
    return [1.0] * len(completions)


def none_of_them():
    return [0.5, 0.25]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "some_rewards.py"
    path.write_text(MODULE)
    return path


@pytest.fixture
def build(file):
    """Return a function that builds a `RewardSet` with one reward function."""

    def make(name, **keywords):
        options = {"timeout": 20, **keywords}
        path = name if name in ("format_pattern", "math_equal", "math_close") else f"{file}:{name}"
        return build_rewards([spec(path, **options)], max_failures=1.0)

    return make


def ask(rewards, *completions, answers=None):
    n = len(completions)
    return rewards(["p"] * n, list(completions), answers or ["x"] * n)


# ------------------------------------------------ Functions that run in a worker or in this process
def test_own_functions_run_elsewhere_unless_asked_for_here(build):
    assert ask(build("pid"), "a").total.item() != os.getpid()
    assert ask(build("pid", in_process=True), "a").total.item() == os.getpid()


def test_a_file_is_found_without_being_importable(file, build, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(file.parent))
    rewards = build_rewards([spec("~/some_rewards.py:none_of_them")])
    assert [reward.name for reward in rewards.rewards] == ["none_of_them"]
    assert ask(rewards, "a", "b").total.tolist() == [0.5, 0.25]
    for wrong, why in (
        (f"{file}:nothing", "function 'nothing' in .*found no such name; functions: pid"),
        (f"{tmp_path}/no.py:f", "/no.py:f cannot be used: no such file: "),
        (str(file), "a custom function .*; name a function of the file, for example .*py:reward'"),
        (f"{file}:unnamed", "expected parameters that can be given by name"),
        ("no_such_module:f", "could not import 'no_such_module'"),
    ):
        with pytest.raises(ValueError, match=f"rewards: .*{why}"):
            build_rewards([spec(wrong)])


def test_two_of_one_function_need_labels(file):
    twice = [spec(f"{file}:pid", in_process=True, label=label) for label in ("one", "two")]
    assert [reward.name for reward in build_rewards(twice).rewards] == ["one", "two"]
    with pytest.raises(ValueError, match="expected different names"):
        build_rewards([spec(f"{file}:pid", in_process=True)] * 2)


@pytest.mark.parametrize("here", [False, True])
def test_options_that_a_function_does_not_take(build, here):
    assert ask(build("everything", in_process=here, anything=1), "a").reasons == {"everything": {}}
    with pytest.raises(ValueError, match="asks: unexpected keyword argument 'units', expected"):
        build("asks", in_process=here, units=2)


# ------------------------------------------------------------ Reasons why a sample gets no reward
@pytest.mark.parametrize(
    ("completion", "why"),
    [
        ("hang", "timeout"), ("die", "died"), ("raise", "error"), ("nan", "not_a_number"),
        ("text", "not_a_number"),
    ],
)  # fmt: skip
def test_each_loss_has_its_reason_and_costs_its_own_sample(build, completion, why):
    result = ask(build("moody", timeout=1), "good", completion, "good")
    assert result.total.isnan().tolist() == [False, True, False]
    assert result.reasons == {"moody": {why: 1}}


@pytest.mark.parametrize("here", [False, True])
def test_attributes_of_an_instance_or_an_error_are_the_users(build, here):
    rewards = build("Keywords", keywords=["a"], in_process=here)
    assert ask(rewards, "a", "b").total.tolist() == [1.0, 0.0]
    result = ask(rewards, "a", "raise", "why", "late")
    assert result.total.isfinite().tolist() == [True, False, False, False]
    assert result.reasons["Keywords"] == {"error": 2, "timeout": 1}


def test_after_three_hanging_samples_the_rest_is_lost_unasked(build, monkeypatch):
    rewards = build("moody", timeout=0.5)
    worker = rewards.rewards[0].function.worker
    request = worker.request
    asked = []

    def counted(name, limit, message):
        asked.append(message[1] and message[1][0])
        return request(name, limit, message)

    monkeypatch.setattr(worker, "request", counted)
    result = ask(rewards, *["hang"] * 20)
    assert result.reasons == {"moody": {"timeout": 20}}
    # One call with all samples, and three with one. Requests without a call start a new worker.
    assert [count for count in asked if count] == [20, 1, 1, 1]


# ----------------------------------------------------- Columns of the data that a function receives
@pytest.mark.parametrize("here", [False, True])
def test_functions_get_what_they_name(build, here):
    # The option unit=2 of `asks` must win over the column `unit` of the data.
    examples = [Example(f"p{i}", None, None, {"level": i, "unit": 9}) for i in range(3)]
    ids = [[5], [5, 6], [5, 6, 7]]
    rewards = build("asks", in_process=here, unit=2)
    found = score_examples(rewards, examples, ["a"] * 3, ids)
    assert found.total.tolist() == [510.0, 622.0, 734.0]
    everything = score_examples(build("everything", in_process=here), examples, ["a"] * 3, ids)
    assert everything.total.tolist() == [1.0] * 3


def test_a_field_that_only_some_have_is_none_for_the_others():
    seen = []

    def level(*, level):
        seen.extend(level)
        return [0.0] * len(level)

    examples = [Example("p", None, None, {"level": 1}), Example("q", None, None)]
    rewards = RewardSet([WeightedReward("level", 1.0, level)])
    score_examples(rewards, examples, ["a", "b"])
    assert seen == [1, None]


@pytest.mark.parametrize("name", ["asks", "exact_match"])
def test_what_a_function_needs_is_asked_for_before_the_run(build, name):
    rewards = build(name) if name == "asks" else build_rewards([spec(name)])
    field, whole = ("level", {"level": 1}) if name == "asks" else ("answers", {})
    good = Example("p", "1", None, whole)
    check_examples(rewards, [good, good], "training")
    bad = Example("question?", None, None)
    with pytest.raises(ValueError, match=f"{name} asks for {field}: .* got 1 of 2 .*'question"):
        check_examples(rewards, [good, bad], "test")
    check_examples(build_rewards([spec("gsm8k_format")]), [bad], "training")


# ---------------------------------------------------- Built-in reward functions in a worker process
def test_a_pattern(build):
    found = build("format_pattern", pattern="<a>.*</a>")
    assert ask(found, "so <a>1\n2</a>.", "<a>", "").total.tolist() == [1.0, 0.0, 0.0]
    whole = build("format_pattern", pattern="<a>.*</a>", whole=True)
    assert ask(whole, "so <a>1</a>", "<a>1</a>").total.tolist() == [0.0, 1.0]
    lost = ask(build("format_pattern", pattern="("), "a")
    assert lost.reasons == {"format_pattern": {"error": 1}}
    # The search in the second completion never ends. Only this completion must lose its reward.
    rewards = build("format_pattern", pattern="^(a+)+$", timeout=1)
    result = ask(rewards, "aaa", "a" * 60 + "b")
    assert result.total[0] == 1 and result.reasons == {"format_pattern": {"timeout": 1}}


needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None,
    reason="math-verify is not installed (pip install 'grpo_fast[math]')",
)
EXPRESSIONS = [  # completion, gold answer, expected math_equal, expected math_close
    (r"so $\frac{1}{2}$", "1/2", 1, 1),
    (r"it is \boxed{0.5}", r"\frac{1}{2}", 1, 1),
    (r"\boxed{1+x}", "x+1", 1, 1),
    (r"$\{2, 1\}$", r"\{1, 2\}", 1, 1),
    (r"\boxed{1,080}", "1080", 1, 1),
    ("it is 18.", "18", 0, 1),  # only math_close accepts a number in running text
    (r"\boxed{0.333}", "1/3", 0, 1),
    (r"\boxed{0.4}", "1/3", 0, 0),
    (r"\boxed{1080}", "1,080", 1, 1),
    (r"\boxed{-7}", "$-7$", 1, 1),
    (r"\boxed{18}", "18 apples", 1, 1),
    ("no idea", "7", 0, 0),
    ("", "7", 0, 0),
    ("\x00 \\boxed{", "7", 0, 0),
]


@needs_math
@pytest.mark.parametrize("name", ["math_equal", "math_close"])
def test_mathematics(build, name):
    texts, answers, equal, close = zip(*EXPRESSIONS, strict=True)
    found = ask(build(name), *texts, answers=list(answers))
    expected = equal if name == "math_equal" else close
    assert [*zip(texts, found.total.tolist(), strict=True)] == [*zip(texts, expected, strict=True)]


@needs_math
def test_mathematics_that_takes_forever_or_has_no_answer(build):
    rewards = build("math_equal", seconds=1, timeout=60)
    found = ask(rewards, r"$9^{9^{9^{9^9}}}$", r"\boxed{7}", "x" * 65536, answers=["7"] * 3)
    assert found.reasons == {"math_equal": {"not_a_number": 1}}
    assert found.total[1:].tolist() == [1.0, 0.0]
    assert ask(rewards, "7", answers=[" "]).reasons == {"math_equal": {"error": 1}}


def test_without_math_verify_the_reward_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'math_verify'\")"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    worker = IsolatedReward(path_of(EXPRESSIONS_WORKER), timeout=20.0)
    monkeypatch.setattr(package, "built_in", lambda _: worker)
    with pytest.raises(ValueError, match=r"cannot be used: .*pip install 'grpo_fast\[math\]"):
        build_rewards([spec("math_equal")])
    worker.close()
