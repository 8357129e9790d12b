"""Tests that the doctor names each of the eight causes if it is planted in an engine."""

import pytest
import torch
from transformers import GenerationConfig

from grpo_fast.doctor import causes
from grpo_fast.doctor.causes import shipped_settings
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.own.engine import TransformersEngine
from tests.doctor.faulty import PROMPTS, SAMPLING, FaultyEngine, found_by, policy_of
from tests.tiny import tiny_model

BF16 = torch.bfloat16
CUT = SAMPLING.model_copy(update={"top_k": 9, "top_p": 0.8})
LONGER = SAMPLING.model_copy(update={"max_new_tokens": 30})
SHIPPED = {"temperature": 0.6, "top_k": 7, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def policy():
    return policy_of()


@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(max_new_tokens=1)])
def test_a_correct_engine_has_no_cause(policy, sampling):
    for engine in (FaultyEngine(), TransformersEngine(policy)):
        found, names = found_by(policy, engine, sampling)
        assert found.ok and names == [] and found.tried == []
        assert 0 <= found.mean <= found.largest < 1e-5 and found.own < 1e-5


# For each planted fault: the fields of the faulty engine, the cause that the doctor must name, and
# a part of the advice that the doctor must give.
PLANTS = {
    "raw": (dict(raw=True), causes.TEMPERATURE, "raw log-probabilities: request processed"),
    "temperature lost": (dict(temperature=1.0), causes.TEMPERATURE, "processed"),
    "shipped temperature": (dict(temperature=0.6), causes.TEMPERATURE, "temperature=0.6"),
    "shipped penalty": (dict(penalty=1.1), causes.TRUNCATION, "repetition_penalty=1.1"),
    "all that is shipped": (dict(temperature=0.6, top_k=7, penalty=1.1), causes.TRUNCATION,
                            "temperature=0.6 repetition_penalty=1.1 top_k=7"),
    "named": (dict(top_k=5, names_kept=True), causes.TRUNCATION, "the tokens that it names"),
    "BOS twice": (dict(read=lambda ids: [ids[0], *ids]), causes.PROMPT, "adds BOS"),
    "no BOS": (dict(read=lambda ids: ids[1:]), causes.PROMPT, "loses the first token"),
    "no generation prompt": (dict(read="closed"), causes.PROMPT, "no generation prompt"),
    "no template": (dict(read="plain"), causes.PROMPT, "no chat template"),
    "bf16": (dict(model_dtype=BF16), causes.DTYPE, "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTS)
def test_a_cause_is_named(policy, planted, monkeypatch):
    shipped = GenerationConfig(**SHIPPED, do_sample=True)
    monkeypatch.setattr(policy.lm, "generation_config", shipped)
    assert shipped_settings(policy) == SHIPPED
    fields, name, part = PLANTS[planted]
    closed = len(policy.tokenizer("assistant:", add_special_tokens=False)["input_ids"])
    plain = iter([policy.tokenizer(prompt)["input_ids"] for prompt in PROMPTS for _ in range(2)])
    known = {"closed": lambda ids: ids[:-closed], "plain": lambda _: next(plain)}
    engine = FaultyEngine(**{key: known.get(str(x), x) for key, x in fields.items()})
    found, names = found_by(policy, engine)
    assert names == [name] and not found.ok and part in found.causes[0].advice
    left = [cause.left for cause in found.tried]
    assert left == sorted(left) and left[0] < found.mean / 10
    assert len({cause.name for cause in found.tried}) == len(left)


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Models that an engine configures differently: the family, the fields of the trainer's
# configuration, and the fields that differ in the engine. The doctor must not name a cause.
SERVED = {
    "theta": ("llama", {"rope_parameters": {**ROPE, "rope_theta": 5e5}}, {"rope_parameters": ROPE}),
    "scaling": ("llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}},
                {"rope_parameters": ROPE}),
    "window": ("mistral", {}, {"sliding_window": None}),
    "softcap": ("gemma2", {}, {"final_logit_softcapping": None}),
    "softcap of attention": ("gemma2", {}, {"attn_logit_softcapping": None}),
    "scale": ("granite", {}, {"logits_scaling": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("planted", SERVED)
def test_a_different_configuration_has_no_name(planted):
    family, own, changes = SERVED[planted]
    policy = policy_of(family, **own)
    server = policy_of(family, **{**own, **changes})

    class Differing(FaultyEngine):
        def update(self, policy, version):
            server.lm.load_state_dict(policy.lm.state_dict())
            super().update(server, version)

    found, names = found_by(policy, Differing())
    assert names == [] and not found.ok


def test_an_adapter_that_is_not_loaded():
    from peft import LoraConfig, get_peft_model

    base = policy_of()
    special = {"eos_token_id": base.tokenizer.eos_token_id}
    model = tiny_model("llama", vocab_size=len(base.tokenizer), **special)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    policy = type(base)(model, base.tokenizer)
    assert found_by(policy, FaultyEngine())[1] == []
    found, names = found_by(policy, FaultyEngine(keeps=base))
    assert names == [causes.ADAPTER] and found.causes[0].left < 1e-5


def test_weights_that_no_update_changes(policy):
    """Check that the doctor finds an engine that ignores weight updates.

    The doctor changes the weights of the policy to find this fault, and must restore them.
    """
    before = policy.frozen_copy()
    found, names = found_by(policy, FaultyEngine(keeps=policy_of(seed=1)))
    assert names == [causes.STALE] and "do not change with the weights" in found.causes[0].advice
    for name, tensor in policy.lm.state_dict().items():
        assert torch.equal(tensor, before.lm.state_dict()[name]), name


def test_versions_and_ends_are_counted(policy):
    found, names = found_by(policy, FaultyEngine(answers=3), version=4)
    assert names == [causes.STALE] and not found.ok and found.mean < 1e-5
    assert "6 completions" in found.causes[0].advice
    assert found_by(policy, FaultyEngine(answers=3), version=3)[0].ok
    found, names = found_by(policy, FaultyEngine(stops=3))
    assert names == [causes.EOS] and not found.ok and found.mean < 1e-5


def test_truncation_that_was_requested(policy):
    found, names = found_by(policy, FaultyEngine(), CUT)
    assert names == [causes.TRUNCATION] and "top_p=0.8 top_k=9" in found.causes[0].advice
    found, names = found_by(policy, FaultyEngine(names_kept=True), CUT, uses_kept=True)
    assert found.ok and names == []
    found, names = found_by(policy, FaultyEngine(names_kept=True, raw=True), CUT, uses_kept=True)
    assert names == [causes.TEMPERATURE] and "raw" in found.causes[0].advice


def test_a_wrong_trainer_and_a_different_temperature_of_the_loss(policy, monkeypatch):
    found, names = found_by(policy, FaultyEngine(), temperature=1.0)
    assert names == [causes.TEMPERATURE] and "temperature=0.7" in found.causes[0].advice
    plain = type(policy).logps
    monkeypatch.setattr(type(policy), "logps", lambda *a, **k: plain(*a, **k) * 1.01)
    found, names = found_by(policy, FaultyEngine())
    assert names == [causes.ATTENTION] and found.own > 1e-3


def test_a_dtype_is_recognized_with_different_kernels(policy):
    class Eager(FaultyEngine):
        def update(self, policy, version):
            super().update(policy, version)
            self.policy.generation_attn = "eager"

    assert found_by(policy, Eager(model_dtype=BF16), LONGER)[1] == [causes.DTYPE]
    half = policy_of()
    half.lm.to(BF16)
    found, names = found_by(half, FaultyEngine())
    assert found.ok and names == [] and 0.02 <= found.noise <= 0.04
    assert found_by(half, FaultyEngine(raw=True), LONGER)[1] == [causes.TEMPERATURE]


@pytest.mark.parametrize(
    "fault",
    [
        dict(penalty=1.37),
        dict(read=lambda ids: [40, 50, 60, *ids[3:]]),
        dict(report_as=lambda logps: logps - 0.2),
    ],
    ids=["logits", "prompt", "constant"],
)
def test_an_unknown_fault_has_no_name(policy, fault):
    found, names = found_by(policy, FaultyEngine(**fault))
    assert names == [] and not found.ok and len(found.tried) > 3
    assert found_by(policy, FaultyEngine(**fault), threshold=9.0)[0].ok


def test_attempts_without_effect_are_left_out(policy, monkeypatch):
    """Check that the doctor leaves out an attempt that changes no log-prob."""
    nothing = {"changes nothing": lambda tokenizer, chat, ids: ids}
    monkeypatch.setattr(causes, "PROMPT_CHANGES", nothing)
    found, names = found_by(policy, FaultyEngine(report_as=lambda logps: logps - 0.2))
    assert names == [] and causes.PROMPT not in [cause.name for cause in found.tried]


def test_what_cannot_be_compared_is_refused(policy):
    with pytest.raises(RuntimeError, match="engine: expected tokens and a finite log-prob"):
        found_by(policy, FaultyEngine(report_as=lambda logps: logps * torch.nan))
    with pytest.raises(ValueError, match="temperature: expected a number above 0, got 0"):
        found_by(policy, FaultyEngine(), Sampling(temperature=0))
