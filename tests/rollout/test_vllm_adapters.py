"""Tests of the LoRA adapters that the engine `vllm-server` sends to simulated vLLM servers.

A server receives the base weights once. Each later update sends only the adapter.
"""

import threading
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file

from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout.vllm import adapter, transfer
from grpo_fast.rollout.vllm import servers as servers_module
from grpo_fast.rollout.vllm.adapter import AdapterFolder
from grpo_fast.rollout.vllm.answers import ServerError
from grpo_fast.rollout.vllm.options import VLLMOptions
from grpo_fast.rollout.vllm.servers import VLLMServers, build
from grpo_fast.train.models.policy import Policy
from tests.rollout.test_vllm_server import generate
from tests.rollout.vllm_stand_in import FINISH, LOAD, UNLOAD, UPDATE, StandIn, difference, engine_of
from tests.tiny import SYMBOLS, tiny_model

WEIGHTS = "rollout.vllm.urls"
# Largest allowed difference of log-probs, in nats. It is not 0, because the simulated server merges
# the adapter into its weights, which rounds differently.
CLOSE = 1e-4


def adapted(**settings) -> Policy:
    """Return a tiny policy with a random LoRA adapter. `settings` are fields of `LoraConfig`."""
    torch.manual_seed(0)
    given = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False}
    model = peft.get_peft_model(
        tiny_model("llama", vocab_size=14), peft.LoraConfig(**{**given, **settings})
    )
    return Policy(model, build_symbol_tokenizer(SYMBOLS))


def change(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.trainable():
            parameter.normal_(std=0.2)


@pytest.fixture
def policy() -> Policy:
    return adapted()


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


def checked(policy: Policy, *servers: StandIn, **options: float) -> VLLMServers:
    engine = engine_of(policy, *servers, **options)
    engine.check()
    return engine


def test_the_base_weights_are_sent_once(policy, server):
    engine = checked(policy, server)
    for version in range(3):
        change(policy)
        engine.update(policy, version)
        rollout = generate(policy, engine)
        assert difference(policy, rollout) < CLOSE
        assert rollout.weight_version.tolist() == [version] * 12
    change(policy)
    assert difference(policy, generate(policy, engine)) > 0.01
    assert server.calls[UPDATE] == server.calls[FINISH] == 1 and server.versions == [engine.base]
    assert server.calls[LOAD] == 3 and server.calls[UNLOAD] == 2
    assert list(server.adapters) == [engine.label]  # the server has unloaded the older versions


def test_an_update_of_the_adapter_computes_no_base_weights(policy, server, monkeypatch):
    engine = checked(policy, server)
    engine.update(policy, 0)
    monkeypatch.setattr(servers_module, "buckets", lambda *args, **options: pytest.fail("computed"))
    change(policy)
    engine.update(policy, 1)
    assert difference(policy, generate(policy, engine)) < CLOSE


def test_a_version_of_the_adapter_is_written_once(policy, server, spied):
    engine = checked(policy, server)
    writes = spied(AdapterFolder, "write")
    for version in (0, 0, 1, 1, 0):
        engine.update(policy, version)
    assert len(writes) == 3 and server.calls[LOAD] == 3
    other = adapted(r=2)
    engine.update(other, 0)  # same version number, but a different model
    assert len(writes) == 4 and difference(other, generate(other, engine)) < CLOSE


def test_a_restarted_server_receives_base_and_adapter_again(policy, servers):
    engine = checked(policy, *servers)
    engine.update(policy, 0)
    servers[0].stop()
    servers[0].start()
    rollout = generate(policy, engine)
    assert difference(policy, rollout) < CLOSE and len(rollout) == 12
    assert servers[0].calls[UPDATE] == 2 and servers[1].calls[UPDATE] == 1
    servers[1].adapters.clear()
    assert difference(policy, generate(policy, engine)) < CLOSE
    assert servers[1].calls[UPDATE] == 1 and servers[1].calls[LOAD] == 2


def test_of_several_ranks_the_first_one_sends_the_adapter(policy, server):
    first, second = checked(policy, server), checked(policy, server)
    second.run, second.rank = first.run, 1  # both engines are ranks of one run
    late = threading.Timer(0.2, first.update, (policy, 0))
    late.start()
    second.update(policy, 0)  # waits for the first rank
    late.join()
    assert difference(policy, generate(policy, second)) < CLOSE
    assert server.calls[LOAD] == 1


def test_another_policy_is_sent_whole(policy, server):
    engine = checked(policy, server)
    engine.update(policy, 0)
    plain = Policy(tiny_model("llama", vocab_size=14), policy.tokenizer)
    engine.update(plain, 1)
    assert difference(plain, generate(plain, engine)) < CLOSE
    other = adapted(r=2)
    engine.update(other, 1)  # same version number, but a different model
    assert difference(other, generate(other, engine)) < CLOSE
    assert server.calls[UPDATE] == 3


def test_a_server_without_the_option_receives_merged_weights(policy, servers, caplog):
    caplog.set_level("INFO")
    servers[1].lora = None
    engine = checked(policy, *servers)
    assert f"adapter merged: {servers[1].url} started without --enable-lora" in caplog.text
    sent = dict(pair for bucket in transfer.buckets(policy) for pair in bucket)
    engine.update(policy, 0)
    assert not servers[0].adapters and servers[0].calls[UPDATE] == servers[1].calls[UPDATE] == 1
    received = servers[0].policy.lm.state_dict()
    assert all(torch.equal(tensor, received[name]) for name, tensor in sent.items())
    assert difference(policy, generate(policy, engine)) < CLOSE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 9}, "expected a max_lora_rank of at least 9, the rank of the adapter, got 8"),
        ({"rank_pattern": {"q_proj": 16}}, "at least 16, the rank of the adapter, got 8"),
        ({"use_dora": True}, "low-rank matrices .*merged weights are sent.*, got use_dora"),
        ({"modules_to_save": ["norm"]}, "got modules_to_save"),
        ({"bias": "all"}, "got bias"),
        ({"target_modules": ["embed_tokens"]}, "the target module model.embed_tokens"),
    ],
)
def test_an_adapter_that_vllm_cannot_represent_is_refused(server, settings, message):
    options = SimpleNamespace(ahead=0, vllm=VLLMOptions(urls=[server.url]))
    with pytest.raises(ValueError, match=f"{WEIGHTS}: {server.url}: .*{message}"):
        build(adapted(**settings), options)
    assert not server.calls[UPDATE]


def test_weights_that_vllm_would_not_receive_are_refused(policy, server):
    server.lora["target_modules"] = ["q_proj", "k_proj"]
    with pytest.raises(ValueError, match="lora_target_modules that include down_proj.*k_proj"):
        checked(policy, server)
    server.lora["target_modules"] = None
    server.environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": False}
    with pytest.raises(ValueError, match="expected VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        checked(policy, server)
    policy.lm.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="the trained weight model.norm.weight"):
        adapter.check(policy, 8, None, "vllm")
    policy.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    policy.model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="the adapters default, second"):
        adapter.check(policy, 8, None, "vllm")


def test_renamed_modules_are_refused(policy, monkeypatch):
    """Check that an adapter is refused if vLLM has no module with the name of an adapted module.

    vLLM ignores matrices with unknown names, so it would sample with the base weights alone.
    """

    def renamed(lm, *, merged):
        state = transfer.checkpoint_tensors(lm, merged=merged)
        return {name.replace("q_proj", "query"): tensor for name, tensor in state.items()}

    adapter.check(policy, 8, None, "vllm")
    monkeypatch.setattr(adapter, "checkpoint_tensors", renamed)
    with pytest.raises(ValueError, match="the target module model.layers.0.self_attn.q_proj"):
        adapter.check(policy, 8, None, "vllm")


def test_a_folder_that_a_server_cannot_read_is_explained(policy, server):
    engine = checked(policy, server)
    server.faults[LOAD] = [404]
    with pytest.raises(ValueError, match="must be able to read the trainer's folder .*TMPDIR"):
        engine.update(policy, 0)


def test_a_refusal_of_the_server_is_quoted(policy, server):
    engine = checked(policy, server)
    server.faults[LOAD] = 500
    with pytest.raises(ServerError, match="no vLLM server has the weights .*told to say 500"):
        engine.update(policy, 0)
    assert server.calls[LOAD] == 3 and server.calls[UPDATE] == 1


def test_the_files_of_an_adapter(policy):
    """Check that a folder contains the active adapter in peft's format.

    With `is_writer=False`, the folder must stay empty.
    """
    policy.model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    folder = AdapterFolder()
    folder.write(policy, is_writer=False)
    assert not any(Path(folder.path).iterdir())
    folder.write(policy)
    given = load_file(Path(folder.path) / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(policy.model, adapter_name="default")
    assert given.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in given.items())
