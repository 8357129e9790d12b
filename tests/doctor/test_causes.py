"""Tests that the doctor names each of the eight causes if it is planted in an engine.

The engine with planted faults shares no code with the doctor. An error in shared code would change
both sides of the doctor's comparison, and no test could find it. The engine runs one forward pass
for each token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from grpo_fast import Support
from grpo_fast.data.tokenizer import build_bpe_tokenizer
from grpo_fast.doctor import Diagnosis, causes, diagnose
from grpo_fast.doctor.causes import shipped_settings
from grpo_fast.rollout import Completion, Engine, Sampling
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.train.policy import Policy
from tests.tiny import TEXTS, tiny_model

BOS = "<|bos|>"
CHAT = (
    BOS + "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PROMPTS = ["What is 12 + 30?", "4 more", "The answer is what she buys, 7"]
MESSAGES = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
SAMPLING = Sampling(max_new_tokens=10, temperature=0.7)


def found_by(
    policy: Policy, engine: Engine, sampling: Any = SAMPLING, prompts: Any = MESSAGES,
    **options: Any,
) -> tuple[Diagnosis, list[str]]:  # fmt: skip
    """Run the doctor on an engine. Return the diagnosis and the names of the found causes."""
    found = diagnose(policy, engine, prompts, sampling, **options)
    return found, [cause.name for cause in found.causes]


@dataclass
class FaultyEngine(Engine):
    """Engine that samples correctly by default. Setting a field plants one fault."""

    temperature: float | None = None  # replaces the requested temperature
    top_k: int = 0  # replaces the requested top_k
    penalty: float = 1.0  # applies this repetition penalty, although none was requested
    raw: bool = False  # reports log-probabilities from before temperature and truncation
    names_kept: bool = False  # also reports the tokens that truncation kept (not a fault)
    read: Callable[[list[int]], list[int]] = list  # changes the ids of a prompt
    keeps: Policy | None = None  # samples with this policy, and ignores weight updates
    model_dtype: torch.dtype | None = None  # computes in this dtype instead of the policy's
    answers: int | None = None  # reports this weight version instead of the current one
    stops: int | None = None  # cuts completions off at this length
    report_as: Callable[[torch.Tensor], torch.Tensor] = torch.clone  # changes reported logps

    def update(self, policy: Policy, version: int) -> None:
        self.policy = self.keeps or policy
        if self.model_dtype is not None:
            self.policy = self.policy.frozen_copy()
            self.policy.lm.to(self.model_dtype)
        self.version = version if self.answers is None else self.answers

    def sample(self, request):
        self.generator = torch.Generator().manual_seed(7)
        with self.policy.generation():
            return [
                self.complete(self.read(list(prompt)), request)
                for prompt in request.prompts
                for _ in range(request.group_size)
            ]

    def complete(self, prompt: list[int], request: Any) -> Completion:
        ids: list[int] = []
        logps: list[float] = []
        kept: list[torch.Tensor] = []
        longest = self.stops or request.sampling.max_new_tokens
        while len(ids) < longest and not (ids and ids[-1] in self.policy.eos_ids):
            tokens = torch.tensor([prompt + ids])
            z = self.policy.lm(input_ids=tokens, use_cache=False).logits[0, -1].float()
            p = self.distribution(z, tokens[0], request.sampling)
            token = int(torch.multinomial(p, 1, generator=self.generator))
            ids.append(token)
            logps.append(float((z.log_softmax(-1) if self.raw else p.log())[token]))
            kept.append(p.nonzero()[:, 0].int())
        reported = self.report_as(torch.tensor(logps))
        support = Support(torch.cat(kept), torch.tensor([0, *map(len, kept)]).cumsum(0))
        why = "eos" if ids[-1] in self.policy.eos_ids else "length"
        return Completion(ids, reported, why, self.version, support if self.names_kept else None)

    def distribution(self, z: torch.Tensor, seen: torch.Tensor, sampling: Any) -> torch.Tensor:
        z = z.clone()
        seen = seen.unique()
        z[seen] = torch.where(z[seen] > 0, z[seen] / self.penalty, z[seen] * self.penalty)
        p = (z / (self.temperature or sampling.temperature)).softmax(-1)
        top_k = self.top_k or sampling.top_k or len(p)
        p = torch.where(p >= p.topk(top_k).values[-1], p, 0.0)
        order = p.argsort(descending=True)
        before = (p / p.sum())[order].cumsum(0).roll(1)
        before[0] = 0
        p[order[before >= sampling.top_p]] = 0.0
        return p / p.sum()


def tokenizer_with_bos() -> Any:
    """Return a BPE tokenizer that adds a BOS token to every text.

    Its chat template adds BOS, too. An engine that tokenizes the rendered template as plain text
    would therefore add BOS twice.
    """
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_bpe_tokenizer(TEXTS, 280)
    tokenizer.add_special_tokens({"bos_token": BOS})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def policy_of(family: str = "llama", **fields: Any) -> Policy:
    tokenizer = tokenizer_with_bos()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return Policy(tiny_model(family, vocab_size=len(tokenizer), **special, **fields), tokenizer)


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
