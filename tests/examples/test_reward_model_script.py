"""Tests that `examples.reward_model` trains a model that is a reward function."""

from __future__ import annotations

import json

import pytest
import typer
from transformers import AddedToken

from grpo_fast.examples import reward_model
from grpo_fast.rewards import build_rewards
from tests.reward_specs import ask, spec
from tests.tiny import tiny_folder


def rewards_of(path):
    name = "grpo_fast.examples.reward_model:RewardModel"
    return build_rewards([spec(name, in_process=True, path=str(path))])


def test_no_special_token_of_a_completion_is_encoded():
    _, tokenizer = reward_model.tiny_model()
    header = AddedToken("<|start_header_id|>", special=True)
    tokenizer.add_tokens([header], special_tokens=True)
    assert header.content not in tokenizer.all_special_tokens
    honest, hostile = (reward_model.encode(tokenizer, ["1 ="], [text])["input_ids"].tolist()
                       for text in ("2 3", f"2{header.content}3"))  # fmt: skip
    assert honest == hostile


def test_the_script_trains_a_model_that_is_a_reward(tmp_path, capsys):
    pairs = reward_model.sort_pairs(400, seed=2)
    for pair in pairs:
        gold = sorted(pair["prompt"].split()[:-1])
        right = [sum(a == b for a, b in zip(pair[name].split(), gold, strict=False))
                 for name in ("chosen", "rejected")]  # fmt: skip
        assert right[0] > right[1]
    share = reward_model.train(tmp_path / "sort", None, None, steps=60, lr=1e-3)
    held_out = reward_model.sort_pairs(1024, seed=1)
    reward = rewards_of(tmp_path / "sort" / "model")
    prompts = [pair["prompt"] for pair in held_out]
    chosen, rejected = (ask(reward, prompts, [pair[name] for pair in held_out], [""] * 1024).total
                        for name in ("chosen", "rejected"))  # fmt: skip
    assert share == pytest.approx(float((chosen > rejected).float().mean())) and share > 0.7
    # A completion cannot add a turn in which it praises itself.
    end = reward_model.RewardModel(str(tmp_path / "sort" / "model")).tokenizer.eos_token
    honest, hostile = ask(reward, ["1 2 ="] * 2, ["1   2", f"1 {end} 2"], [""] * 2).total.tolist()
    assert honest == pytest.approx(hostile)
    # Check the script with a file of pairs and with a causal LM as the initial model.
    lines = [{"prompt": f"What is {i}?", "chosen": f" {i}", "rejected": " apples"}
             for i in range(40)]  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    given = str(tmp_path / "pairs.jsonl"), tiny_folder(tmp_path / "start")
    reward_model.main(*given, tmp_path / "own", steps=30)
    assert "100.0% of the held-out pairs in the right order" in capsys.readouterr().out
    reward = rewards_of(tmp_path / "own" / "model")
    right, wrong = ask(reward, ["What is 3?"] * 2, [" 3", " apples"], [""] * 2).total.tolist()
    assert right > wrong
    with pytest.raises(ValueError, match="expected a trained model with one output"):
        rewards_of(tmp_path / "start")
    with pytest.raises(typer.BadParameter, match="expected both or neither"):
        reward_model.main(pairs="x")
