"""Tests of the command line: imports of --help, ASCII terminals, a failed run's status."""

import os
import subprocess
import sys

from tests.command_line import ROOT, invoke


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


def test_an_ascii_terminal_shows_question_marks():
    ascii_only = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii:strict"}
    words = [sys.executable, "-m", "grpo_fast", "config", "loss"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **ascii_only}
    done = subprocess.run(words, capture_output=True, env=env, timeout=120, check=True)
    assert b"?" in done.stdout and done.stdout.isascii()


def test_reward_failures_end_the_run_with_code_1(recipe, tmp_path, monkeypatch):
    (tmp_path / "bad_reward.py").write_text("def bad(**columns):\n    raise RuntimeError('boom')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("steps=5", "rewards.0.name=bad_reward:bad", "log.progress=false")
    result = invoke("train", recipe, *words)
    assert result.exit_code == 1 and "reward bad:" in result.stderr and "boom" in result.stderr
