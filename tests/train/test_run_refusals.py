"""Tests that a run's folder cannot execute code, and that errors appear before model loading."""

import sys
from pathlib import Path

import pytest
import yaml

from grpo_fast.train.config import load_recipe
from tests.command_line import RECIPE, invoke, refused, write_recipe
from tests.data.test_data import write_lines
from tests.train.test_hostile_input import change_json

REWARD = "def score(prompts, completions, answers):\n    return [1.0] * len(prompts)\n"


def mark(folder: Path) -> str:
    """Return Python code that creates the file `marker` in `folder`.

    If the file exists after a command, the command has executed the code.
    """
    return f"import pathlib\npathlib.Path({str(folder / 'marker')!r}).touch()\n"


def change(run: Path, **sections) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    (run / "config.yaml").write_text(yaml.safe_dump(config | sections), encoding="utf-8")


def test_a_runs_rewards_are_imported_only_when_allowed(run, tmp_path, monkeypatch):
    (tmp_path / "planted_reward.py").write_text(mark(tmp_path) + REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    change(run, rewards=[{"name": "sort_positions"}, {"name": "planted_reward:score"}])
    marker, words = tmp_path / "marker", ("eval", str(run), "n=2")
    said = "'planted_reward:score'", str(run / "config.yaml"), "--allow-code"
    assert refused(invoke(*words), *said)
    from_recipe = ("eval", str(run / "model"), f"recipe={run / 'config.yaml'}", "n=2")
    assert refused(invoke(*from_recipe), *said)
    # The commands `plot` and `plan` call no reward, so they need not import it.
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    assert invoke("plot", str(run), "-o", str(tmp_path / "p.png")).exit_code == 0
    assert invoke("plan", str(run / "config.yaml"), "gpu=80").exit_code == 0
    assert not marker.exists() and "planted_reward" not in sys.modules
    allowed = invoke(*words, "--allow-code")
    assert allowed.exit_code == 0 and "rewards/score" in allowed.output and marker.exists()
    # A function of an installed package could execute a file in the folder of the run.
    change(run, rewards=[{"name": "torch.hub:load", "options": {"repo_or_dir": str(run)}}])
    assert refused(invoke(*words), "torch.hub:load", "--allow-code")


def plant_model_code(model: Path, marker: Path) -> None:
    """Add custom model code to a model's folder, and name its classes in config.json.

    If the code is executed, it creates a file with the name `marker` in the folder `marker`.
    """
    auto_map = {"AutoConfig": "planted.C", "AutoModelForCausalLM": "planted.M"}
    change_json(model / "config.json", model_type="planted", auto_map=auto_map)
    (model / "planted.py").write_text(
        mark(marker) + "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class C(LlamaConfig):\n    model_type = 'planted'\n"
        "class M(LlamaForCausalLM):\n    config_class = C\n"
    )


@pytest.mark.parametrize("is_run", [True, False])
def test_eval_trusts_a_models_code_only_when_allowed(run, tmp_path, is_run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plant_model_code(run / "model", tmp_path)
    # The run was trained without custom code, so --allow-code does not allow the code.
    assert refused(invoke("eval", str(run), "n=2", "--allow-code"), "custom code")
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["model"]
    change(run, model={**settings, "trust_remote_code": True})
    asked = [str(run)] if is_run else [str(run / "model"), "task=sort"]
    words = ("eval", *asked, "n=2")
    assert refused(invoke(*words), "custom code")
    assert not (tmp_path / "marker").exists()
    # The result of the evaluation is not checked. It may fail, because packed attention does not
    # support the custom model class.
    invoke(*words, "--allow-code")
    assert (tmp_path / "marker").exists()


def test_the_tokenizer_that_counts_worked_examples_asks_nobody(run, tmp_path):
    """Check that an evaluation with worked examples rejects custom tokenizer code.

    The tokenizer is loaded to count the tokens of the examples. Unless trust_remote_code is False,
    transformers prompts the user whether to execute the code.
    """
    plant_model_code(run / "model", tmp_path)
    auto_map = {"AutoTokenizer": [None, "planted.T"]}
    change_json(run / "model" / "tokenizer_config.json", tokenizer_class="T", auto_map=auto_map)
    (tmp_path / "train.jsonl").write_text('{"question": "2+2?", "answer": "#### 4"}\n' * 3)
    (tmp_path / "test.jsonl").write_text('{"question": "1+2?", "answer": "#### 3"}\n')
    change(run, data={"task": "gsm8k", "path": str(tmp_path), "shots_tokens": 40})
    result = invoke("eval", str(run), "n=1", typed="y\n" * 9)
    assert not (tmp_path / "marker").exists()
    assert result.exit_code == 2 and "custom code runs only with" in result.stderr
    assert "[y/N]" not in result.output


# --------------------------------------------------- Runs that are refused before a model is loaded
TEXTS = RECIPE.replace("tokenizer: symbols", "tokenizer: bpe, vocab_size: 300").replace(
    "sort_positions", "exact_match"
)


@pytest.fixture
def no_model(monkeypatch):
    """Make the test fail if the command loads a model."""
    for name in ("grpo_fast.train.loop.load_policy", "grpo_fast.train.policy.load_policy"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("a model was loaded"))


def texts_recipe(folder, lines, n_test=1):
    """Write a data set with the given lines, and a recipe that uses it. Return the recipe's path.

    `n_test` is the number of test questions.
    """
    path = write_lines(folder / "d.jsonl", *lines)
    data = f"data: {{task: jsonl, path: {path}, n_test: {n_test}}}"
    return write_recipe(folder, TEXTS.replace("data: {task: sort, digits: 3, n_test: 8}", data))


@pytest.mark.parametrize("which", [0, 1])
def test_a_prompt_that_is_too_long(tmp_path, monkeypatch, which):
    """Check that a prompt that is too long for the model is refused before anything is sampled.

    The long prompt is in the training split or in the test split.
    """
    lines = [{"prompt": "1 2 3", "answer": "1"} for _ in range(2)]
    lines[which]["prompt"] = "0123456789" * 12
    generate = "transformers.GenerationMixin.generate"
    monkeypatch.setattr(generate, lambda *_, **__: pytest.fail("asked the model"))
    result = invoke("train", texts_recipe(tmp_path, lines), "rollout.prompts_per_step=1")
    said = "expected at most 64 tokens (max_position_embeddings of the model), got 120 in '0123"
    assert refused(result, said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "out", [".", "no/e.json", "run", "run/config.yaml", "run/model/config.json"]
)
def test_where_eval_cannot_write(run, tmp_path, no_model, out):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = invoke("eval", str(run), "n=2", f"out={tmp_path / out}")
    assert refused(result, "out: expected a new file in a folder that exists")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_results_that_cannot_be_written_are_still_shown(run):
    result = invoke("eval", str(run), "n=2", "out=/dev/full")
    assert refused(result, "No space left", code=1) and "greedy (n=2 questions" in result.output


# ------------------------------------------------------------------------- Paths in the home folder
def test_everything_of_a_run_lies_in_one_folder(tmp_path, recipe, monkeypatch):
    """Check that all files of a run are in the home folder if the path begins with `~`."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    words = ("steps=0", "log.progress=false")
    assert invoke("train", recipe, "output_dir=~/a", *words).exit_code == 0
    found = {path.name for path in (home / "a").iterdir()}
    assert {"model", "metrics.jsonl", "summary.json", "config.yaml"} <= found
    assert invoke("eval", "~/a", "n=2", "out=~/e.json").exit_code == 0
    assert (home / "e.json").is_file()
    assert invoke("plot", "~/a", "--out=~/p.png").exit_code == 0 and (home / "p.png").is_file()
    assert not list(here.iterdir())
    # A path that begins with `./~` must not be expanded. It names the folder `~` in the current
    # directory.
    assert invoke("train", recipe, "output_dir=./~/a", *words).exit_code == 0
    assert {"model", "metrics.jsonl"} <= {p.name for p in (here / "~" / "a").iterdir()}
    # The saved configuration has the full path, so it names the same folder for every user.
    monkeypatch.setenv("HOME", "/elsewhere")
    assert load_recipe(str(home / "a" / "config.yaml")).output_dir == str(home / "a")
    other = ("model={path: ~/m}", "data={task: jsonl, path: ~/d.jsonl}")
    config = load_recipe(recipe, other)
    assert (config.model.path, config.data.path) == ("/elsewhere/m", "/elsewhere/d.jsonl")


# ------------------------------------------------------------------------------ Errors during a run
@pytest.mark.parametrize(
    "words", [(), ("model.dtype=float16", "optim.lr=1"), ("rollout.top_k=3", "minibatches=2")]
)
def test_a_policy_that_gives_nan(recipe, words):
    result = invoke("train", recipe, "optim.lr=1e30", "steps=8", "log.progress=false", *words)
    assert refused(
        result, "the policy's logits are NaN or infinite; this happened after ", "optim.lr", code=1
    )
