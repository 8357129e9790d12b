"""Tests of hostile folders, files and settings. Every command must end with a one-line error.

A run's folder cannot execute code, and errors appear before the model is loaded.
"""

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from grpo_fast.train import policy
from grpo_fast.train.config import load_recipe
from grpo_fast.train.policy import MOST_LAYERS
from tests.command_line import RECIPE, invoke, refused, write_recipe
from tests.data.test_data import write_lines

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


REWARD = "def score(prompts, completions, answers):\n    return [1.0] * len(prompts)\n"


def mark(folder: Path) -> str:
    """Return Python code that creates the file `marker` in `folder`.

    If the file exists after a command, the command has executed the code.
    """
    return f"import pathlib\npathlib.Path({str(folder / 'marker')!r}).touch()\n"


def change(run: Path, **sections) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    (run / "config.yaml").write_text(yaml.safe_dump(config | sections), encoding="utf-8")


def test_a_runs_rewards_are_imported_only_when_allowed(run, tmp_path, monkeypatch):
    (tmp_path / "planted_reward.py").write_text(mark(tmp_path) + REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    change(run, rewards=[{"name": "sort_positions"}, {"name": "planted_reward:score"}])
    marker, words = tmp_path / "marker", ("eval", str(run), "n=2")
    said = "'planted_reward:score'", str(run / "config.yaml"), "--allow-code"
    assert refused(invoke(*words), *said)
    from_recipe = ("eval", str(run / "model"), f"recipe={run / 'config.yaml'}", "n=2")
    assert refused(invoke(*from_recipe), *said)
    # The commands `plot` and `plan` call no reward, so they need not import it.
    (run / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n')
    assert invoke("plot", str(run), "-o", str(tmp_path / "p.png")).exit_code == 0
    assert invoke("plan", str(run / "config.yaml"), "gpu=80").exit_code == 0
    assert not marker.exists() and "planted_reward" not in sys.modules
    allowed = invoke(*words, "--allow-code")
    assert allowed.exit_code == 0 and "rewards/score" in allowed.output and marker.exists()
    # A function of an installed package could execute a file in the folder of the run.
    change(run, rewards=[{"name": "torch.hub:load", "options": {"repo_or_dir": str(run)}}])
    assert refused(invoke(*words), "torch.hub:load", "--allow-code")


def plant_model_code(model: Path, marker: Path) -> None:
    """Add custom model code to a model's folder, and name its classes in config.json.

    If the code is executed, it creates a file with the name `marker` in the folder `marker`.
    """
    auto_map = {"AutoConfig": "planted.C", "AutoModelForCausalLM": "planted.M"}
    change_json(model / "config.json", model_type="planted", auto_map=auto_map)
    (model / "planted.py").write_text(
        mark(marker) + "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class C(LlamaConfig):\n    model_type = 'planted'\n"
        "class M(LlamaForCausalLM):\n    config_class = C\n"
    )


@pytest.mark.parametrize("is_run", [True, False])
def test_eval_trusts_a_models_code_only_when_allowed(run, tmp_path, is_run, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plant_model_code(run / "model", tmp_path)
    # The run was trained without custom code, so --allow-code does not allow the code.
    assert refused(invoke("eval", str(run), "n=2", "--allow-code"), "custom code")
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["model"]
    change(run, model={**settings, "trust_remote_code": True})
    asked = [str(run)] if is_run else [str(run / "model"), "task=sort"]
    words = ("eval", *asked, "n=2")
    assert refused(invoke(*words), "custom code")
    assert not (tmp_path / "marker").exists()
    # The result of the evaluation is not checked. It may fail, because packed attention does not
    # support the custom model class.
    invoke(*words, "--allow-code")
    assert (tmp_path / "marker").exists()


def test_the_tokenizer_that_counts_worked_examples_asks_nobody(run, tmp_path):
    """Check that an evaluation with worked examples rejects custom tokenizer code.

    The tokenizer is loaded to count the tokens of the examples. Unless trust_remote_code is False,
    transformers prompts the user whether to execute the code.
    """
    plant_model_code(run / "model", tmp_path)
    auto_map = {"AutoTokenizer": [None, "planted.T"]}
    change_json(run / "model" / "tokenizer_config.json", tokenizer_class="T", auto_map=auto_map)
    (tmp_path / "train.jsonl").write_text('{"question": "2+2?", "answer": "#### 4"}\n' * 3)
    (tmp_path / "test.jsonl").write_text('{"question": "1+2?", "answer": "#### 3"}\n')
    change(run, data={"task": "gsm8k", "path": str(tmp_path), "shots_tokens": 40})
    result = invoke("eval", str(run), "n=1", typed="y\n" * 9)
    assert not (tmp_path / "marker").exists()
    assert result.exit_code == 2 and "custom code runs only with" in result.stderr
    assert "[y/N]" not in result.output


# --------------------------------------------------- Runs that are refused before a model is loaded
TEXTS = RECIPE.replace("tokenizer: symbols", "tokenizer: bpe, vocab_size: 300").replace(
    "sort_positions", "exact_match"
)


@pytest.fixture
def no_model(monkeypatch):
    """Make the test fail if the command loads a model."""
    for name in ("grpo_fast.train.loop.load_policy", "grpo_fast.train.policy.load_policy"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("a model was loaded"))


def texts_recipe(folder, lines, n_test=1):
    """Write a data set with the given lines, and a recipe that uses it. Return the recipe's path.

    `n_test` is the number of test questions.
    """
    path = write_lines(folder / "d.jsonl", *lines)
    data = f"data: {{task: jsonl, path: {path}, n_test: {n_test}}}"
    return write_recipe(folder, TEXTS.replace("data: {task: sort, digits: 3, n_test: 8}", data))


@pytest.mark.parametrize("which", [0, 1])
def test_a_prompt_that_is_too_long(tmp_path, monkeypatch, which):
    """Check that a prompt that is too long for the model is refused before anything is sampled.

    The long prompt is in the training split or in the test split.
    """
    lines = [{"prompt": "1 2 3", "answer": "1"} for _ in range(2)]
    lines[which]["prompt"] = "0123456789" * 12
    generate = "transformers.GenerationMixin.generate"
    monkeypatch.setattr(generate, lambda *_, **__: pytest.fail("asked the model"))
    result = invoke("train", texts_recipe(tmp_path, lines), "rollout.prompts_per_step=1")
    said = "expected at most 64 tokens (max_position_embeddings of the model), got 120 in '0123"
    assert refused(result, said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "out", [".", "no/e.json", "run", "run/config.yaml", "run/model/config.json"]
)
def test_where_eval_cannot_write(run, tmp_path, no_model, out):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = invoke("eval", str(run), "n=2", f"out={tmp_path / out}")
    assert refused(result, "out: expected a new file in a folder that exists")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_results_that_cannot_be_written_are_still_shown(run):
    result = invoke("eval", str(run), "n=2", "out=/dev/full")
    assert refused(result, "No space left", code=1) and "greedy (n=2 questions" in result.output


# ------------------------------------------------------------------------- Paths in the home folder
def test_everything_of_a_run_lies_in_one_folder(tmp_path, recipe, monkeypatch):
    """Check that all files of a run are in the home folder if the path begins with `~`."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    words = ("steps=0", "log.progress=false")
    assert invoke("train", recipe, "output_dir=~/a", *words).exit_code == 0
    found = {path.name for path in (home / "a").iterdir()}
    assert {"model", "metrics.jsonl", "summary.json", "config.yaml"} <= found
    assert invoke("eval", "~/a", "n=2", "out=~/e.json").exit_code == 0
    assert (home / "e.json").is_file()
    assert invoke("plot", "~/a", "--out=~/p.png").exit_code == 0 and (home / "p.png").is_file()
    assert not list(here.iterdir())
    # A path that begins with `./~` must not be expanded. It names the folder `~` in the current
    # directory.
    assert invoke("train", recipe, "output_dir=./~/a", *words).exit_code == 0
    assert {"model", "metrics.jsonl"} <= {p.name for p in (here / "~" / "a").iterdir()}
    # The saved configuration has the full path, so it names the same folder for every user.
    monkeypatch.setenv("HOME", "/elsewhere")
    assert load_recipe(str(home / "a" / "config.yaml")).output_dir == str(home / "a")
    other = ("model={path: ~/m}", "data={task: jsonl, path: ~/d.jsonl}")
    config = load_recipe(recipe, other)
    assert (config.model.path, config.data.path) == ("/elsewhere/m", "/elsewhere/d.jsonl")


# ------------------------------------------------------------------------------ Errors during a run
@pytest.mark.parametrize(
    "words", [(), ("model.dtype=float16", "optim.lr=1"), ("rollout.top_k=3", "minibatches=2")]
)
def test_a_policy_that_gives_nan(recipe, words):
    result = invoke("train", recipe, "optim.lr=1e30", "steps=8", "log.progress=false", *words)
    assert refused(
        result, "the policy's logits are NaN or infinite; this happened after ", "optim.lr", code=1
    )
