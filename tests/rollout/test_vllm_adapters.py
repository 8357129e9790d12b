"""Tests of the weights that vLLM receives from a policy with an adapter."""

import copy

import peft
import pytest
import torch

from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout.vllm import transfer
from grpo_fast.train.policy import Policy
from tests.rollout.test_vllm_server import generate
from tests.rollout.vllm_stand_in import UPDATE, StandIn, difference, engine_of
from tests.tiny import SYMBOLS, tiny_model

# Largest allowed difference of log-probs, in nats. It is not 0, because the simulated server merges
# the adapter into its weights, which rounds differently.
CLOSE = 1e-4


def adapted(family: str = "llama", *, is_shared: bool = False, **settings) -> Policy:
    """Return a tiny policy with a random LoRA adapter.

    Args:
        family: the model family.
        is_shared: use one MLP for both layers, so that its modules have two names.
        settings: fields of `LoraConfig`.
    """
    torch.manual_seed(0)
    given = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False}
    model = tiny_model(family, vocab_size=14)
    if is_shared:
        model.model.layers[1].mlp = model.model.layers[0].mlp
    model = peft.get_peft_model(model, peft.LoraConfig(**{**given, **settings}))
    return Policy(model, build_symbol_tokenizer(SYMBOLS))


def change(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.trainable():
            parameter.normal_(std=0.2)


@pytest.fixture
def policy() -> Policy:
    return adapted()


def test_merged_weights_in_bf16_never_touch_the_base():
    """Check that no number of transfers changes the base, as merging in place would in bf16."""
    policy = adapted()
    policy.model.bfloat16()
    before = {name: (p.clone(), p._version) for name, p in policy.model.named_parameters()}
    for _ in range(3):
        merged = transfer.weights_of(policy.lm)
    name = "model.layers.0.mlp.up_proj.weight"
    base = policy.lm.get_submodule("model.layers.0.mlp.up_proj").get_base_layer().weight
    assert not torch.equal(merged[name], base)
    for name, p in policy.model.named_parameters():
        weight, version = before[name]
        assert torch.equal(p, weight) and p._version == version, name


@pytest.fixture
def server(impatient):
    """Yield a server of the model without an adapter, whose weights differ from the policy's."""
    made = StandIn(Policy(tiny_model("llama", vocab_size=14), build_symbol_tokenizer(SYMBOLS)))
    yield made
    made.stop()


def test_another_policy_is_sent_whole(policy, server):
    engine = engine_of(policy, server)
    engine.update(policy, 0)
    plain = Policy(tiny_model("llama", vocab_size=14), policy.tokenizer)
    engine.update(plain, 1)
    assert difference(plain, generate(plain, engine)) < CLOSE
    other = adapted(r=2)
    engine.update(other, 1)  # same version number, but a different model
    assert difference(other, generate(other, engine)) < CLOSE
    assert server.calls[UPDATE] == 3


def two_adapters() -> Policy:
    policy = adapted()
    policy.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    policy.model.base_model.set_adapter(["default", "second"])
    return policy


def trained_norm() -> Policy:
    policy = adapted()
    policy.lm.model.norm.weight.requires_grad_()
    return policy


# The last two kinds of adapter are not LoRA matrices, and DoRA also scales the sum.
KINDS = {
    "two": two_adapters,
    "norm": trained_norm,
    "dora": lambda: adapted(use_dora=True),
    "saved": lambda: adapted(modules_to_save=["embed_tokens", "mlp", "norm"]),
    "tokens": lambda: adapted(trainable_token_indices=[2, 5]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_names_are_those_of_the_model_without_adapters(kind):
    """Check that no name of a peft wrapper is sent, also after a further adapter is added."""
    names = set(tiny_model("llama", vocab_size=14).state_dict())
    policy = KINDS[kind]()
    if kind == "saved":
        policy.model.add_adapter("idle", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    change(policy)
    assert set(transfer.weights_of(policy.lm)) == names


@pytest.mark.parametrize(
    "settings",
    [
        {"is_shared": True},
        {"family": "qwen2", "target_modules": ["q_proj"], "lora_bias": True},
        {"family": "mixtral", "target_modules": ["q_proj"],
         "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ],
)  # fmt: skip
def test_merged_weights_are_those_that_peft_merges(settings):
    """Check modules with two names, biases of LoRA matrices, and wrappers inside wrappers."""
    policy = adapted(**settings)
    change(policy)
    merged = transfer.weights_of(policy.lm)
    expected = transfer.weights_of(copy.deepcopy(policy.model).merge_and_unload())
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor), name


@pytest.mark.parametrize("settings", [{"modules_to_save": ["embed_tokens"]},
                                      {"target_modules": ["embed_tokens"]}])  # fmt: skip
def test_an_adapter_of_one_of_two_tied_weights_is_refused(settings):
    """Check that an error is raised, because vLLM would use the embedding as its head."""
    policy = adapted("qwen2", **settings)
    with pytest.raises(ValueError, match="lm_head.weight: expected .*; leave both out of"):
        transfer.weights_of(policy.lm)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_sample_as_the_policy_does(server, kind):
    policy = KINDS[kind]()
    engine = engine_of(policy, server)
    for version in (0, 1):
        change(policy)
        engine.update(policy, version)
        assert difference(policy, generate(policy, engine)) < CLOSE
    assert server.calls[UPDATE] == 2
