"""The command line: quick help, one-sentence refusals, each command once on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.command_line import ROOT, invoke, refused, write_recipe
from tests.tiny import tiny_folder


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path)


def test_help_and_version_load_nothing_heavy():
    """The command line itself imports neither torch nor pydantic, which the trainer needs."""
    code = (
        "import sys, types\n"
        "package = sys.modules['grpo_fast'] = types.ModuleType('grpo_fast')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "from grpo_fast.cli import app\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'datasets', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), sys.modules\n"
    )
    words = [sys.executable, "-c", code, str(ROOT / "grpo_fast")]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    shown = invoke("--help").output
    assert all(word in shown for word in ("train", "eval", "plot", "--version"))
    version = invoke("--version")
    assert version.exit_code == 0 and version.output.startswith("grpo-fast ")


def test_train_then_eval_then_plot(recipe, tmp_path):
    result = invoke("train", recipe, "steps=1", "log.progress=false")
    assert result.exit_code == 0, result.output
    run, names = tmp_path / "run", {"config.yaml", "metrics.jsonl", "summary.json", "curves.png"}
    assert names | {"model"} <= {p.name for p in run.iterdir()}
    assert "reward" in result.output and "→" in result.output

    result = invoke("eval", str(run), "n=4", "samples=4", f"out={tmp_path / 'e.json'}")
    assert result.exit_code == 0, result.output
    assert all(said in result.output for said in ("greedy (n=4 questions", "pass@4", "±"))
    metrics = json.loads((tmp_path / "e.json").read_text())
    assert set(metrics) == {"greedy", "sampled"} and metrics["sampled"]["eval_samples"] == 4
    names = {"eval_pass@1", "eval_pass@2", "eval_pass@4", "eval_maj@4", "eval_reward_se"}
    assert names <= metrics["sampled"].keys()

    result = invoke("plot", str(run), str(run / "metrics.jsonl"), "-o", str(tmp_path / "both.png"))
    assert result.exit_code == 0 and (tmp_path / "both.png").is_file()

    assert refused(invoke("train", recipe), "occupied", "--name")
    again = invoke("train", recipe, "steps=0", "log.progress=false", "--name", "second")
    assert again.exit_code == 0 and (run / "second" / "summary.json").is_file()


def test_eval_of_a_model_on_a_local_file(tmp_path):
    model = tiny_folder(tmp_path / "m")
    data = tmp_path / "q.jsonl"
    data.write_text('{"question": "2+2?", "answer": "#### 4"}\n' * 3)
    words = ("eval", str(model), f"data={data}", "max_new_tokens=4", "prompt_template=plain")
    result = invoke(*words)
    assert result.exit_code == 0 and "greedy (n=3 questions" in result.output
    assert "accuracy_strict" in result.output and "rewards/gsm8k_format" in result.output
    assert "sampled" in invoke(*words, "samples=2", "k=2").output
    data.write_text('{"question": "2+2?"}\n')
    assert refused(invoke(*words), f"{data}:1: ", "'answer'")
    assert refused(invoke("eval", str(model)), "data: expected data=")


def test_reward_failures_end_the_run_with_code_1(recipe, tmp_path, monkeypatch):
    (tmp_path / "bad_reward.py").write_text("def bad(**columns):\n    raise RuntimeError('boom')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("steps=5", "rewards.0.name=bad_reward:bad", "log.progress=false")
    result = invoke("train", recipe, *words)
    assert result.exit_code == 1 and "reward bad:" in result.stderr and "boom" in result.stderr
