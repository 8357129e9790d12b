"""Tests of completions as rows, as parquet files, and on the page of a run."""

import functools
import math
import re
from html.parser import HTMLParser

import pytest
import torch
from pyarrow import parquet

from grpo_fast.data import Example
from grpo_fast.data.tokenizer import build_bpe_tokenizer, build_symbol_tokenizer
from grpo_fast.rewards import scorer_for
from grpo_fast.train import loop
from grpo_fast.train.config import load_recipe
from grpo_fast.train.report import page
from grpo_fast.train.report.page import (
    harmless,
    rows_of,
    step_html,
    token_texts,
    write_page,
    write_parquet,
)
from tests import chromium
from tests.tiny import TEXTS
from tests.train.runs import TINY_SORT, logged
from tests.train.tiny_steps import batch_of, table_of

HOSTILE = (
    '</pre></i><script>document.title="owned"</script><img src="http://x/y.png" onerror=alert(1)>'
    "\"'><style>*{display:none}</style><!-- --><a href=javascript:alert(1)>&lt;b&amp;\x1b[31m\u202e"
)


def row(**changes):
    """Return one completion of two tokens in the format that `rows_of` returns."""
    fields = {
        "group": 0, "prompt": "1 2 =", "completion": "1 2", "answer": "1 2", "extracted": "1 2",
        "extracted_lenient": "1 2", "correct": True, "reward": 1.0, "rewards/f": 1.0,
        "advantage": 0.5, "truncated": False, "tokens": ["1", " 2"], "token_ids": [3, 4],
        "logps": [-0.1, -2.0], "advantages": [0.5, 0.5],
    }  # fmt: skip
    return fields | changes


class Walk(HTMLParser):
    """HTML parser that collects the elements, the attributes and the visible text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text, self.inside = [], [], "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.inside.append(tag)

    def handle_endtag(self, tag):
        while self.inside.pop() != tag:
            pass

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, data):
        if "style" not in self.inside:
            self.text += data


def collected(advantages):
    """Return a tokenizer, examples, and a batch with two groups of two samples.

    The task is to sort digits. Only the third sample is wrong.
    """
    tokenizer = build_symbol_tokenizer(["1", "2", "3", "="])
    texts = ["1", "1 2", "2 1", "1 2"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    ids[2] += [tokenizer.eos_token_id]
    logps = [-0.25 * torch.arange(1.0, 1 + len(i)) for i in ids]
    samples = table_of([[2], [2]], ids, cut=[0, 1, 3], logps=logps, texts=texts)
    examples = [Example("1 =", "1", None)] * 2 + [Example("2 1 =", "1 2", None)] * 2
    samples.rewards = torch.tensor([1.0, 0.5, math.nan, 1.0])
    samples.scores = {"f": samples.rewards / 2}
    return tokenizer, examples, batch_of(samples, torch.tensor(advantages))


def rows_with(advantages, answered=True, by_token=None):
    tokenizer, examples, batch = collected(advantages)
    if by_token is not None:
        batch.samples.token_advantages = torch.cat(list(map(torch.tensor, by_token)))
    examples = examples if answered else [e._replace(answer=None) for e in examples]
    scorer = functools.partial(scorer_for, "sort" if answered else "jsonl")
    used = batch.used_advantages()
    sent = [example.prompt for example in examples]
    return rows_of(batch.samples, used, examples, sent, tokenizer, scorer, group_size=2)


def test_rows_hold_what_a_completion_was_given():
    given = [0.5, -0.5, 0.0, 0.25]
    rows = rows_with(given)
    assert [r["group"] for r in rows] == [0, 0, 1, 1]
    third = rows[2]
    assert third["tokens"] == ["2", " 1", " <|eos|>"] and third["token_ids"] == [3, 2, 1]
    assert third["logps"] == [-0.25, -0.5, -0.75] and third["advantages"] == [0.0] * 3
    assert third["extracted"] == "2 1" and third["answer"] == "1 2" and third["correct"] is False
    assert math.isnan(third["reward"]) and math.isnan(third["rewards/f"])
    assert rows[3]["correct"] is True and rows[3]["rewards/f"] == 0.5 and rows[3]["truncated"]
    assert rows[1]["advantage"] == -0.5 and rows[1]["advantages"] == [-0.5, -0.5]
    # With one advantage per token, the advantage of a completion is the mean over its tokens.
    by_token = [[1.0], [2.0, 4.0], [0.0, 3.0, 0.0], [5.0, 6.0]]
    rows = rows_with(given, by_token=by_token)
    assert [r["advantages"] for r in rows] == by_token
    assert [r["advantage"] for r in rows] == [1.0, 3.0, 1.0, 5.5]
    rows = rows_with([0.0] * 4, answered=False)
    assert rows[0]["answer"] is None and rows[0]["correct"] is None
    html = step_html(1, rows)
    assert 'class="unjudged"' in html and "answer <b>" not in html


def test_strict_and_lenient_answers_are_told_apart():
    tokenizer = build_bpe_tokenizer(TEXTS, 300)
    texts = ["#### 1,080", "it is 1080", "none"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    samples = table_of([[5]], ids, texts=texts)
    samples.rewards = torch.zeros(3)
    examples = [Example("q", "1080", None)] * 3
    used = [torch.zeros(len(i)) for i in ids]
    scorer = functools.partial(scorer_for, "gsm8k")
    rows = rows_of(samples, used, examples, ["q"] * 3, tokenizer, scorer, group_size=3)
    found = [(r["extracted"], r["extracted_lenient"], r["correct"]) for r in rows]
    assert found == [("1080", "1080", True), (None, "1080", False), (None, None, False)]
    shown = Walk(step_html(1, rows)).text
    assert "found 1080" in shown and "found out of form 1080" in shown and "no answer" in shown


def test_the_tokens_texts_make_the_whole_text():
    tokenizer = build_bpe_tokenizer(TEXTS, 300)
    ids = tokenizer("a é漢🙂 b")["input_ids"]
    texts = token_texts(tokenizer, [*ids, 1])
    assert texts[:4] == ["a", " ", "", "é"] and texts[-1] == "<|eos|>" and "🙂" in texts
    for cut in range(1, len(ids) + 1):  # some cuts are in the middle of a character
        texts = token_texts(tokenizer, ids[:cut])
        assert len(texts) == cut and "".join(texts) == tokenizer.decode(ids[:cut])

    class Slow:
        def decode(self, ids):
            return f"<{ids}>"

    assert token_texts(Slow(), [3, 4]) == ["<[3]>", "<[4]>"] and token_texts(tokenizer, []) == []


def test_parquet_holds_the_rows(tmp_path):
    rows = [row(), row(completion="\ud800", answer=None, reward=math.nan, extracted=None)]
    write_parquet(rows, 7, tmp_path / "a.parquet")
    read = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [set(r) for r in read] == [{"step", *row()}] * 2 and read[0]["step"] == 7
    assert read[0]["tokens"] == ["1", " 2"] and read[0]["logps"] == pytest.approx([-0.1, -2.0])
    assert read[1]["completion"] == r"\ud800" and read[1]["answer"] is None
    assert math.isnan(read[1]["reward"])
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def hostile_page():
    names = ("prompt", "completion", "answer", "extracted", "extracted_lenient")
    texts = dict.fromkeys(names, HOSTILE)
    rows = [row(**texts, tokens=[HOSTILE, HOSTILE]), row(**(texts | {"extracted": None}))]
    rows[0][f"rewards/{HOSTILE}"] = 1.0
    parts = [(1, step_html(1, rows))]
    return page.TEMPLATES.get_template("page.html").render(title=HOSTILE, parts=parts)


def test_hostile_text_stays_text_and_the_policy_allows_styles_alone():
    html = hostile_page()
    seen = Walk(html)
    allowed = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "input", "label",
               "main", "nav", "a", "details", "summary", "section", "article", "pre", "b", "i",
               "span"}  # fmt: skip
    assert set(seen.tags) <= allowed and seen.tags.count("style") == 1
    names = {name for _, name, _ in seen.attributes}
    assert not {"src", "srcset", "style"} & names and not [n for n in names if n.startswith("on")]
    links = [value for _, name, value in seen.attributes if name == "href"]
    assert links == ["#s1"]
    shown = HOSTILE.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")
    # The page shows the hostile text nine times: in the title, the heading, the prompt, the correct
    # answer, the answers of two completions, the name of a reward, and two tokens.
    assert seen.text.count(shown) == 9
    assert "\x1b" not in html and "\u202e" not in html
    policy = next(v for _, n, v in seen.attributes if n == "content" and "-src" in v)
    assert policy == (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'"
    )
    assert html.index("Content-Security-Policy") < html.index("<style>") < html.index("<body>")


def test_completions_stand_by_reward():
    rewards = [0.5, math.nan, 2.0, -1.0]
    rows = [row(reward=r, tokens=[f"t{i}", "x"]) for i, r in enumerate(rewards)]
    rows += [row(group=1, prompt="other", reward=9.0)]
    html = step_html(1, rows)
    assert re.findall(r"reward ([-\w.]+)</b>", html) == ["2", "0.5", "-1", "nan", "9"]
    assert re.findall(r">(t\d)<", html) == ["t2", "t0", "t3", "t1"]
    assert html.count("<section>") == html.count("</section>") == 2


def test_shades():
    logps = [-0.1, -0.5, -1.2, -100.0, -math.inf, math.nan]
    count = len(logps)
    given = {"tokens": ["a"] * count, "logps": logps, "advantages": [math.nan] * count}
    assert [token["level"] for token in page.shaded_tokens(given)] == [0, 1, 2, 8, 8, 0]
    html = step_html(1, [row(**given)])
    assert html.count('class="p8"') == 2 and "p0" not in html
    style = page.TEMPLATES.get_template("page.html").render()
    assert all(f"main .p{level}{{" in style for level in range(1, 9))


def test_long_texts_show_both_ends():
    assert harmless("a" * 4000) == "a" * 4000
    shown = harmless("a" * 3000 + "b" * 3000)
    assert shown.startswith("a" * 2000 + "\n… 2000 characters …\nb") and shown.endswith("b" * 2000)
    many = {"tokens": [f"<{i}>" for i in range(5000)]}
    many |= {name: [0.0] * 5000 for name in ("logps", "advantages")}
    shown = Walk(step_html(1, [row(**many)])).text
    assert "<599>… 3800 tokens …<4400>" in shown and shown.endswith("<4999>")


def test_the_page_shows_the_first_step_and_the_latest_ones(tmp_path):
    (tmp_path / "completions").mkdir()
    for step in range(1, 41):
        rows = [row(group=i // 10, tokens=["x", f"step {step}"]) for i in range(30)]
        write_parquet(rows, step, tmp_path / "completions" / f"step_{step:06d}.parquet")
    (tmp_path / "completions" / "step_000041 (copy).parquet").touch()  # must not matter
    write_page(tmp_path)
    html = (tmp_path / "completions.html").read_text(encoding="utf-8")
    steps = [int(step) for step in re.findall(r'<details id="s(\d+)"', html)]
    assert steps == [1, *range(26, 41)] and html.count(">step 40<") == 16
    assert html.count(" open>") == 1
    assert {p.name for p in tmp_path.iterdir()} == {"completions", "completions.html"}


@pytest.mark.usefixtures("no_pictures")
def test_a_run_leaves_rows_and_page(tmp_path):
    words = [*TINY_SORT, f"output_dir={tmp_path}/run", "log.completions_every=2", "steps=5"]
    loop.train(load_recipe("sort", words))
    names = sorted(p.name for p in (tmp_path / "run" / "completions").iterdir())
    assert names == [f"step_{step:06d}.parquet" for step in (1, 2, 4, 5)]
    rows = parquet.read_table(tmp_path / "run" / "completions" / names[-1]).to_pylist()
    assert len(rows) == 8 and {r["step"] for r in rows} == {5} and rows[7]["group"] == 1
    assert all(len(r["tokens"]) == len(r["logps"]) == len(r["advantages"]) for r in rows)
    assert logged(tmp_path / "run")[-1]["step"] == 5
    html = (tmp_path / "run" / "completions.html").read_text(encoding="utf-8")
    assert re.findall(r'<details id="s(\d+)"', html) == ["1", "2", "4", "5"]
    assert "Completions of run" in html and html.count("<article>") == 32


@pytest.mark.skipif(not chromium.COMMAND, reason="Chromium is not installed")
@pytest.mark.parametrize(
    ("scheme", "background"), [("dark", "rgb(21, 24, 29)"), ("light", "rgb(246, 247, 249)")]
)
def test_it_fits_and_follows_the_color_scheme(tmp_path, scheme, background):
    (tmp_path / "completions").mkdir()
    n = 40
    # The log-probabilities and advantages of these tokens cover all colors of the page.
    long = {"prompt": "question " * 30, "tokens": [" word", "x" * 200, *[" t"] * (n - 2)],
            "logps": [-i / 8 for i in range(n)], "truncated": True,
            "advantages": [(i - n / 2) / n for i in range(n)]}  # fmt: skip
    rows = [row(**long, correct=correct) for correct in (True, False, None)]
    write_parquet(rows, 1, tmp_path / "completions" / "step_000001.parquet")
    write_page(tmp_path)
    file = tmp_path / "completions.html"
    for _, fits, color, _ in chromium.measured(tmp_path, file, scheme):
        assert fits and color == background
