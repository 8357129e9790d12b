"""What cannot work is refused before a model is loaded, the output folder left free."""

from __future__ import annotations

import json

import pytest

from grpo_fast.train import loop
from grpo_fast.train.config.recipes import load_recipe
from tests.command_line import RECIPE, invoke, refused, write_recipe

TEXTS = RECIPE.replace("tokenizer: symbols", "tokenizer: bpe, vocab_size: 300").replace(
    "sort_positions", "exact_match"
)


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path)


@pytest.fixture
def no_model(monkeypatch):
    """Whoever asks for a model has asked too early."""
    for name in ("grpo_fast.train.loop.load_policy", "grpo_fast.train.models.loading.load_policy"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("a model was loaded"))


def texts_recipe(folder, lines, n_test=1):
    """A recipe of these lines of a file."""
    (folder / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = f"data: {{task: jsonl, path: {folder / 'd.jsonl'}, n_test: {n_test}}}"
    return write_recipe(folder, TEXTS.replace("data: {task: sort, digits: 3, n_test: 8}", data))


@pytest.mark.parametrize("place", ["file", "file/below", "occupied"])
def test_output_folders(tmp_path, recipe, no_model, place):
    (tmp_path / "file").write_text("x")
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "old").write_text("x")
    folder = tmp_path / place
    said = f"output_dir: {'' if place == 'occupied' else 'cannot'}"
    assert refused(invoke("train", recipe, f"output_dir={folder}"), said)
    with pytest.raises(ValueError, match="output_dir: "):  # the library's users, too
        loop.train(load_recipe(recipe, [f"output_dir={folder}"]))


@pytest.mark.parametrize("which", [0, 1])
def test_a_prompt_that_is_too_long(tmp_path, monkeypatch, which):
    """Of the test split or the training split, wherever it lies: not in the middle of the run."""
    lines = [{"prompt": "1 2 3", "answer": "1"} for _ in range(2)]
    lines[which]["prompt"] = "0123456789" * 12
    generate = "transformers.GenerationMixin.generate"
    monkeypatch.setattr(generate, lambda *_, **__: pytest.fail("asked the model"))
    result = invoke("train", texts_recipe(tmp_path, lines), "rollout.prompts_per_step=1")
    said = "expected at most 64 tokens (max_position_embeddings of the model), got 120 in '0123"
    assert refused(result, said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("out", [".", "no/e.json", "run"])
def test_where_eval_cannot_write(run, tmp_path, no_model, out):
    result = invoke("eval", str(run), "n=2", f"out={tmp_path / out}")
    assert refused(result, "out: expected a file in a folder that exists")


def test_results_that_cannot_be_written_are_still_shown(run):
    result = invoke("eval", str(run), "n=2", "out=/dev/full")
    said = "out: cannot write /dev/full: No space left", "greedy (n=2 questions"
    assert refused(result, *said, code=1)


# ---------------------------------------------------------------------------------- the home folder
def test_everything_of_a_run_lies_in_one_folder(tmp_path, recipe, monkeypatch):
    """`~` is the home folder for the model as for the metrics."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    words = ("steps=0", "log.progress=false")
    assert invoke("train", recipe, "output_dir=~/a", *words).exit_code == 0
    assert invoke("train", recipe, "output_dir=~/", "--name", "b", *words).exit_code == 0
    for name in ("a", "b"):
        found = {path.name for path in (home / name).iterdir()}
        assert {"model", "metrics.jsonl", "summary.json", "config.yaml"} <= found
    assert invoke("eval", "~/a", "n=2", "out=~/e.json").exit_code == 0
    assert (home / "e.json").is_file()
    assert invoke("plot", "~/a", "--out=~/p.png").exit_code == 0 and (home / "p.png").is_file()
    assert not list(here.iterdir())
    # A folder of that name.
    assert invoke("train", recipe, "output_dir=./~/a", *words).exit_code == 0
    assert {"model", "metrics.jsonl"} <= {p.name for p in (here / "~" / "a").iterdir()}


# ----------------------------------------------------------------------------------------- later on
@pytest.mark.parametrize(
    "words", [(), ("model.dtype=float16", "optim.lr=1"), ("rollout.top_k=3", "minibatches=2")]
)
def test_a_policy_that_gives_nan(recipe, words):
    result = invoke("train", recipe, "optim.lr=1e30", "steps=8", "log.progress=false", *words)
    assert refused(result, "the policy's logits are NaN or infinite at step ", "optim.lr", code=1)


def test_nan_before_the_first_step(recipe, monkeypatch):
    def ruin(policy, *_, **__):
        policy.head.weight.data.fill_(float("nan"))

    monkeypatch.setattr(loop, "warm_start", ruin)
    result = invoke("train", recipe, "warm_start.steps=1", "log.progress=false")
    assert refused(result, "the policy's logits are NaN or infinite before the first step", code=1)
