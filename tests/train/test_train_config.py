"""The configuration: overrides, bounds, round trip, exclusions (test_words: how words are read)."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from grpo_fast import LossConfig
from grpo_fast.train.config import LossSettings, RunConfig
from grpo_fast.train.config.recipes import load_recipe, recipe_names, save_config
from grpo_fast.train.config.words import validated

MINIMAL = {
    "model": {"config": {"model_type": "llama"}, "tokenizer": "symbols"},
    "data": {"task": "sort"},
    "rewards": [{"name": "sort_positions"}],
}


def test_every_shipped_recipe_is_valid():
    assert set(recipe_names()) == {
        "sort", "variance", "ppo-gsm8k", "ppo-sort", "distill-sort", "lecture", "lecture-naive",
        "notebook", "gsm8k-tiny", "gsm8k-smollm2-1.7b", "gsm8k-qwen2.5-0.5b", "gsm8k-longcontext",
    }  # fmt: skip
    for name in recipe_names():
        config = load_recipe(name)
        assert config.output_dir == f"runs/{name}"
        assert isinstance(config.loss_config(), LossConfig)


def test_overrides_are_yaml_and_dotted():
    config = load_recipe(
        "sort",
        [
            "optim.lr=1e-4", "rewards.1.weight=0.5", "model.lora.r=4", "warm_start.steps=7",
            "advantages=normalized", "advantage_options={eps: 1.0e-6}", "loss.epsilon_high=0.3",
            "data.n_test=32",
        ],
    )  # fmt: skip
    assert config.optim.lr == 1e-4 and config.rewards[1].weight == 0.5 and config.model.lora.r == 4
    assert config.warm_start.steps == 7 and config.advantage_options == {"eps": 1e-6}
    assert config.loss_config().epsilon_high == 0.3 and config.data.n_test == 32


def test_recipes_by_path_and_unknown_names(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    assert load_recipe(str(path)).data.task == "sort"
    path.write_text("- just\n- a list\n")
    with pytest.raises(ValueError, match="expected a mapping"):
        load_recipe(str(path))


NO_CORRECTION = "loss.sampling_correction=null"
CORRECTED = "rollout.correct_sampling=true"
SAVED = [
    [], ["model.lora.r=8", "seed=3", "optim.max_grad_norm=.inf"], ["rollout.temperature=0.7"],
    ["rollout.temperature=0.7", "loss.temperature=1.0"], [NO_CORRECTION],
    [CORRECTED, "loss.sampling_correction=sequence_mask"],
    [CORRECTED, NO_CORRECTION, "loss.off_policy_threshold=0.1"],
    [CORRECTED, "loss.corrections=[{kind: mask, low: 0.5, high: 5}]"],
]  # fmt: skip


@pytest.mark.parametrize("words", SAVED, ids=str)
def test_a_saved_configuration_reads_back_equal(tmp_path, words):
    """It holds every default."""
    config = load_recipe("sort", words)
    save_config(config, tmp_path / "config.yaml")
    again = load_recipe(str(tmp_path / "config.yaml"))
    assert again == config and again.loss_config() == config.loss_config()
    assert again.loss_config().temperature == (0.7 if words == ["rollout.temperature=0.7"] else 1.0)
    with pytest.raises(ValueError, match="loss.corrections: expected none beside an older name"):
        load_recipe(str(tmp_path / "config.yaml"), ["loss.sampling_correction=token_mask"])


def test_the_home_folder_is_written_out_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["output_dir=~/runs/a", "model={path: ~/m}", "data={task: jsonl, path: ~/d.jsonl}"]
    config = load_recipe("sort", words)
    save_config(config, tmp_path / "config.yaml")
    monkeypatch.setenv("HOME", "/elsewhere")
    for read in (config, load_recipe(str(tmp_path / "config.yaml"))):
        paths = (read.output_dir, read.model.path, read.data.path)
        assert paths == tuple(str(tmp_path / name) for name in ("runs/a", "m", "d.jsonl"))
    config.output_dir = "~/b"
    assert config.output_dir == "/elsewhere/b"
    assert load_recipe("sort", ["output_dir=./~/x"]).output_dir == "./~/x"


def test_loss_settings_are_the_losses_own():
    fields = {f.name for f in dataclasses.fields(LossConfig)}
    assert set(LossSettings.model_fields) == fields - {"group_size"}  # the rollout's
    settings = dict(LossSettings())
    assert settings.pop("temperature") is None  # the rollout's
    settings["corrections"] = [dict(x) for x in settings["corrections"]]
    assert LossConfig(**settings) == LossConfig()
    config = validated(RunConfig, {**MINIMAL, "rollout": {"temperature": 0.9, "max_new_tokens": 7}})
    loss = config.loss_config()
    assert loss.temperature == 0.9 and loss.max_completion_length == 7
    warmer = validated(RunConfig, {**MINIMAL, "loss": {"temperature": 1.2}})
    assert warmer.loss_config().temperature == 1.2


@pytest.mark.parametrize(
    "words, tokens",
    [
        ([], 4),
        (["data.digits=6"], 6),
        (["data.digits=6", "rollout.max_new_tokens=9"], 9),
        (["data={task: arithmetic, digits: 3}"], 5),  # 999 + 999, and the EOS
        (["model.tokenizer=bpe"], 256),  # nobody knows how many tokens a symbol has
    ],
)
def test_there_is_room_for_a_generated_answer(words, tokens, tmp_path):
    config = load_recipe("sort", words)
    assert config.rollout.max_new_tokens == tokens
    save_config(config, tmp_path / "config.yaml")
    assert load_recipe(str(tmp_path / "config.yaml")) == config
