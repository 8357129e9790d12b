"""A run's folder is data: reading one runs no code that it names, unless the user allows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from grpo_fast.cli import app
from tests.command_line import invoke, refused

REWARD = "def score(prompts, completions, answers):\n    return [1.0] * len(prompts)\n"


def mark(folder: Path) -> str:
    """Code that leaves a file behind when it is run."""
    return f"import pathlib\npathlib.Path({str(folder / 'marker')!r}).touch()\n"


def change(run: Path, **sections) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    (run / "config.yaml").write_text(yaml.safe_dump(config | sections), encoding="utf-8")


def test_eval_imports_a_runs_rewards_only_when_allowed(run, tmp_path, monkeypatch):
    (tmp_path / "planted_reward.py").write_text(mark(tmp_path) + REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    change(run, rewards=[{"name": "sort_positions"}, {"name": "planted_reward:score"}])
    marker, words = tmp_path / "marker", ("eval", str(run), "n=2")
    said = "'planted_reward:score'", str(run / "config.yaml"), "--allow-code"
    assert refused(invoke(*words), *said)
    assert not marker.exists() and "planted_reward" not in sys.modules
    allowed = invoke(*words, "--allow-code")
    assert allowed.exit_code == 0 and "rewards/score" in allowed.output and marker.exists()


def test_a_function_that_runs_the_folders_code(run, tmp_path):
    """torch.hub.load imports the folder's hubconf.py when it is called."""
    (run / "hubconf.py").write_text(mark(tmp_path) + "def reward(**options):\n    return None\n")
    options = {"repo_or_dir": str(run), "model": "reward", "source": "local"}
    change(run, rewards=[{"name": "torch.hub:load", "options": options}])
    assert refused(invoke("eval", str(run), "n=2"), "torch.hub:load", "--allow-code")
    assert not (tmp_path / "marker").exists()


def test_plot_and_plan_of_a_run_import_nothing(run, tmp_path, monkeypatch):
    (tmp_path / "planted_plot.py").write_text(mark(tmp_path) + REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    change(run, rewards=[{"name": "planted_plot:score"}])
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    assert invoke("plot", str(run), "-o", str(tmp_path / "p.png")).exit_code == 0
    assert invoke("plan", str(run / "config.yaml"), "gpu=80").exit_code == 0
    assert not (tmp_path / "marker").exists()


def test_a_recipe_that_the_user_names_may_import(run, tmp_path, monkeypatch):
    (tmp_path / "own_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    change(run, rewards=[{"name": "own_reward:score"}])
    words = (f"output_dir={tmp_path / 'again'}", "log.progress=false")
    result = invoke("train", str(run / "config.yaml"), *words)
    assert result.exit_code == 0, result.output


def plant_model_code(model: Path, marker: Path) -> None:
    """Let config.json name a class in a file beside it, as models with code of their own do."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "planted"
    config["auto_map"] = {"AutoConfig": "planted.C", "AutoModelForCausalLM": "planted.M"}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (model / "planted.py").write_text(
        mark(marker) + "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class C(LlamaConfig):\n    model_type = 'planted'\n"
        "class M(LlamaForCausalLM):\n    config_class = C\n"
    )


@pytest.mark.parametrize("is_run", [True, False])
def test_eval_trusts_a_models_code_only_when_allowed(run, tmp_path, is_run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["model"]
    change(run, model={**settings, "trust_remote_code": True})
    plant_model_code(run / "model", tmp_path)
    asked = [str(run)] if is_run else [str(run / "model"), "task=sort"]
    words = ("eval", *asked, "n=2")
    assert refused(invoke(*words), "custom code")
    assert not (tmp_path / "marker").exists()
    # This class is not known to packed attention; that it was imported is the point.
    invoke(*words, "--allow-code")
    assert (tmp_path / "marker").exists()


def test_allowed_code_of_a_run_that_asked_for_none_stays_out(run, tmp_path):
    """--allow-code grants what the run's configuration asks for, no more."""
    plant_model_code(run / "model", tmp_path)
    assert refused(invoke("eval", str(run), "n=2", "--allow-code"), "custom code")
    assert not (tmp_path / "marker").exists()


def test_allow_code_changes_nothing_else(run, tmp_path, monkeypatch):
    path = list(sys.path)
    plain, allowed = (invoke("eval", str(run), "n=4", *word) for word in ((), ("--allow-code",)))
    assert plain.exit_code == allowed.exit_code == 0 and plain.output == allowed.output
    assert sys.path == path


def test_the_tokenizer_that_counts_worked_examples_asks_nobody(run, tmp_path):
    """transformers offers at the terminal to run a folder's code, unless it is told not to."""
    plant_model_code(run / "model", tmp_path)
    file = run / "model" / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": [None, "planted.T"]}}
    file.write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "train.jsonl").write_text('{"question": "2+2?", "answer": "#### 4"}\n' * 3)
    (tmp_path / "test.jsonl").write_text('{"question": "1+2?", "answer": "#### 3"}\n')
    change(run, data={"task": "gsm8k", "path": str(tmp_path), "shots_tokens": 40})
    result = CliRunner().invoke(app, ["eval", str(run), "n=1"], input="y\n" * 9)
    assert not (tmp_path / "marker").exists()
    assert result.exit_code == 2 and "custom code runs only with" in result.stderr
    assert "[y/N]" not in result.output
