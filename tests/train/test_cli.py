"""Tests of the command line: help without heavy imports, each command once, ASCII locales."""

import json
import os
import subprocess
import sys

import pytest

from grpo_fast.train.config.recipes import load_recipe
from tests.command_line import RECIPE, ROOT, invoke, write_recipe


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


# Runs several commands in one process, because the imports take longer than the commands.
COMMANDS = """
import json, sys
from grpo_fast.__main__ import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        print("status", end.code, file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_commands_in_an_ascii_locale(tmp_path):
    """Check a run and its evaluation, and a folder that the locale cannot name."""
    lines = [{"question": f"Wie groß ist {i}? 🙂", "answer": "ä" * (1 + i % 2)} for i in range(8)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "d.jsonl").write_text(text, encoding="utf-8")
    text = OTHER.replace("DATA", str(tmp_path / "d.jsonl"))
    recipe = write_recipe(tmp_path, text.replace("sort_positions", "exact_match"))
    run, out = tmp_path / "run", tmp_path / "e.json"
    (tmp_path / "r.yaml").write_text(RECIPE.replace("OUT", f"{tmp_path}/läufe"), encoding="utf-8")
    commands = [
        ["train", recipe, "steps=1", "model.config.max_position_embeddings=256",
         "log.completions_every=1"],
        ["eval", str(run), "n=2", "samples=2", "max_new_tokens=2", f"out={out}"],
        ["train", str(tmp_path / "r.yaml")],
    ]  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)], capture_output=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **ASCII},
    )  # fmt: skip
    ends = [line for line in result.stderr.splitlines() if line.startswith(b"status ")]
    assert ends == [b"status 0", b"status 0", b"status 2"], result.stderr
    assert b"Traceback" not in result.stderr
    assert b"grpo-fast: output_dir: cannot use " in result.stderr
    for said in (b"reward 0.000", b"?", b"greedy (n=1 questions"):
        assert said in result.stdout, result.stdout
    config = load_recipe(str(run / "config.yaml"))
    assert config.data.prompt_template == "Frage → {question} ä漢🙂"
    assert "Wie groß ist" in (run / "completions.html").read_text(encoding="utf-8")
    json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert json.loads(out.read_text(encoding="utf-8"))["greedy"]["eval_n"] == 1
