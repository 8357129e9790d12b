"""Tests of hostile folders, files and settings. Every command must end with a one-line error."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from grpo_fast.train import policy
from grpo_fast.train.config import load_recipe
from grpo_fast.train.policy import MOST_LAYERS
from tests.command_line import invoke, refused, write_recipe

ESCAPE = "\x1b"
CONFIG = "model.config={model_type: gpt2, n_positions: 16, n_embd: 32, n_layer: 1, n_head: 2}"


def change_json(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields))


# -------------------------------------------------------------------------------- Unexpected errors
EVAL = "grpo_fast.train.evaluate.run_eval"


def test_what_nobody_expected_is_a_sentence_with_its_type(run, monkeypatch):
    monkeypatch.setattr(EVAL, Mock(side_effect=KeyError(f"{ESCAPE}[31mboo")))
    result = invoke("eval", str(run))
    assert refused(result, "grpo-fast: unexpected KeyError: '\\x1b[31mboo'", code=1)
    shown = invoke("eval", str(run), "--debug")
    assert shown.exit_code == 1 and "Traceback" in shown.stderr and ESCAPE not in shown.stderr
    # ModuleNotFoundError must not be converted to a message here. `__main__` catches this error and
    # prints which extra of the package the user should install.
    error = ModuleNotFoundError("No module named 'peft'", name="peft")
    monkeypatch.setattr(EVAL, Mock(side_effect=error))
    with pytest.raises(ModuleNotFoundError):
        invoke("eval", str(run))


# ---------------------------------------------------------------------- Tokenizer and chat template
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('" + ESCAPE + "[31mboo') }}", "\\x1b[31mboo"),
        ("{% if %}", "TemplateSyntaxError: "),
        ("{{ nope.x.y }}", "UndefinedError: "),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError: "),
    ],
)
def test_a_models_chat_template_that_fails(run, tmp_path, template, said):
    (run / "model" / "chat_template.jinja").write_text(template)
    (tmp_path / "d.jsonl").write_text('{"prompt": "1 2", "answer": "1"}\n')
    words = (f"data={tmp_path / 'd.jsonl'}", "task=jsonl", "chat=true")
    result = invoke("eval", str(run), *words)
    assert refused(
        result, "prompts: expected a prompt that the tokenizer and its chat template accept", said
    )
    assert ESCAPE not in result.stderr


def test_a_text_that_the_tokenizer_cannot_take(run, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "1 + 2", "answer": "3"}\n')
    result = invoke("eval", str(run), f"data={tmp_path / 'd.jsonl'}", "task=jsonl")
    said = "prompts: expected a prompt that the tokenizer", "WordLevel error: Missing [UNK]"
    assert refused(result, *said)


# ----------------------------------------------------------- Hostile files in the folder of a model
def config(model: Path, **fields) -> None:
    change_json(model / "config.json", **fields)


KERNEL = "expected one of transformers' implementations"
LAYERS = f"num_hidden_layers: expected 0 to {MOST_LAYERS} layers, got "
# For each change of a model's folder: a function that makes it, and a part of the message.
MODELS = {
    "many layers": (lambda model: config(model, num_hidden_layers=10**9), f"{LAYERS}{10**9}"),
    "layers below 0": (lambda model: config(model, num_hidden_layers=-3), f"{LAYERS}-3"),
    "a kernel": (lambda model: config(model, attn_implementation="evil/kernel"), KERNEL),
    "a kernel of a part": (
        lambda model: config(model, _attn_implementation={"": "evil/kernel"}), KERNEL),
    "a kernel under a name of transformers": (
        lambda model: config(model, part={"_attn_implementation_internal": "evil/kernel"}), KERNEL),
    "a kernel of experts": (
        lambda model: config(model, text_config={"experts_implementation": "evil/kernel"}), KERNEL),
}  # fmt: skip


@pytest.mark.parametrize("change", MODELS)
def test_a_hostile_model_is_refused_by_every_command(run, change, monkeypatch):
    load = "transformers.AutoModelForCausalLM.from_pretrained"
    monkeypatch.setattr(load, lambda *_, **__: pytest.fail("loaded"))
    spoil, said = MODELS[change]
    spoil(run / "model")
    for words in (("eval", str(run), "n=2"), ("plan", str(run / "model"), "gpu=8")):
        assert refused(invoke(*words), said)


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id: expected token ids, got "),
        ("config.json", {"hidden_act": "evil"}, "KeyError: 'evil'"),
        ("adapter_config.json", {"peft_type": "EVIL"}, "KeyError: 'EVIL'"),
        ("config.json", {"hidden_size": 10**30}, "Overflow when unpacking"),
    ],
)
def test_a_reason_names_its_type_and_has_no_frames(run, file, fields, said):
    path = run / "model" / file
    if not path.exists():
        path.write_text("{}")
    change_json(path, **fields)
    is_plan = "hidden_size" in fields
    words = ("plan", str(run / "model"), "gpu=8") if is_plan else ("eval", str(run), "n=2")
    result = invoke(*words)
    assert refused(result, said) and "frame #0" not in result.stderr


@pytest.mark.parametrize(
    ("gpus", "name", "found"),
    [(0, "auto", "cpu"), (2, "auto", "cuda"), (2, "cuda", "cuda"), (2, "cuda:1", "cuda:1"),
     (2, "cpu", "cpu"), (0, "cuda", None), (0, "cuda:0", None), (2, "cuda:2", None)],
)  # fmt: skip
def test_a_device_of_this_machine_and_one_that_is_not_here(monkeypatch, gpus, name, found):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    device = load_recipe("sort", [f"model.device={name}"]).model.device
    if found is not None:
        assert str(policy._device(device)) == found
        return
    said = rf"model.device: expected auto, cpu or a GPU .*\(it has {gpus}\), got {name}"
    with pytest.raises(ValueError, match=said):
        policy._device(device)


# ----------------------------------------------------------------------- Settings of a training run
RECIPES = [
    ([CONFIG, "eval.max_new_tokens=32"], "max_new_tokens: expected at most 13"),
    (["rollout.max_new_tokens=1000000"], "max_new_tokens: expected at most 61 after a prompt"),
    (["model.config={model_type: gpt2, n_layer: 1000000000}"], "n_layer: expected 0 to 10000"),
    (["model.config.attn_implementation=some/kernel"], KERNEL),
    (["model.config.vocab_size=5"], "tokenizer: expected token ids below 5, the rows of the model"),
    (["model.config.model_type=lama"], "model.config: lama"),
    (["model=/no/such/model"], "got '/no/such/model': no such folder"),
]


@pytest.mark.parametrize(("words", "said"), RECIPES)
def test_what_the_model_cannot_do_is_refused_before_the_run(tmp_path, words, said, monkeypatch):
    quiet = "transformers.PreTrainedModel.warn_if_padding_and_no_attention_mask"
    monkeypatch.setattr(quiet, lambda *_: None)  # its logger keeps an earlier test's stderr
    assert refused(invoke("train", write_recipe(tmp_path), *words), said)
    assert not (tmp_path / "run").exists()


def test_the_last_position_is_used(tmp_path):
    """Check that a model with 16 positions may sample 13 new tokens after a prompt of 4 tokens.

    These are 17 tokens, but the last sampled token needs no position, because the model does not
    read it.
    """
    words = (CONFIG, "rollout.max_new_tokens=13", "steps=1", "log.progress=false")
    assert invoke("train", write_recipe(tmp_path), *words).exit_code == 0


def test_a_picture_does_not_fail_a_run(tmp_path, monkeypatch):
    fail = Mock(side_effect=ValueError("'bogus' is no backend"))
    monkeypatch.setattr("grpo_fast.train.report.report.plot_runs", fail)
    result = invoke("train", write_recipe(tmp_path), "steps=1", "log.progress=false")
    assert result.exit_code == 0 and "no curves.png: 'bogus' is no backend" in result.stdout
    assert (tmp_path / "run" / "model").is_dir()
