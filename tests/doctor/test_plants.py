"""What servers do in production, planted in an engine of this process; engines that are right."""

import pytest
import torch

from grpo_fast.doctor import causes
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.train.models.policy import Policy
from tests.doctor import faulty
from tests.doctor.faulty import (
    MESSAGES,
    PROMPTS,
    FaultyEngine,
    bos_twice,
    policy_with_bos,
    tokenizer_with_bos,
)
from tests.tiny import tiny_model

SAMPLING = Sampling(max_new_tokens=12, temperature=0.7)
LONGER = Sampling(max_new_tokens=30, temperature=0.7)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def policy():
    return policy_with_bos()


def found_by(policy, engine, prompts=MESSAGES, sampling=SAMPLING, **options):
    return faulty.found_by(policy, engine, sampling, prompts, **options)


def repeated(z, prompt, ids):
    seen = sorted({*prompt, *ids})
    z = z.clone()
    z[seen] = torch.where(z[seen] > 0, z[seen] / 1.2, z[seen] * 1.2)
    return z


def present(z, prompt, ids):
    return z - 0.5 * torch.zeros_like(z).index_fill(0, torch.tensor(sorted({*ids}) or []).long(), 1)


def frequent(z, prompt, ids):
    return z - 0.3 * torch.bincount(torch.tensor(ids).long(), minlength=len(z))


def raised(z, prompt, ids):
    return z + 2.5 * (torch.arange(len(z)) == 40)


def forbidden(z, prompt, ids):
    return torch.where(torch.arange(len(z)) == 41, -torch.inf, z)


def without_eos(z, prompt, ids):
    return torch.where(torch.arange(len(z)) == 1, -torch.inf, z) if len(ids) < 6 else z


def one_late(logps):
    return torch.cat([logps[:1], logps[:-1]])


def one_early(logps):
    return torch.cat([logps[1:], logps[-1:]])


# What is made of a prompt, by a policy's tokenizer.
def with_system(policy):
    system = {"role": "system", "content": "You are a helpful assistant."}
    sent = iter([faulty.as_chat(policy.tokenizer, [system, *chat]) for chat in MESSAGES])
    return lambda tokens: next(sent)


def without_template(policy):
    sent = iter([policy.tokenizer(prompt)["input_ids"] for prompt in PROMPTS])
    return lambda tokens: next(sent)


def templated(policy):
    def read(tokens):
        text = policy.tokenizer.decode(tokens, skip_special_tokens=True)
        return faulty.as_chat(policy.tokenizer, [{"role": "user", "content": text}])

    return read


def a_blank_more(policy):
    blank = policy.tokenizer(" ", add_special_tokens=False)["input_ids"]
    return lambda tokens: tokens + blank


PLANTS = {  # what is planted, what is found, and words of the advice
    "raw": (dict(raw=True), causes.RAW, "processed_logprobs"),
    "temperature ignored": (dict(temperature=1.0), causes.TEMPERATURE, "samples at temp"),
    "another temperature": (dict(temperature=0.9), causes.TEMPERATURE, "temperature 0.9,"),
    "reports another": (dict(report=0.5), causes.TEMPERATURE, "reports log-probabilities"),
    "kept, named": (dict(top_k=7, names_kept=True), causes.TRUNCATION, "not asked to"),
    "top_k": (dict(top_k=7), causes.TRUNCATION, "top_k=7"),
    "top_p": (dict(top_p=0.8), causes.TRUNCATION, "top_p=0.8"),
    "greedy": (dict(top_k=1), causes.TRUNCATION, "top_k=1"),
    "top_p of nearly all": (dict(top_p=0.99), causes.TRUNCATION, "top_p=0.99"),
    "a little warmer": (dict(temperature=0.701), causes.TEMPERATURE, "temperature 0.701"),
    "min_p": (dict(min_p=0.05), causes.TRUNCATION, "min_p=0.05"),
    "head in bf16": (dict(head=BF16), causes.HEAD, "bfloat16"),
    "head in fp16": (dict(head=torch.float16), causes.HEAD, "float16"),
    "model in bf16": (dict(model_dtype=BF16), causes.MODEL, "bfloat16"),
    "padding left": (dict(pad="left"), causes.PADDING, "on the left"),
    "padding right": (dict(pad="right"), causes.PADDING, "on the right"),
    "repetition penalty": (dict(edit=repeated), causes.PENALTY, "repetition_penalty=1.2"),
    "presence penalty": (dict(edit=present), causes.PENALTY, "presence_penalty=0.5"),
    "frequency penalty": (dict(edit=frequent), causes.PENALTY, "frequency_penalty=0.3"),
    "logit bias": (dict(edit=raised), causes.LOGIT_BIAS, "(id 40) 2.5"),
    "a token that is forbidden": (dict(edit=forbidden), causes.LOGIT_BIAS, "(id 41) -"),
    "min_tokens": (dict(edit=without_eos), causes.ENDS, "before 6 tokens"),
    "logps one late": (dict(report_as=one_late), causes.SHIFTED, "token t-1"),
    "logps one early": (dict(report_as=one_early), causes.SHIFTED, "token t+1"),
    "answers turned": (dict(deal=lambda x: x[::-1]), causes.ORDER, "by index"),
    "last token lost": (dict(read=lambda _: lambda t: t[:-1]), causes.TOKENS, "last token"),
    "no BOS": (dict(read=lambda _: lambda t: t[1:]), causes.TOKENS, ""),
    "BOS twice": (dict(read=bos_twice), causes.TOKENS, ""),
    "a blank more": (dict(read=a_blank_more), causes.TOKENS, "' ' at its end"),
    "system prompt": (dict(read=with_system), causes.TEMPLATE, "a system prompt"),
    "no template": (dict(read=without_template), causes.TEMPLATE, "no chat template"),
    "a template": (dict(read=templated), causes.TEMPLATE, ""),  # of a prompt that is a text
}  # fmt: skip


# Where 16 bits are rounded, a last bit of fp32 may become one of theirs.
LEFT = {"model in bf16": 5e-3, "head in bf16": 5e-4, "head in fp16": 2e-4}
TEXTS = ("a template", "no BOS", "BOS twice")


@pytest.mark.parametrize("planted", PLANTS)
def test_a_cause_is_named(policy, planted):
    fields, name, part = PLANTS[planted]
    made = {key: value(policy) if key == "read" else value for key, value in fields.items()}
    given = PROMPTS if planted in TEXTS else MESSAGES
    found, names = found_by(policy, FaultyEngine(**made), given)
    assert names == [name] and not found.ok
    (cause,) = found.causes
    assert part in cause.advice and cause.before == pytest.approx(found.mean)
    assert cause.after == pytest.approx(found.left)
    assert found.left < LEFT.get(planted, min(2e-5, found.mean / 10)) < found.mean


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SERVED = {  # family, the trainer's configuration, the server's, and the cause
    "theta": ("llama", {}, {"rope_parameters": {**ROPE, "rope_theta": 5e5}}, causes.ROPE),
    "linear": ("llama", {}, {"rope_parameters": {"rope_type": "linear", "factor": 4.0,
                                                 "rope_theta": 10000.0}}, causes.ROPE),
    "window": ("mistral", {}, {"sliding_window": None}, causes.WINDOW),
    "window of gemma2": ("gemma2", {}, {"layer_types": ["full_attention"] * 2}, causes.WINDOW),
    "softcap": ("gemma2", {}, {"final_logit_softcapping": 2.0}, causes.CAP),
    "no softcap": ("gemma2", {}, {"final_logit_softcapping": None}, causes.CAP),
    "no softcap of attention": ("gemma2", {}, {"attn_logit_softcapping": None}, causes.CONFIG),
    "eps": ("llama", {"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6}, causes.CONFIG),
    "tied": ("llama", {}, {"tie_word_embeddings": True}, causes.TIED),
}  # fmt: skip


def policy_of(family, **fields):
    tokenizer = tokenizer_with_bos()
    model = tiny_model(
        family, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **fields
    )
    if "rms_norm_eps" in fields:  # shows where states are small
        model.get_input_embeddings().weight.data.mul_(0.005)
    return Policy(model, tokenizer)


@pytest.mark.parametrize("planted", SERVED)
def test_another_configuration_is_served(planted):
    family, own, changes, name = SERVED[planted]
    policy, server = policy_of(family, **own), policy_of(family, **{**own, **changes})
    tied = changes.get("tie_word_embeddings", False)
    weights = {k: v for k, v in policy.lm.state_dict().items() if not (tied and "lm_head" in k)}
    server.lm.load_state_dict(weights, strict=False)
    found, names = found_by(policy, FaultyEngine(keeps=server))
    assert names == [name] and found.left < min(2e-5, found.mean / 10)


def test_rounded_weights(policy):
    server = policy.frozen_copy()
    for name, weight in server.lm.named_parameters():
        if "proj" in name:
            scale = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / scale).round() * scale)
    found, names = found_by(policy, FaultyEngine(keeps=server))
    assert names == [causes.QUANTIZED] and "int8" in found.causes[0].advice


def test_a_model_in_bf16_by_other_kernels_is_told_by_its_correlation(policy):
    class Eager(FaultyEngine):
        def update(self, policy, version):
            super().update(policy, version)
            self.policy.generation_attn = "eager"

    found, names = found_by(policy, Eager(model_dtype=torch.bfloat16), sampling=LONGER)
    assert names == [causes.MODEL] and found.left > 0.1 * found.mean


def test_an_adapter_that_is_not_loaded():
    from peft import LoraConfig, get_peft_model

    base = policy_of("llama")
    special = {"eos_token_id": base.tokenizer.eos_token_id}
    model = tiny_model("llama", vocab_size=len(base.tokenizer), **special)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    policy = Policy(adapted, base.tokenizer)
    assert found_by(policy, FaultyEngine())[1] == []
    found, names = found_by(policy, FaultyEngine(keeps=base))
    assert names == [causes.ADAPTER] and found.left < 2e-5


def test_a_completion_that_ends_too_early(policy):
    class Stops(FaultyEngine):
        def complete(self, *arguments):
            done = super().complete(*arguments)
            return done._replace(ids=done.ids[:3], logps=done.logps[:3])

    found, names = found_by(policy, Stops())
    assert names == [causes.ENDS] and not found.ok and found.cut_off > 0 and found.mean < 1e-5


def test_an_engine_that_is_right_has_no_cause(policy):
    """Of one token; top_k and replay: test_diagnosis."""
    one = SAMPLING.model_copy(update={"max_new_tokens": 1})
    found, names = found_by(policy, FaultyEngine(), sampling=one)
    assert names == [] and found.ok and found.rest == "noise of the kernels"


FP32 = torch.float32
OWN = [("qwen2", BF16), ("mistral", FP32), ("gemma2", FP32), ("gemma2", BF16), ("granite", FP32),
       ("cohere", BF16)]  # fmt: skip


@pytest.mark.parametrize(("family", "dtype"), OWN)
def test_our_own_engine_has_no_cause(family, dtype):
    policy = policy_of(family)
    policy.lm.to(dtype)
    long = ["What is 12 + 30? The answer is 42. " * 6, "4"]
    found, names = found_by(policy, TransformersEngine(policy), long)
    assert names == [] and found.ok, found


def unknown(z, prompt, ids):
    return z + 0.5 * torch.sin(torch.arange(len(z)) + float(z[0]))


@pytest.mark.parametrize("planted", ["logits", "prompt", "constant", "noise"])
def test_what_is_not_known_has_no_name(policy, planted):
    engine = {
        "logits": FaultyEngine(edit=unknown),
        "prompt": FaultyEngine(read=lambda tokens: [40, 50, 60, *tokens[3:]]),
        "constant": FaultyEngine(shift=0.2),
        "noise": FaultyEngine(report_as=lambda x: x - 0.1 * torch.rand(
            x.shape, generator=torch.Generator().manual_seed(len(x)))),
    }[planted]  # fmt: skip
    found, names = found_by(policy, engine)
    assert names == [] and not found.ok and found.left == found.mean
    assert found.rest.startswith("not found")


def test_the_trainers_own_noise(policy, monkeypatch):
    found, _ = found_by(policy, FaultyEngine())
    full, half = found.own_noise
    assert (full.dtype, half.dtype) == ("float32", "bfloat16")
    assert full.mean < 1e-5 < 1e-3 < half.mean < 0.1 and full.share == 0
    from grpo_fast.doctor.recompute import BUDGET, Recomputed

    packed = Recomputed._packed

    def wrong(self, policy, prompts, budget=BUDGET):
        states = packed(self, policy, prompts, budget)
        return states * 2 if budget == 1 else states

    monkeypatch.setattr(Recomputed, "_packed", wrong)
    full, half = found_by(policy, FaultyEngine())[0].own_noise
    assert full.mean > 0.1 and 0.5 < full.share <= 1 and half.share > 0.5
