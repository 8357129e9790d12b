"""Tests of runs that continue or merge an adapter saved by peft."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_fast.train.checkpoint import export
from grpo_fast.train.config import ModelConfig, ReferenceConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.evaluation.command import run_eval
from grpo_fast.train.folder import checkpoints_in, fingerprints
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.reference import Reference
from grpo_fast.train.plan import predict_model
from tests.tiny import tiny_folder
from tests.train.test_hostile_input import change_json
from tests.train.test_train_policy import a_batch
from tests.train.tiny_runs import questions, run

FRESH = "model.lora={r: 2}"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Save a base model, a LoRA adapter with nonzero weights, and the merged model.

    Return the folder that contains all three.
    """
    import peft
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(folder / "base", "llama"))
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", lora_dropout=0.1)
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.1)
    adapted.save_pretrained(folder / "adapter")
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    return folder


def load(adapter, **options):
    return load_policy(ModelConfig(path=str(adapter / "adapter"), **options))


def merged_weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def assert_same(a, b, tolerance=1e-6):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=tolerance, msg=name)


def test_the_tokenizer_of_the_base_model_has_a_fingerprint(adapter):
    config = load_recipe("own-data", [f"model={adapter / 'adapter'}", "data=x", "rewards=exact"])
    file = adapter / "base" / "tokenizer_config.json"
    text = file.read_text()
    first = fingerprints(config)
    file.write_text(text + " ")
    second = fingerprints(config)
    file.write_text(text)
    assert {key for key in first if first[key] != second[key]} == {"model"}


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["trained on", "merged"])
def test_the_policy_and_its_reference_are_the_saved_adapter(adapter, tmp_path, lora):
    policy = load(adapter, lora=lora)
    trained = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    ranks = {p.shape[0] for name, p in policy.model.named_parameters() if "lora_A" in name}
    assert ranks == {2 if lora else 3}
    policy.save(tmp_path / "start")
    assert_same(merged_weights(tmp_path / "start"), merged_weights(adapter / "merged"))
    start, (_, batch) = load_policy(ModelConfig(path=str(tmp_path / "start"))), a_batch()
    reference = Reference(policy, ReferenceConfig(kind="frozen"))
    with torch.no_grad():
        for weight in policy.trainable():
            weight.add_(0.1)
        expected, moved = start.logps(batch.packed), policy.logps(batch.packed)
    found = reference.logps(batch.packed, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (moved - expected).abs().max() > 1e-3


@pytest.mark.parametrize("fresh", [[], [FRESH]], ids=["trained on", "merged"])
def test_a_run_saves_resumes_exports_and_evaluates(adapter, tmp_path, fresh):
    words = [
        f"model.path={adapter / 'adapter'}", "model.dtype=float32",
        f"data.path={questions(tmp_path / 'data', 8, 8)}", "rollout.max_new_tokens=6",
        "rollout.prompts_per_step=2", "rollout.group_size=4", "eval.n=2", "eval.samples=1",
        "eval.k=[]", "log.progress=false", "optim={lr: 0.01}", "reference.kind=frozen",
        "loss.beta=0.1", "checkpoint.every=1", "model.lora=null", *fresh,
        "rewards=[{name: 'tests.train.tiny_runs:characters', in_process: true}]",
    ]  # fmt: skip
    recipe = "gsm8k-smollm2-1.7b"
    _, whole = run(tmp_path / "whole", recipe, *words, "steps=2")
    run(tmp_path / "parts", recipe, *words, "steps=1")
    _, parts = run(tmp_path / "parts", recipe, *words, "steps=2", "resume=auto")
    assert whole[0]["kl"] == 0 and whole[1]["kl"] > 0  # the reference is the start
    assert parts[1] == whole[1]  # not step 1, after which only the shorter run evaluates
    saved = merged_weights(tmp_path / "whole" / "model")
    assert_same(merged_weights(tmp_path / "parts" / "model"), saved, 0)
    # A checkpoint stores only the adapter of the model.
    [stored, *_] = checkpoints_in(tmp_path / "whole")
    names = load_file(stored / "weights" / "model-00001-of-00001.safetensors")
    assert all("lora_" in name or name.startswith("random.") for name in names)
    # The export merges the adapter into the base model. The merged weights must equal the model
    # that the run saved at its end.
    export(tmp_path / "parts", tmp_path / "exported")
    assert_same(merged_weights(tmp_path / "exported"), saved, 0)
    start = merged_weights(adapter / "merged")
    assert any((saved[name] - x).abs().max() > 1e-3 for name, x in start.items())


def test_an_adapter_is_evaluated_as_the_merged_model(adapter, tmp_path):
    data = questions(tmp_path / "data", 4, 4)
    load(adapter).tokenizer.save_pretrained(adapter / "merged")
    words = [f"data={data}", "max_new_tokens=6", "dtype=float32", "device=cpu", "samples=2"]
    ours, theirs = (run_eval(str(adapter / name), words) for name in ("adapter", "merged"))
    assert ours == theirs


def test_another_base_is_refused_on_resume(adapter, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    settings = copy / "adapter" / "adapter_config.json"
    change_json(settings, base_model_name_or_path=str(copy / "base"))
    config = load_recipe("gsm8k-smollm2-1.7b", [f"model.path={copy / 'adapter'}"])
    before = fingerprints(config)
    base = copy / "base" / "model.safetensors"
    weights = load_file(base)
    save_file({name: x + 1 for name, x in weights.items()}, base)
    after = fingerprints(config)
    assert {key for key in before if before[key] != after[key]} == {"base"}


def changed(adapter, folder, **settings):
    shutil.copytree(adapter / "adapter", folder)
    change_json(folder / "adapter_config.json", **settings)
    return ModelConfig(path=str(folder))


def test_adapters_that_cannot_be_used_are_refused(adapter, tmp_path):
    for name, settings, said in (
        ("dora", {"use_dora": True}, r"low-rank matrices alone.*model.lora=\{r: 16\}"),
        ("kind", {"peft_type": "IA3", "feedforward_modules": []}, "a LoRA adapter, got IA3"),
        ("none", {"base_model_name_or_path": None}, "base_model_name_or_path"),
        ("gone", {"base_model_name_or_path": "/no/such/base"}, "/no/such/base"),
    ):
        with pytest.raises(ValueError, match=said):
            load_policy(changed(adapter, tmp_path / name, **settings))
    for name, text in (("cut", '{"a": '), ("list", "[]"), ("empty", "{}")):
        changed(adapter, tmp_path / name)
        (tmp_path / name / "adapter_config.json").write_text(text)
        with pytest.raises(ValueError, match="model.path: expected adapter_config.json in .*, got"):
            load_policy(ModelConfig(path=str(tmp_path / name)))
    config = changed(adapter, tmp_path / "lacks")
    file = tmp_path / "lacks" / "adapter_model.safetensors"
    weights = load_file(file)
    weights.pop(min(weights))
    save_file(weights, file)
    with pytest.raises(ValueError, match="missing adapter keys"):
        load_policy(config)


def test_the_memory_of_an_adapter_is_predicted_as_one(adapter):
    path = f"model.path={adapter / 'adapter'}"
    ours = load_recipe("gsm8k-smollm2-1.7b", [path, "model.lora=null"])
    same = load_recipe("gsm8k-smollm2-1.7b", [path, "model.lora={r: 3}"])
    lm = load(adapter).lm
    assert predict_model(lm, ours) == predict_model(lm, same)
