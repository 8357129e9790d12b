"""Helpers for tests of the command line, which write a tiny recipe and run commands."""

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from grpo_fast.cli import app

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """
output_dir: OUT
steps: 2
model: {tokenizer: symbols, config: {model_type: llama, hidden_size: 16, intermediate_size: 32,
  num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2,
  max_position_embeddings: 64
  }}
data: {task: sort, digits: 3, n_test: 8}
rewards: [{name: sort_positions}]
rollout: {group_size: 2, prompts_per_step: 2, max_new_tokens: 4}
"""


def write_recipe(folder: Path, text: str = RECIPE) -> str:
    """Write a recipe whose `output_dir` is `folder`/run. Return the path of the recipe."""
    path = folder / "tiny.yaml"
    path.write_text(text.replace("OUT", str(folder / "run")), encoding="utf-8")
    return str(path)


def invoke(*words: str, typed: str | None = None) -> Any:
    return CliRunner().invoke(app, list(words), input=typed, catch_exceptions=False)


def refused(result: Any, *parts: str, code: int = 2) -> bool:
    """Check that a command failed with one error message that contains all of `parts`.

    The output must not contain a traceback. Return True, so that a test can `assert` the call.
    """
    assert result.exit_code == code, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("grpo-fast: ")]
    assert len(lines) == 1 and "Traceback" not in result.output, result.stderr
    assert all(part in result.stderr for part in parts), result.stderr
    return True
