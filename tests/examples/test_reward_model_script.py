"""Tests that `examples.reward_model` trains a model that the reward `reward_model` can use."""

from __future__ import annotations

import json

import pytest
import typer

from grpo_fast.examples import reward_model
from grpo_fast.rewards.reward_model import RewardModel
from tests.tiny import tiny_folder


def test_the_script_trains_a_model_that_is_a_reward(tmp_path, capsys):
    pairs = reward_model.sort_pairs(400, seed=2)
    for pair in pairs:
        gold = sorted(pair["prompt"].split()[:-1])
        right = [sum(a == b for a, b in zip(pair[name].split(), gold, strict=False))
                 for name in ("chosen", "rejected")]  # fmt: skip
        assert right[0] > right[1]
    share = reward_model.train(tmp_path / "sort", None, None, steps=60, lr=1e-3)
    held_out = reward_model.sort_pairs(1024, seed=1)
    score = RewardModel(str(tmp_path / "sort" / "model"))
    prompts = [pair["prompt"] for pair in held_out]
    chosen, rejected = (score(prompts=prompts, completions=[pair[name] for pair in held_out])
                        for name in ("chosen", "rejected"))  # fmt: skip
    ours = sum(c > r for c, r in zip(chosen, rejected, strict=True)) / 1024
    assert share == pytest.approx(ours, abs=2 / 1024) and share > 0.7
    # Check the script with a file of pairs and with a causal LM as the initial model.
    lines = [{"prompt": f"What is {i}?", "chosen": f" {i}", "rejected": " apples", "margin": 0.5}
             for i in range(40)]  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    given = str(tmp_path / "pairs.jsonl"), tiny_folder(tmp_path / "start")
    reward_model.main(*given, tmp_path / "own", steps=30)
    assert "100.0% of the held-out pairs in the right order" in capsys.readouterr().out
    score = RewardModel(str(tmp_path / "own" / "model"))
    right, wrong = score(prompts=["What is 3?"] * 2, completions=[" 3", " apples"])
    assert right > wrong
    with pytest.raises(typer.BadParameter, match="expected both or neither"):
        reward_model.main(pairs="x")
