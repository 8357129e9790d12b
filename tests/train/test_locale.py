"""A machine whose locale knows ASCII only: files are UTF-8, what cannot be shown is shown as ?."""

from __future__ import annotations

import json

import pytest

from grpo_fast.train.config.recipes import load_recipe
from tests.command_line import RECIPE, in_a_process, write_recipe

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
    """Before any work, not when the first file is written."""
    (tmp_path / "r.yaml").write_text(RECIPE.replace("OUT", f"{tmp_path}/läufe"), encoding="utf-8")
    result = in_a_process("train", str(tmp_path / "r.yaml"), **ASCII)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(b"grpo-fast: output_dir: cannot use ")
