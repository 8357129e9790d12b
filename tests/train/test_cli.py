"""Tests of the command line: help without heavy imports, each command once, ASCII locales."""

import json
import os
import subprocess
import sys

import pytest

from grpo_fast.train.config.recipes import load_recipe
from tests.command_line import RECIPE, ROOT, in_a_process, invoke, refused, write_recipe


def test_help_and_version_load_nothing_heavy():
    """Check that `--help` and `--version` do not import torch or other slow packages."""
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
    names = {"eval_pass@1", "eval_pass@2", "eval_pass@4", "eval_reward_se"}
    assert names <= metrics["sampled"].keys()

    result = invoke("plot", str(run), str(run / "metrics.jsonl"), "-o", str(tmp_path / "both.png"))
    assert result.exit_code == 0 and (tmp_path / "both.png").is_file()

    assert refused(invoke("train", recipe), "occupied", "output_dir=…")


def test_reward_failures_end_the_run_with_code_1(recipe, tmp_path, monkeypatch):
    (tmp_path / "bad_reward.py").write_text("def bad(**columns):\n    raise RuntimeError('boom')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("steps=5", "rewards.0.name=bad_reward:bad", "log.progress=false")
    result = invoke("train", recipe, *words)
    assert result.exit_code == 1 and "reward bad:" in result.stderr and "boom" in result.stderr


# ------------- ASCII locales: files are UTF-8, and printed text shows ? for non-ASCII characters
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0",
         "PYTHONIOENCODING": "ascii:strict"}  # fmt: skip
OTHER = RECIPE.replace("tokenizer: symbols", "tokenizer: bpe, vocab_size: 300").replace(
    "data: {task: sort, digits: 3, n_test: 8}",
    "data: {task: jsonl, path: DATA, prompt_template: 'Frage → {question} ä漢🙂'}",
)


def succeeded(result, *parts):
    assert result.returncode == 0, result.stderr
    assert all(part in result.stdout for part in parts), result.stdout
    assert b"Traceback" not in result.stderr
    return True


@pytest.mark.slow
def test_a_run_from_the_recipe_to_its_evaluation(tmp_path):
    lines = [{"question": f"Wie groß ist {i}? 🙂", "answer": "ä" * (1 + i % 2)} for i in range(8)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "d.jsonl").write_text(text, encoding="utf-8")
    text = OTHER.replace("DATA", str(tmp_path / "d.jsonl"))
    recipe = write_recipe(tmp_path, text.replace("sort_positions", "exact_match"))
    words = ("steps=1", "model.config.max_position_embeddings=256", "log.completions_every=1")
    assert succeeded(in_a_process("train", recipe, *words, **ASCII), b"reward 0.000", b"?")
    run = tmp_path / "run"
    config = load_recipe(str(run / "config.yaml"))
    assert config.data.prompt_template == "Frage → {question} ä漢🙂"
    assert "Wie groß ist" in (run / "completions.html").read_text(encoding="utf-8")
    json.loads((run / "summary.json").read_text(encoding="utf-8"))

    out = tmp_path / "e.json"
    words = ("eval", str(run), "n=2", "samples=2", "max_new_tokens=2", f"out={out}")
    assert succeeded(in_a_process(*words, **ASCII), b"greedy (n=1 questions")
    assert json.loads(out.read_text(encoding="utf-8"))["greedy"]["eval_n"] == 1


def test_a_folder_that_this_locale_cannot_name(tmp_path):
    """Check that a process with an ASCII locale refuses an output folder with a non-ASCII name."""
    (tmp_path / "r.yaml").write_text(RECIPE.replace("OUT", f"{tmp_path}/läufe"), encoding="utf-8")
    result = in_a_process("train", str(tmp_path / "r.yaml"), **ASCII)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(b"grpo-fast: output_dir: cannot use ")
