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
    code = (
        "import grpo_fast.cli\n"
        "from grpo_fast.__main__ import main\n"
        "grpo_fast.cli.app = lambda: print('0.1 \\u2192 0.9')\n"
        "main()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii:strict"}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, env=env, timeout=120, check=True)
    assert done.stdout == b"0.1 ? 0.9\n"


def test_reward_failures_end_the_run_with_code_1(recipe, tmp_path, monkeypatch):
    (tmp_path / "bad_reward.py").write_text("def bad(**columns):\n    raise RuntimeError('boom')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("steps=5", "rewards.0.name=bad_reward:bad", "log.progress=false")
    result = invoke("train", recipe, *words)
    assert result.exit_code == 1 and "reward bad:" in result.stderr and "boom" in result.stderr
