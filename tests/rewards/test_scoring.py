"""Tests of strict and lenient scoring with a table of gold answers, prompts and completions."""

import importlib.util
import time

import pytest

from grpo_fast.data import Example
from grpo_fast.data.answers import final_part, read_gold, turns
from grpo_fast.rewards import REWARDS, score, scorer_for
from grpo_fast.rewards.columns import prefill_of
from grpo_fast.rewards.reward_set import RewardSet, WeightedReward
from grpo_fast.rewards.scoring import answer_scorer, compare, is_expression
from tests.rewards.answer_pairs import FREE, MARKED

needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None,
    reason="math-verify is not installed (pip install 'grpo_fast[math]')",
)

HASH, TAG, BOX, NONE = "End with: #### <number>", "Use <answer>", r"Use \boxed{}", "How many?"

TABLE = [  # gold, prompt, completion, strict, lenient
    # The gold answer is a number, and the prompt requests no answer format. Only a completion that
    # is nothing but this number is strictly right.
    ("42", NONE, "42", 1, 1), ("42", NONE, " 42.0\n", 1, 1), ("42", NONE, "$42.", 1, 1),
    ("42", NONE, "it is 42", 0, 1), ("42", NONE, "#### 42", 0, 1), ("42", NONE, "43", 0, 0),
    ("42", NONE, "", 0, 0), ("42", NONE, "42 or 43", 0, 0), ("42", NONE, "forty-two", 0, 0),
    ("1,080", NONE, "1080", 1, 1), ("\u22125", NONE, "-5", 1, 1), ("$12", NONE, "12 pens", 0, 1),
    # The gold answer is a number, and the prompt requests an answer format such as ####.
    ("42", HASH, "so\n#### 42", 1, 1), ("42", HASH, "<answer>42</answer>", 1, 1),
    ("42", HASH, "42", 0, 1), ("42", HASH, r"\boxed{42}", 0, 1), ("42", HASH, "#### 43", 0, 0),
    ("42", TAG, "<Answer>42</Answer>", 1, 1), ("42", HASH, r"\boxed{42}. (see step 3)", 0, 1),
    ("12", HASH, "#### 1,2", 0, 0), ("42", HASH, "#### 42 eggs", 0, 1),
    ("42", HASH, "<think>so #### 42", 0, 0), ("42", HASH, "<think>x</think>#### 42", 1, 1),
    ("42", HASH, "#### 41\n#### 42", 1, 1), ("42", HASH, "#### 42\n#### 41", 0, 0),
    ("42", BOX, r"so \boxed{42}", 1, 1), ("42", BOX, "#### 42", 0, 1), ("42", BOX, "42", 0, 1),
    ("42", BOX, r"\boxed{41} \boxed{\text{42}}", 1, 1), ("42", BOX, r"\boxed{42", 0, 1),
    # The gold answer is no number. `answer_pairs.py` has more such rows.
    ("15/2", HASH, "it is 15/2", 0, 1), ("15/2", NONE, "15/0", 0, 0), ("2x", NONE, "2*x", 1, 1),
    (r"\sqrt{8}", BOX, r"so \boxed{2\sqrt{2}}", 1, 1), (r"\sqrt{8}", BOX, "2", 0, 0),
    (r"\text{yes}", BOX, r"\boxed{\text{Yes}}", 0, 1), ("12 pens", NONE, "so\n12 pens", 0, 1),
    ("Paris", TAG, "<answer>Paris</answer>", 1, 1), ("Paris", TAG, "Paris", 0, 1),
    ("Paris", NONE, "<answer> Paris </answer>", 0, 1), ("Paris", NONE, "paris", 0, 1),
    ("yes", NONE, "<think>no</think>\nyes", 1, 1), ("yes", NONE, "<think>yes", 0, 0),
    ("2024-01-05", NONE, "2018", 0, 0), ("B", HASH, "#### B", 1, 1), ("A", NONE, "(A).", 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "prompt", "text", "strict", "lenient"), TABLE)
def test_the_table(gold, prompt, text, strict, lenient):
    scorer = scorer_for("jsonl", Example(prompt, gold, None))
    assert scorer.is_right(scorer.strict(text)) == bool(strict)
    assert scorer.is_right(scorer.lenient(text)) == bool(lenient)


def test_there_are_200_pairs_of_data_sets():
    assert sum(len(right) + len(wrong) for _, right, wrong in MARKED + FREE) >= 200


@needs_math
@pytest.mark.parametrize(("gold", "right", "wrong"), MARKED, ids=[row[0] for row in MARKED])
def test_all_judges_agree_on_marked_answers(gold, right, wrong):
    for answer in right + wrong:
        box = f"<think>or \\boxed{{7777}}</think> so \\boxed{{{answer}}}, see step 3"
        hashes = f"so\n#### {answer}"
        boxed = scorer_for("jsonl", Example(BOX, gold, None))
        marked = scorer_for("jsonl", Example(HASH, gold, None))
        given = {"completions": [box, hashes, f"<answer>{answer}</answer>"], "answers": [gold] * 3}
        verdicts = [
            boxed.is_right(boxed.strict(box)), boxed.is_right(boxed.lenient(box)),
            marked.is_right(marked.strict(hashes)), marked.is_right(marked.lenient(hashes)),
            *REWARDS["gsm8k_correct"](**given)[1:], *REWARDS["gsm8k_correct_lenient"](**given),
            *REWARDS["math_equal"](**given),
        ]  # fmt: skip
        assert verdicts == [answer in right] * len(verdicts), answer


@needs_math
@pytest.mark.parametrize(("gold", "right", "wrong"), FREE, ids=[row[0] for row in FREE])
def test_lenient_judges_of_any_format(gold, right, wrong):
    scorer = scorer_for("jsonl", Example(BOX, gold, None))
    given = {"completions": right + wrong, "answers": [gold] * len(right + wrong)}
    found = [scorer.is_right(scorer.lenient(text)) for text in right + wrong]
    assert found == [True] * len(right) + [False] * len(wrong)
    assert REWARDS["gsm8k_correct_lenient"](**given) == found


@pytest.mark.parametrize(
    "unit", ["(", "((", r"\frac{", "{", "[", "1+", r"\sqrt{", "x^", "$", "B) "]
)
def test_long_answers_cost_less_than_a_second(unit):
    start = time.process_time()
    text = (unit * 200_000)[:200_000]
    for completion in (text, f"\\boxed{{{text}}}", f"#### {text}", f"the answer is ${text}$"):
        given = {"completions": [completion], "answers": ["x^2"]}
        for name in ("math_equal", "gsm8k_correct", "gsm8k_correct_lenient"):
            assert REWARDS[name](**given) == [0.0]
    assert compare("(" * 200 + ")" * 200, "x^2") == 0
    assert time.process_time() - start < 6  # 12 judgements, each much faster than half a second


@pytest.mark.parametrize(
    ("text", "prefill", "final"),
    [
        ("a", "", "a"), ("<think>a</think>b", "", "b"), ("a</think>b", "", "b"),
        ("<think>a", "", ""), ("a", "<think>\n", ""), ("a</think>b", "<think>", "b"),
        ("a<think>b<think>c", "", "a"), ("<think>a</think>b<think>c", "", "b"),
        ("<THINKING>a</Thinking>b", "", "b"), ("[THINK]a[/THINK]b", "", "b"),
        ("<reasoning>a</reasoning>b", "", "b"), ("<thinker>a", "", "<thinker>a"),
    ],
)  # fmt: skip
def test_the_final_part(text, prefill, final):
    assert [final_part(turn) for turn in turns([text], [prefill])] == [final]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("because\n#### B", "B"), ("#### 12 pens", "12 pens"), ("so\n#### $1,080", "1080"),
        ("#### Conclusion\nIt is Paris.", "#### Conclusion\nIt is Paris."), ("Paris", "Paris"),
        ("#### Step\nso \\boxed{x^2}", "x^2"), ("<answer> B </answer>", "B"), ("15/2", "15/2"),
        ("<think>\\boxed{3}</think>\\boxed{4}", "4"), ("#### 1\\frac{1}{2}", "1\\frac{1}{2}"),
        ("\\boxed{2} or \\boxed{3}", "2, 3"), ("\\boxed{10,\\!000}", "10000"),
        ("####: 5", "5"), ("<think>hm</think>\nParis", "Paris"),
        ("#### 18\nThe answer is: 18", "18"),
    ],
)  # fmt: skip
def test_gold_answers_of_solutions(answer, gold):
    assert read_gold(answer) == gold


def test_one_odd_answer_does_not_change_the_judging_of_the_others():
    golds = ["5", "15/2", "12 pens", "1e3", "+5", "\u22125"]
    said = ["5", "7.5", "12 pens", "1000", "5", "-5"]
    found = REWARDS["gsm8k_correct"](completions=[f"#### {x}" for x in said], answers=golds)
    assert found == [1.0] * 6


def test_expressions():
    yes = ["x+1", r"\pi", "x^2", "2x+y", "(1, 2)", "[0,1)", "sqrt(2)", "a=3", "2x"]
    no = ["12 pens", "yes", "B", "well-known", "2024-01-05", "10:30", "3 kg", "cat/dog", "", "a b"]
    assert list(filter(is_expression, yes + no)) == yes


def test_without_math_verify_expressions_are_texts(monkeypatch, caplog):
    from grpo_fast.rewards import scoring

    def missing(**_):
        raise scoring.RewardFailure("ModuleNotFoundError: No module named 'math_verify'")

    monkeypatch.setattr(scoring, "built_in", lambda _: missing)
    scoring._same_expressions.cache_clear()
    scoring.warn_once.cache_clear()
    scorer = answer_scorer("x+1", ())
    assert scorer.is_right("x+1") and not scorer.is_right("1+x")
    assert "pip install 'grpo_fast[math]'" in caplog.text
    scoring._same_expressions.cache_clear()


# ----------------------------------- Chat templates that begin the answer, for example with <think>
OPENED = "<|user|>q\n<|assistant|><think>\n"
PERFECT = "so 4</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("prompt", "text", "prefill"),
    [
        ([{"role": "user", "content": "q"}], OPENED, "<think>\n"),
        ([{"role": "user", "content": "q"}], "<|assistant|><think>\n\n</think>\n\n",
         "<think>\n\n</think>\n\n"),
        ([{"role": "user", "content": "use <think>"}], "[user] use <think>\n[assistant]", ""),
        ("End with: <answer>number</answer>\n", "End with: <answer>number</answer>\n", ""),
        ("q", "q", ""), ("", "", ""), ("q <think>", "q <think>", "<think>"),
        ([{"role": "assistant", "content": "<think>Let"}], "…<think>Let", "<think>Let"),
    ],
)  # fmt: skip
def test_the_beginning_that_a_prompt_holds(prompt, text, prefill):
    assert prefill_of(prompt, text) == prefill


def test_tags_that_the_template_opened_count():
    tags = REWARDS["format_tags"]
    assert tags(completions=[PERFECT]) == pytest.approx([0.3])
    assert tags(completions=[PERFECT], prefills=["<think>\n"]) == pytest.approx([0.5])
    assert tags(completions=["<think>" + PERFECT], prefills=["<think>\n"]) == pytest.approx([0.3])
    assert tags(completions=[PERFECT], prefills=["<think>"], number=True) == pytest.approx([0.5])
    assert turns(["4"], ["It is "]) == ["4"] and turns(["4"], None) == ["4"]


def test_rewards_are_given_the_beginning_of_the_turn():
    rewards = RewardSet(
        [WeightedReward(n, 1.0, REWARDS[n]) for n in ("format_tags", "gsm8k_correct")]
    )
    examples = [Example([{"role": "user", "content": "q"}], "4", None)] * 3
    texts = [PERFECT, "so #### 4", "</think>#### 4"]
    found = score(rewards, examples, texts, prompt_texts=[OPENED] * 3)
    assert found.per_fn["format_tags"].tolist() == pytest.approx([0.5, 0.1, 0.2])
    # The second completion does not close the `<think>` tag of the prompt, so it has no answer.
    assert found.per_fn["gsm8k_correct"].tolist() == [1.0, 0.0, 1.0]
