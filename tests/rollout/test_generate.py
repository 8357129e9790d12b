"""Tests of `rollout.generate` and of the interface that all engines implement."""

import pytest
import torch

from grpo_fast import rollout
from grpo_fast import rollout as rollouts
from grpo_fast.attention import register
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout import Completion, Engine, Sampling, awake, generate
from grpo_fast.rollout.own.cache import RolloutCache
from grpo_fast.train.policy import Policy
from tests.attention.families import family_model
from tests.tiny import tiny_model
from tests.train.tiny_steps import taken

PROMPTS = ["3 1 2 =", "1 ="]


@pytest.fixture
def tokenizer():
    return build_symbol_tokenizer([str(i) for i in range(10)] + ["="])


def state_of(model):
    modes = [module.training for module in model.modules()]
    return modes, model.config._attn_implementation, model.generation_config.to_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_changes_nothing(tokenizer, dtype):
    model = tiny_model()
    options = {"tokenizer": tokenizer, "group_size": 3, "max_new_tokens": 9, "top_p": 0.9}
    before = generate(model, PROMPTS, **options)
    torch.set_default_dtype(dtype)
    try:
        after = generate(model, PROMPTS, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert before.completion_ids == after.completion_ids
    assert torch.equal(before.logps, after.logps) and torch.equal(before.mass, after.mass)


def test_the_model_is_left_as_it_was_and_samples_what_the_policy_does(tokenizer):
    model = tiny_model()
    model.train()
    model.model.layers[0].eval()  # sampling must restore this mode
    model.model.layers[0].mlp.register_module("drop", torch.nn.Dropout(0.5))
    model.generation_config.repetition_penalty = 5.0
    before = state_of(model)
    options = {"group_size": 3, "seed": (4, 2)}
    ours = generate(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=9, **options)
    assert state_of(model) == before and model.model.layers[0].mlp.drop.p == 0.5
    with pytest.raises(RuntimeError), rollout.SampledModel(model, tokenizer).generation():
        assert not model.training
        raise RuntimeError
    assert state_of(model) == before
    policy = Policy(tiny_model(), tokenizer)
    theirs = generate(policy, PROMPTS, Sampling(max_new_tokens=9), **options)
    assert ours.completion_ids == theirs.completion_ids
    # The model must still be trainable. If sampling had created inference tensors as parameters,
    # `backward` would fail.
    model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()


def test_token_ids_and_a_prompt_that_comes_twice(tokenizer, spied):
    model, ids = tiny_model(), tokenizer(PROMPTS)["input_ids"]
    keywords = {"tokenizer": tokenizer, "max_new_tokens": 6, "seed": 3}
    texts = generate(model, PROMPTS, group_size=2, **keywords)
    assert generate(model, ids, group_size=2, **keywords).completion_ids == texts.completion_ids
    calls = spied(RolloutCache, "seat")
    twice = generate(model, [[*p] for p in ids for _ in range(2)], **keywords)
    assert calls[0].args[1] == [2, 2]
    assert twice.completion_ids == texts.completion_ids


def test_a_model_without_a_tokenizer_completes_token_ids(tokenizer):
    """Check that `SampledModel` samples the same completions with and without a tokenizer.

    The prompts must be token ids, and the texts of the completions are empty.
    """
    model, ids = tiny_model(), tokenizer(PROMPTS)["input_ids"]
    with_tokenizer = rollout.SampledModel(model, tokenizer)
    alone = rollout.SampledModel(model, eos_ids=with_tokenizer.eos_ids)
    options = {"max_new_tokens": 6, "seed": 3, "group_size": 2}
    done = generate(alone, ids, **options)
    assert done.completion_ids == generate(with_tokenizer, ids, **options).completion_ids
    assert done.texts == [""] * 2 * len(ids)
    assert rollout.prompt_texts(alone, ids) == [""] * len(ids)
    ended = generate(rollout.SampledModel(model, eos_ids=[2]), [[5, 6, 7]], max_new_tokens=4)
    assert len(ended.completion_ids) == 1 and ended.texts == [""]
    for prompts in (PROMPTS, [[{"role": "user", "content": "hi"}]], ["5 6 7"], [[5.0, 6.0]]):
        with pytest.raises(ValueError, match="token ids, because the model has no tokenizer"):
            generate(alone, prompts)
    with pytest.raises(ValueError, match="prompts: expected at least one token"):
        generate(alone, [[]])


@pytest.mark.parametrize("eos", [[], [-1], [2.0], [True], ["2"], [None], 2, [[2]]])
def test_ids_that_end_no_completion(eos):
    with pytest.raises(ValueError, match="eos_ids: expected"):
        rollout.SampledModel(tiny_model(), eos_ids=eos)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_callers_autocast_keeps_its_gradients(tokenizer, dtype):
    model = tiny_model()
    with torch.autocast("cpu", torch.bfloat16):
        sampled = rollout.SampledModel(model, tokenizer, autocast=dtype)
        generate(sampled, PROMPTS, max_new_tokens=2)
        model(input_ids=torch.tensor([[1, 2]])).logits.float().sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": None}, "tokenizer: expected"),
        ({"group_size": 0}, "group_size: expected at least 1, got 0"),
        ({"options": Sampling(), "top_p": 0.5}, "options conflicts with .*'top_p'"),
        ({"top_p": 1.5}, "top_p"),
        ({"beams": 2}, "beams"),
        ({"prompts": [[1, -1]]}, "prompts: expected .*-1"),
        ({"prompts": [[1, 10**6]]}, "prompts: expected token ids"),
        ({"prompts": [[]]}, "prompts: expected at least one token"),
        *[({"places": x}, "places: expected 2 increasing indices from 0")
          for x in ([0], [1, 0], [0, 0], [-1, 0])],
    ],
)  # fmt: skip
def test_refusals(tokenizer, changes, message):
    given = {"prompts": PROMPTS, "tokenizer": tokenizer, **changes}
    with pytest.raises(ValueError, match=message):
        generate(tiny_model(), **given)


def test_a_head_with_an_adapter_samples_by_transformers(tokenizer):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), config)
    done = generate(model, PROMPTS, tokenizer=tokenizer, max_new_tokens=4, temperature=0)
    for prompt, ids in zip(done.prompt_ids, done.completion_ids, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ids
    prefix = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="prompt learning"):
        generate(peft.get_peft_model(tiny_model(), prefix), PROMPTS, tokenizer=tokenizer)


@pytest.mark.parametrize("family", ["recurrent_gemma", "rwkv", "xlstm"])
def test_models_that_ignore_padding_or_have_a_wrong_cache(family):
    """Check the logps of samples against one forward pass of each sequence alone.

    These models ignore a padding mask. With a cache, RWKV computes wrong logits and xLSTM raises an
    error, so `generate` must run without a cache.
    """
    model = rollout.SampledModel(family_model(family), eos_ids=[60])
    prompts = [[5, 9, 7, 3, 8, 12, 30, 4, 11], [20, 6, 41]]
    done = generate(model, prompts, group_size=2, max_new_tokens=6, seed=1)
    logps = done.logps.split([len(ids) for ids in done.completion_ids])
    for prompt, ids, ours in zip(done.prompt_ids, done.completion_ids, logps, strict=True):
        logits = model.lm(input_ids=torch.tensor([[*prompt, *ids]]), use_cache=False).logits[0]
        expected = taken(logits[len(prompt) - 1 : -1], ids)
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def test_a_model_that_generate_cannot_sample_is_refused(monkeypatch):
    model = family_model("rwkv")
    monkeypatch.setattr(model, "generate", lambda **_: torch.tensor([])[0])
    with pytest.raises(ValueError, match="nothing samples from this model.*without a cache: "):
        generate(rollout.SampledModel(model, eos_ids=[60]), [[5, 9, 7]], max_new_tokens=3)


THREE = ["3 1 2 =", "5 =", "0 9 8 7 6 5 4 ="]


class Recorded(Engine):
    """Engine that records its calls, and whose completions consist of a single EOS token.

    If `short` is not 0, the engine is faulty: that many completions are missing from its result.
    """

    def __init__(self, short: int = 0) -> None:
        self.calls: list = []
        self.short = short

    def sample(self, request):
        self.calls.append("generate")
        count = len(request.prompts) * request.group_size - self.short
        return [Completion([1], torch.zeros(1), "eos", 7)] * count

    def update(self, policy, version):
        self.calls.append(f"update {version}")

    def sleep(self):
        self.calls.append("sleep")

    def close(self):
        self.calls.append("close")


def test_a_rollout_carries_what_the_engine_said(policy):
    engine = Recorded()
    found = rollouts.generate(policy, THREE, Sampling(), group_size=2, seed=0, engine=engine)
    assert found.weight_version.tolist() == [7] * 6 and found.support is None
    assert not found.truncated.any() and found.lengths == [1] * 6
    with pytest.raises(RuntimeError, match="Recorded: expected 3 completions, got 2"):
        rollouts.generate(policy, THREE, Sampling(), group_size=1, seed=0, engine=Recorded(1))
    with Recorded() as engine:
        with pytest.raises(RuntimeError, match="stop"), awake(engine, None, 3):
            engine.generate([[1]], Sampling(), group_size=1, seed=0)
            raise RuntimeError("stop")
    assert engine.calls == ["update 3", "generate", "sleep", "close"]


def test_a_model_with_the_attention_of_packed_rows_samples(tokenizer):
    model = tiny_model()
    expected = generate(model, PROMPTS, tokenizer=tokenizer, group_size=2, max_new_tokens=6)
    model.set_attn_implementation(register())
    found = generate(model, PROMPTS, tokenizer=tokenizer, group_size=2, max_new_tokens=6)
    assert found.completion_ids == expected.completion_ids
    assert model.config._attn_implementation == "grpo_packed"
