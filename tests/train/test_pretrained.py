"""Tests that damaged or unsuitable models are refused with the name of the file or weight."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_fast.data.tokenizer import build_bpe_tokenizer
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.policy import load_policy
from tests.command_line import invoke, refused, write_recipe
from tests.tiny import TEXTS, tiny_folder
from tests.train.test_hostile_input import change_json

LAYER = "model.layers.1."
CONFIG = "config.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("models") / "whole", "llama")


@pytest.fixture
def folder(whole, tmp_path):
    """Return a copy of the folder of a tiny model. A test may damage the copy."""
    return Path(shutil.copytree(whole, tmp_path / "m"))


def weights_of(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


FILE, UP = "model.safetensors", LAYER + "mlp.up_proj.weight"
LARGER = [chr(0x4E00 + i) * 3 for i in range(99)]
# Maps a kind of damage to a function that damages the folder of a model, and to parts of the
# expected error message.
DAMAGE = {
    "truncated": (lambda f: (f / FILE).write_bytes((f / FILE).read_bytes()[:-1000]),
                  "/m': SafetensorError", "not fully covered"),
    "garbage": (lambda f: (f / FILE).write_bytes(b"\xff" * 999), "/m': SafetensorError"),
    "gone": (lambda f: (f / FILE).unlink(), f"no file named {FILE}"),
    "another vocabulary": (lambda f: change_json(f / CONFIG, vocab_size=99),
                           "in place of (99, 32)"),
    CONFIG: (lambda f: (f / CONFIG).write_text("{"), CONFIG),
    "an adapter": (lambda f: (f / CONFIG).rename(f / "adapter_config.json"),
                   "a LoRA adapter in ", "merge_and_unload"),
    "a field of config.json": (lambda f: change_json(f / CONFIG, num_hidden_layers="x"),
                               "num_hidden_layers"),
    "tokenizer.json": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json"),
    "a larger tokenizer": (lambda f: build_bpe_tokenizer(LARGER, 500).save_pretrained(f),
                           "expected token ids below 295", "got 499"),
}  # fmt: skip
WEIGHTS = {
    "half of the layers": (lambda w: [w.pop(name) for name in [*w] if name.startswith(LAYER)],
                           "none or others for 9 of them", LAYER + "input_layernorm.w"),
    "no head": (lambda w: w.pop("lm_head.weight"), "for 1 of them: lm_head.weight"),
    "no weights": (dict.clear, "got none or others for 21 of them"),
    "another shape": (lambda w: w.update({UP: w[UP][:-1].clone()}),
                      UP + " is (63, 32) in place of (64, 32)"),
    "NaN": (lambda w: w["model.norm.weight"].fill_(float("nan")),
            "expected weights with finite logits, got NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*DAMAGE, *WEIGHTS])
def test_a_damaged_model_is_refused_in_one_line(folder, tmp_path, name, caplog):
    damage, *parts = (DAMAGE | WEIGHTS)[name]
    damage(folder) if name in DAMAGE else weights_of(folder, damage)
    recipe = write_recipe(tmp_path)
    result = invoke("train", recipe, f"model={{path: {folder}, tokenizer: null}}")
    assert refused(result, *parts) and len(result.stderr.splitlines()) == 1
    assert not caplog.records and not (tmp_path / "run").exists()
    data = tmp_path / "q.jsonl"
    data.write_text('{"question": "2+2?", "answer": "#### 4"}\n')
    assert refused(invoke("eval", str(folder), f"data={data}", "max_new_tokens=2"), *parts)


def test_weights_without_a_place_are_reported_in_one_line(folder, caplog):
    extra = {f"model.layers.{i}.extra": torch.ones(3) for i in range(5, 9)}
    weights_of(folder, lambda w: w.update(extra))
    load_policy(ModelConfig(path=str(folder)))
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    message = record.getMessage()
    said = "4 weights have no place in the model: model.layers.5.extra, model.layers.6.extra"
    assert said in message
    assert str(folder) in message and "\n" not in message


# The LM head of the tiny llama is a separate weight. The head of the tiny qwen2 is tied to the
# embedding.
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_whole_model_says_nothing(tmp_path, family, caplog, capfd):
    folder = tiny_folder(tmp_path / "m", family)
    assert ("lm_head.weight" in load_file(f"{folder}/model.safetensors")) == (family == "llama")
    capfd.readouterr()
    load_policy(ModelConfig(path=folder))
    assert not caplog.records and "REPORT" not in "".join(capfd.readouterr())


def test_a_special_token_beyond_the_embedding(folder):
    """Check a tokenizer with a special token whose id is outside of the model's embedding.

    Gemma 3 has such a tokenizer. Only prompts that contain the token must be refused.
    """
    from grpo_fast.rollout import Sampling, generate

    tokenizer = build_bpe_tokenizer(TEXTS, 300)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(folder)
    policy = load_policy(ModelConfig(path=str(folder)))
    options = Sampling(max_new_tokens=2)
    assert len(generate(policy, ["What is 1?"], options, group_size=1, seed=0).texts) == 1
    with pytest.raises(ValueError, match="token ids below 295, .* got 295 in 'What is <image>"):
        generate(policy, ["What is <image>?"], options, group_size=1, seed=0)
