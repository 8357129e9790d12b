"""Tests of the engine `vllm` with a simulation of the class `vllm.LLM`."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from grpo_fast import rollout as rollouts
from grpo_fast.rollout import Completion, EngineError, Sampling, awake
from grpo_fast.rollout.engine import Request, VLLMOptions, warn_without_support
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.rollout.vllm.answers import StaleWeights, VLLMRequest
from grpo_fast.rollout.vllm.local import VLLMEngine, build
from grpo_fast.rollout.vllm.transfer import repack_heads
from grpo_fast.train.config import EvalConfig
from grpo_fast.train.policy import Policy
from tests.tiny import tiny_policy

PROMPTS = ["3 1 2 =", "5 ="]


@pytest.fixture
def policy():
    return tiny_policy("qwen2")


class Options(Sampling):
    vllm: VLLMOptions = VLLMOptions()


class StandIn:
    """Replacement for the class `vllm.LLM`, which runs in this process and needs no vLLM.

    It samples with `copy`, a copy of a tiny policy, into which it loads weights.
    `calls` records the names of the methods that the engine calls.
    """

    policy: Policy  # set by the fixture `vllm`

    def __init__(self, model: str = "", **given) -> None:
        self.given = given
        if model:
            self.config = json.loads((Path(model) / "config.json").read_text())
        self.calls: list[str] = []
        self.repacked = 0
        self.version = "default"
        self.copy = StandIn.policy.frozen_copy()
        end = SimpleNamespace(shutdown=lambda: self.calls.append("shutdown"))
        self.llm_engine = SimpleNamespace(engine_core=end)

    def apply_model(self, function):
        assert function is repack_heads
        assert self.calls[-1] == "reload_weights"
        self.repacked += 1

    def collective_rpc(self, method, kwargs):
        self.calls.append(method)
        state = self.copy.lm.state_dict()
        for name, tensor in kwargs["weights_iterator"]:
            state[name].copy_(tensor)

    def update_weight_version(self, version):
        self.version = version

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {' '.join(tags)}")

    def generate(self, prompts, parameters, use_tqdm):
        sample = TransformersEngine(self.copy).generate
        assert all(wanted.n == 1 or wanted.temperature > 0 for wanted in parameters)
        for prompt, wanted in zip(prompts, parameters, strict=True):
            sampling = Sampling(max_new_tokens=wanted.max_tokens, temperature=wanted.temperature)
            ids = [prompt["prompt_token_ids"]]
            found = sample(ids, sampling, group_size=wanted.n, seed=wanted.seed)
            yield SimpleNamespace(outputs=[self.output(*one) for one in enumerate(found)])

    def output(self, index, one):
        pairs = zip(one.ids, one.logps.tolist(), strict=True)
        logps = [{t: SimpleNamespace(logprob=x)} for t, x in pairs]
        return SimpleNamespace(
            index=index, token_ids=tuple(one.ids), logprobs=logps, sampling_mask=None,
            finish_reason="stop" if one.finish_reason == "eos" else "length",
            weight_versions=[SimpleNamespace(version=self.version, start=0, end=len(one.ids))],
        )  # fmt: skip


@pytest.fixture
def vllm(policy, monkeypatch):
    """Replace `vllm` and a submodule with simulations, and return the simulated `vllm`.

    Its class `LLM` is `StandIn`, and its `SamplingParams` only stores its arguments.
    """
    StandIn.policy = policy
    found, distributed = ModuleType("vllm"), ModuleType("vllm.distributed")
    found.LLM, found.SamplingParams = StandIn, SimpleNamespace
    distributed.cleanup_dist_env_and_memory = lambda: None
    monkeypatch.setitem(sys.modules, "vllm", found)
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return found


def generate(policy, engine, **options):
    sampling = Sampling(**{"max_new_tokens": 6, **options})
    return rollouts.generate(policy, PROMPTS, sampling, group_size=3, seed=1, engine=engine)


@pytest.mark.parametrize(
    ("frees_memory", "moved"),
    [
        (False, ["reload_weights", "reset", "reload_weights", "reset"]),
        (True, ["reload_weights", "reset", "sleep 2", "wake weights",
                "reload_weights", "wake kv_cache", "reset", "sleep 2", "wake weights",
                "reload_weights", "wake kv_cache", "reset", "sleep 2"]),
    ],
)  # fmt: skip
def test_it_sleeps_while_the_policy_trains(policy, vllm, frees_memory, moved):
    """Check which methods of vLLM the engine calls when it sleeps and wakes.

    The engine wakes twice with the same weights and once with new weights. If vLLM frees its
    memory, the engine must send the weights after every wake.
    """
    engine = VLLMEngine(policy, llm := StandIn(), frees_memory=frees_memory)
    for version in (4, 4, 5):
        with awake(engine, policy, version):
            rollout = generate(policy, engine)
            assert rollout.weight_version.tolist() == [version] * 6
            assert engine.policy is policy
        engine.sleep()  # has no effect, because the engine already sleeps
    assert llm.calls == moved and llm.repacked == moved.count("reload_weights")


def test_a_tied_head_is_packed_again():
    """Check that `repack_heads` updates the packed weights of the LM head and nothing else.

    On a CPU, vLLM computes the head from packed weights, which loading tied weights does not
    update.
    """
    packed = []
    method = SimpleNamespace(process_weights_after_loading=packed.append)

    class ParallelLMHead(torch.nn.Module):
        quant_method = method

    class OtherLayer(ParallelLMHead):
        pass

    head, other, on_gpu = ParallelLMHead(), OtherLayer(), ParallelLMHead()
    head.cpu_linear = other.cpu_linear = print
    repack_heads(torch.nn.Sequential(head, other, on_gpu))
    assert packed == [head]


def test_an_engine_without_weights_is_not_waited_for(policy, vllm):
    engine = VLLMEngine(policy, StandIn(), frees_memory=True)
    with pytest.raises(EngineError, match="expected update before generate"):
        generate(policy, engine)
    with awake(engine, policy, 0):
        pass
    with pytest.raises(EngineError, match="expected update before generate"):
        generate(policy, engine)  # vLLM has discarded the weights


def test_completions_by_other_weights_are_refused(policy, vllm):
    engine = VLLMEngine(policy, llm := StandIn(), frees_memory=False)
    with awake(engine, policy, 3):
        llm.version = "2"
        with pytest.raises(StaleWeights, match="by the weights 3, got some by ..2"):
            generate(policy, engine)


def test_arguments_of_the_llm(policy, vllm):
    """Check the arguments of `vllm.LLM`, and that the saved configuration names the model's class.

    If the configuration named no class, vLLM would treat a qwen3 model as an embedding model.
    """
    assert policy.lm.config.architectures is None  # no class, because the model was never saved
    options = Options(vllm=VLLMOptions(options={"max_model_len": 64, "seed": 5}))
    with build(policy, options) as engine:
        given = engine.llm.given
        assert given["load_format"] == "dummy" and given["logprobs_mode"] == "processed_logprobs"
        assert given["dtype"] == "float32" and not given["enable_sleep_mode"]
        assert given["max_model_len"] == 64 and given["seed"] == 5
        assert engine.llm.config["architectures"] == ["Qwen2ForCausalLM"]
    assert engine.llm.calls == ["shutdown"]


def test_an_engine_that_cannot_be_built(policy, vllm, monkeypatch):
    def refuse(**given):
        raise ValueError("head_dim=8")

    vllm.LLM = refuse
    with pytest.raises(ValueError, match="rollout.engine: vllm refuses qwen2 .*head_dim=8"):
        build(policy, Options())
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"vllm expects pip install 'grpo_fast\[vllm\]'"):
        build(policy, Options())
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="expected vllm-server because several processes train"):
        build(policy, Options())


def test_a_missing_support_is_logged_once_and_only_if_the_loss_needs_it(policy, caplog):
    warn_without_support.cache_clear()
    done = [[Completion([5], torch.zeros(1), "length", 1)]]
    for sampling in (Sampling(max_new_tokens=1), EvalConfig(max_new_tokens=1, top_p=0.9)):
        VLLMRequest(policy, Request(PROMPTS[:1], sampling, 1, 0), 1, "1").in_groups(done)
    assert "top_p" not in caplog.text
    truncating = Request(PROMPTS[:1], Sampling(max_new_tokens=1, top_p=0.9), 1, 0)
    for _ in range(2):
        VLLMRequest(policy, truncating, 1, "1").in_groups(done)
    assert caplog.text.count("top_p and top_k kept") == 1
