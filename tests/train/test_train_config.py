"""Tests of the configuration: overrides, defaults, saving and loading, and strict YAML."""

import pytest
import yaml

from grpo_fast import LossConfig
from grpo_fast.train.config import LossSettings, RunConfig, load_recipe, recipe_names
from grpo_fast.train.config.words import read_yaml, save_config, validated
from tests.command_line import invoke, refused

MINIMAL = {
    "model": {"config": {"model_type": "llama"}, "tokenizer": "symbols"},
    "data": {"task": "sort"},
    "rewards": [{"name": "sort_positions"}],
}


def test_every_shipped_recipe_is_valid(tmp_path):
    assert set(recipe_names()) == {
        "sort", "baselines", "ppo-gsm8k", "ppo-sort", "notebook",
        "gsm8k-tiny", "gsm8k-smollm2-1.7b", "gsm8k-qwen2.5-0.5b", "gsm8k-longcontext",
        "capitals", "gsm8k-smollm2-135m", "own-data",
    }  # fmt: skip
    for name in recipe_names():
        config = load_recipe(name)
        assert config.output_dir == f"runs/{name}"
        assert isinstance(config.loss_config(), LossConfig)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    assert load_recipe(str(path)).data.task == "sort"
    path.write_text("- just\n- a list\n")
    with pytest.raises(ValueError, match="expected a mapping"):
        load_recipe(str(path))


CORRECTED = "rollout.correct_sampling=true"
SAVED = [
    [], ["model.lora.r=8", "seed=3", "optim.max_grad_norm=.inf"], ["rollout.temperature=0.7"],
    ["rollout.temperature=0.7", "loss.temperature=1.0"], ["loss.corrections=[]"],
    [CORRECTED, "loss.corrections=[{kind: mask, low: 0.5, high: 5}]"],
    ["loss.delta=3", "loss.loss_type=grpo", "loss.kl_clamp=1"],
]  # fmt: skip


@pytest.mark.parametrize("words", SAVED, ids=str)
def test_a_saved_configuration_reads_back_equal(tmp_path, words):
    """Check that a configuration is the same after saving and loading.

    The saved file contains all settings, including the defaults.
    """
    config = load_recipe("sort", words)
    save_config(config, tmp_path / "config.yaml")
    again = load_recipe(str(tmp_path / "config.yaml"))
    assert again == config and again.loss_config() == config.loss_config()
    assert again.loss_config().temperature == (0.7 if words == ["rollout.temperature=0.7"] else 1.0)


def test_loss_settings_are_the_arguments_of_the_loss():
    given = {name: value for name, value in LossSettings() if value is not None}
    assert LossConfig(**given) == LossConfig()
    config = validated(RunConfig, {**MINIMAL, "rollout": {"temperature": 0.9, "max_new_tokens": 7}})
    loss = config.loss_config()
    assert loss.temperature == 0.9 and loss.max_completion_length == 7
    warmer = validated(RunConfig, {**MINIMAL, "loss": {"temperature": 1.2, "delta": None}})
    assert warmer.loss_config().temperature == 1.2 and warmer.loss_config().delta is None
    unset = {"temperature": None, "top_entropy_quantile": None}  # null means the default
    config = validated(RunConfig, {**MINIMAL, "rollout": {"temperature": 0.9}, "loss": unset})
    loss = config.loss_config()
    assert (loss.temperature, loss.top_entropy_quantile) == (0.9, LossConfig.top_entropy_quantile)


@pytest.mark.parametrize(
    "words, tokens",
    [
        ([], 4),
        (["data.digits=6", "rollout.max_new_tokens=9"], 9),
        (["model.tokenizer=bpe"], 256),  # a symbol may have several bpe tokens
    ],
)
def test_there_is_room_for_a_generated_answer(words, tokens, tmp_path):
    config = load_recipe("sort", words)
    assert config.rollout.max_new_tokens == tokens
    save_config(config, tmp_path / "config.yaml")
    assert load_recipe(str(tmp_path / "config.yaml")) == config


# --------------------------------------------------------------------------------------------- YAML
# This YAML text has 400 bytes, but would expand to a billion values and fill the memory. It has
# nine levels of lists, and each list consists of ten aliases of the previous list.
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


def test_plain_data():
    text = "a: {x: 1, y: [1.5, true, null]}\nc: {<<: {x: 1, y: 3}, x: 2}\n? 3\n: 2020-01-31\n"
    data = read_yaml(text, "t")
    assert data["a"] == {"x": 1, "y": [1.5, True, None]}
    assert data["c"] == {"x": 2, "y": 3} and str(data[3]) == "2020-01-31"
    assert read_yaml("", "t") is None and read_yaml("\ufeffa: ü→🙂", "t") == {"a": "ü→🙂"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3", "the key 'a' appears twice in"),
        (BOMB, "aliases (*name) are not supported"),
        (f"? {BOMB.replace(chr(10), ' ')}\n: 1", ""),
        ("2020-13-45", "month must be in 1..12"),
        ("1" * 5000, "4300 digits"),
        ("[" * 3000, "recursion"),
        ("!!python/object/apply:os.getpid []", "python/object"),
        ("a: 1\n---\nb: 2", "single document"),
    ],
)
def test_what_is_refused(text, reason):
    with pytest.raises(ValueError, match="^the name: expected plain YAML, got ") as error:
        read_yaml(text, "the name")
    assert reason in str(error.value) and len(str(error.value)) < 600


def test_a_recipe_that_is_no_text(tmp_path):
    (tmp_path / "r.yaml").write_bytes("ä: 1".encode("latin-1"))
    assert refused(
        invoke("train", str(tmp_path / "r.yaml")), "r.yaml", "'utf-8' codec can't decode"
    )


def test_a_recipe_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="^recipe r: expected plain YAML, got .*Is a directory"):
        read_yaml(tmp_path, "recipe r")
    assert refused(invoke("train", str(tmp_path)), "recipe: no such file")
