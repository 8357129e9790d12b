"""Tests of the LoRA adapters that the engine `vllm-server` sends to simulated vLLM servers.

A server receives the base weights once. Each later update sends only the adapter.
"""

import copy
import re
import threading

import peft
import pytest
import torch
from safetensors.torch import load_file

from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout.vllm import transfer
from grpo_fast.rollout.vllm.answers import ServerError
from grpo_fast.train.models.policy import Policy
from tests.rollout.test_vllm_server import generate
from tests.rollout.vllm_stand_in import FINISH, LOAD, UNLOAD, UPDATE, StandIn, difference, engine_of
from tests.tiny import SYMBOLS, tiny_model

# Largest allowed difference of log-probs, in nats. It is not 0, because the simulated server merges
# the adapter into its weights, which rounds differently.
CLOSE = 1e-4
LIMITS = {"max_lora_rank": 8, "target_modules": None}


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
        merged = transfer.weights_of(policy.lm, merged=True)
    name = "model.layers.0.mlp.up_proj.weight"
    base = transfer.weights_of(policy.lm, merged=False)[name]
    assert not torch.equal(merged[name], base)
    for name, p in policy.model.named_parameters():
        weight, version = before[name]
        assert torch.equal(p, weight) and p._version == version, name


@pytest.fixture
def servers(impatient):
    """Yield two servers with --enable-lora, whose base weights differ from those of the policy."""
    base = Policy(tiny_model("llama", vocab_size=14), build_symbol_tokenizer(SYMBOLS))
    made = [StandIn(base), StandIn(base)]
    for server in made:
        server.lora = {"max_lora_rank": 8, "target_modules": None}
    yield made
    for server in made:
        server.stop()


def test_the_base_weights_are_computed_and_sent_once(policy, server, monkeypatch, spied):
    engine = engine_of(policy, server)
    writes = spied(transfer, "write_adapter")
    for version in (0, 1, 0):
        change(policy)
        for _ in range(2):  # a version of the adapter is sent once
            engine.update(policy, version)
        rollout = generate(policy, engine)
        assert difference(policy, rollout) < CLOSE
        assert rollout.weight_version.tolist() == [version] * 12
        monkeypatch.setattr(transfer, "weights_of", lambda *_, **__: pytest.fail("computed"))
    change(policy)
    assert difference(policy, generate(policy, engine)) > 0.01
    assert server.calls[UPDATE] == server.calls[FINISH] == 1 and server.versions == [
        engine.names[0]
    ]
    assert len(writes) == server.calls[LOAD] == 3 and server.calls[UNLOAD] == 2
    assert list(server.adapters) == [engine.names[1]]  # the server has unloaded the older versions


def test_a_restarted_server_receives_base_and_adapter_again(policy, servers):
    engine = engine_of(policy, *servers)
    engine.update(policy, 0)
    servers[0].stop()
    servers[0].start()
    rollout = generate(policy, engine)
    assert difference(policy, rollout) < CLOSE and len(rollout) == 12
    assert servers[0].calls[UPDATE] == 2 and servers[1].calls[UPDATE] == 1
    servers[1].adapters.clear()
    assert difference(policy, generate(policy, engine)) < CLOSE
    assert servers[1].calls[UPDATE] == 1 and servers[1].calls[LOAD] == 2


def test_of_several_ranks_the_first_one_sends_the_adapter(policy, server, caplog):
    first, second = engine_of(policy, server), engine_of(policy, server)
    second.run, second.rank = first.run, 1  # both engines are ranks of one run
    late = threading.Timer(0.2, first.update, (policy, 0))
    late.start()
    second.update(policy, 0)  # waits for the first rank
    late.join()
    assert difference(policy, generate(policy, second)) < CLOSE
    assert server.calls[LOAD] == 1
    first.update(policy, 1)
    server.faults["/v1/models"] = [500]
    second.update(policy, 1)  # looks again after the error
    assert not server.faults["/v1/models"] and "is left out" not in caplog.text


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


def test_if_one_server_lacks_the_option_all_receive_merged_weights(policy, servers):
    servers[1].lora = None
    engine = engine_of(policy, *servers)
    sent = transfer.weights_of(policy.lm)
    engine.update(policy, 0)
    assert not servers[0].adapters and servers[0].calls[UPDATE] == servers[1].calls[UPDATE] == 1
    received = servers[0].policy.lm.state_dict()
    assert all(torch.equal(tensor, received[name]) for name, tensor in sent.items())
    assert difference(policy, generate(policy, engine)) < CLOSE


def test_an_adapter_that_vllm_would_not_use_in_full_is_merged(policy, server, caplog):
    server.lora["target_modules"] = ["q_proj", "k_proj"]
    engine = engine_of(policy, server)
    engine.update(policy, 0)
    assert f"because {server.url} cannot apply model.layers.0." in caplog.text
    assert difference(policy, generate(policy, engine)) < CLOSE and not server.calls[LOAD]


def two_adapters() -> Policy:
    policy = adapted()
    policy.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    policy.model.base_model.set_adapter(["default", "second"])
    return policy


@pytest.mark.parametrize(
    ("build_policy", "message"),
    [
        (adapted, None),
        (two_adapters, "cannot apply the adapter second, because only one is sent"),
        (lambda: adapted(rank_pattern={"q_proj": 9}),
         "cannot apply .*0.self_attn.q_proj, whose rank 9 is above --max-lora-rank 8"),
        (lambda: adapted(modules_to_save=["norm"]), "cannot apply .*modules_to_save.* trained"),
        (lambda: adapted(modules_to_save=["norm"], inference_mode=True), "cannot apply .*to_save"),
        (lambda: adapted(trainable_token_indices=[2], inference_mode=True),
         "cannot apply model.embed_tokens.* trained"),
        (lambda: adapted(target_modules=["embed_tokens"]),
         "cannot apply model.embed_tokens, which vLLM would ignore"),
    ],
)  # fmt: skip
def test_adapters_that_a_server_takes(caplog, build_policy, message):
    assert transfer.takes_adapter(build_policy(), LIMITS, "") == (message is None)
    assert re.search(message or "^$", caplog.text)


def test_an_adapter_of_renamed_modules_is_merged(policy, monkeypatch, caplog):
    """Check that an adapter is merged if vLLM has no module with the name of an adapted module.

    vLLM ignores matrices with unknown names, so it would sample with the base weights alone.
    """
    original = transfer.weights_of

    def renamed(lm, *, merged):
        state = original(lm, merged=merged)
        return {name.replace("q_proj", "query"): tensor for name, tensor in state.items()}

    monkeypatch.setattr(transfer, "weights_of", renamed)
    assert not transfer.takes_adapter(policy, LIMITS, "")
    assert "cannot apply model.layers.0.self_attn.q_proj" in caplog.text


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
    for merged in (True, False):
        assert set(transfer.weights_of(policy.lm, merged=merged)) == names


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
    assert transfer.weights_of(policy.lm, merged=False).keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(merged[name], tensor), name


@pytest.mark.parametrize("settings", [{"modules_to_save": ["embed_tokens"]},
                                      {"target_modules": ["embed_tokens"]}])  # fmt: skip
def test_an_adapter_of_one_of_two_tied_weights_is_refused(settings):
    """Check that an error is raised, because vLLM would use the embedding as its head."""
    policy = adapted("qwen2", **settings)
    assert "lm_head.weight" not in transfer.weights_of(policy.lm, merged=False)
    with pytest.raises(ValueError, match="lm_head.weight: expected .*; leave both out of"):
        transfer.weights_of(policy.lm)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_adapters_sample_as_the_policy_does(server, kind):
    policy = KINDS[kind]()
    if kind == "dora":
        server.lora = None  # with the option, vLLM refuses DoRA, and the stand-in does not
    engine = engine_of(policy, server)
    for version in (0, 1):
        change(policy)
        engine.update(policy, version)
        assert difference(policy, generate(policy, engine)) < CLOSE
    assert not server.calls[LOAD] and server.calls[UPDATE] == 2


def test_an_adapter_that_a_server_cannot_load_is_explained(policy, server):
    engine = engine_of(policy, server)
    server.faults[LOAD] = [404]
    with pytest.raises(ValueError, match="UPDATING=1; .* to read the trainer's folder .*TMPDIR"):
        engine.update(policy, 0)
    server.faults[LOAD] = 500
    with pytest.raises(ServerError, match="no vLLM server has the weights .*told to say 500"):
        engine.update(policy, 0)
    assert server.calls[LOAD] == 4 and server.calls[UPDATE] == 1


def test_the_files_of_an_adapter(policy, tmp_path):
    """Check that the files contain the active adapter, and that only the writer writes them."""
    policy.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    transfer.write_adapter(policy, str(tmp_path), is_writer=False)
    assert not any(tmp_path.iterdir())
    transfer.write_adapter(policy, str(tmp_path))
    given = load_file(tmp_path / "adapter_model.safetensors")
    assert len(given) == 2 * len(transfer.adapted_modules(policy.lm))
    assert peft.PeftConfig.from_pretrained(str(tmp_path)).r == 4
