"""Faults planted in a real vLLM server, and what the doctor names: `make test-vllm`."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.doctor import causes
from grpo_fast.rollout import Engine, Sampling, build_engine
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.models.policy import Policy
from tests.doctor.faulty import MESSAGES, found_by, policy_of
from tests.rollout.test_vllm_real import START_S, Process

pytestmark = pytest.mark.skipif(
    "GRPO_FAST_VLLM" not in os.environ, reason="vLLM: make test-vllm runs this against it"
)
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
SAMPLING = Sampling(max_new_tokens=24, temperature=0.8)
# What is requested of the server in addition, or done to the prompt, and the right cause.
REQUESTED: dict[str, tuple[Any, list[str]]] = {
    "nothing": ({}, []),
    "temperature lost": ({"temperature": 1.0}, [causes.TEMPERATURE]),
    "top_k": ({"top_k": 20}, [causes.TRUNCATION]),
    "penalty": ({"repetition_penalty": 1.1}, [causes.TRUNCATION]),
    "BOS twice": (lambda ids: [ids[0], *ids], [causes.PROMPT]),
    "last token lost": (lambda ids: ids[:-1], [causes.PROMPT]),
}
# The trainer's configuration, what the server's copy changes, and the right cause.
SERVED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "bf16 server": ("llama", {}, {"dtype": "bfloat16"}, causes.DTYPE),
    "window lost": ("mistral", {"sliding_window": 6}, {"sliding_window": None}, causes.ROPE),
    "softcap lost": ("gemma2", {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 50.0},
                     {"final_logit_softcapping": None}, causes.SOFTCAP),
}  # fmt: skip


def smaller(family: str, seed: int = 0, **fields: Any) -> Policy:
    policy = policy_of(family, seed=seed, **{**SIZES, **fields})
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    return policy


@contextmanager
def serving(folder: Path, policy: Policy, changes: dict[str, Any]) -> Iterator[Engine]:
    """Start a server with a copy of the policy whose configuration is changed."""
    saved = copy.deepcopy(policy.lm.config)
    for name in changes.keys() - {"dtype"}:
        setattr(policy.lm.config, name, changes[name])
    policy.save(folder / "model")
    policy.lm.config.__dict__.update(saved.__dict__)
    process = Process(folder / "model", dtype=changes.get("dtype", "float32"))
    try:
        options = load_recipe("sort", [
            "rollout.engine=vllm-server", f"rollout.vllm.urls=[{process.url}]",
            "rollout.vllm.timeout=120", f"rollout.vllm.patience={START_S}",
        ]).rollout  # fmt: skip
        with build_engine(policy, options) as engine:
            yield engine
    finally:
        process.kill()


def test_causes_are_named_against_vllm(tmp_path, monkeypatch):
    policy = smaller("llama")
    shipped = {"top_k": 20, "repetition_penalty": 1.1, "temperature": 0.6}
    found: dict[str, list[str]] = {}
    right: dict[str, list[str]] = {name: cause for name, (_, cause) in REQUESTED.items()}
    with serving(tmp_path, policy, {}) as engine:
        server, update = engine.links[0].server, engine.update
        ask = server.generate
        for name, (change, _) in REQUESTED.items():
            fields = {} if callable(change) else change
            read = change if callable(change) else list
            for field, value in shipped.items():
                monkeypatch.setattr(
                    policy.lm.generation_config, field, value if field in fields else None
                )
            server.generate = lambda prompt, wanted, *rest, read=read, fields=fields: ask(
                read(list(prompt)), wanted | fields, *rest
            )
            found[name] = found_by(policy, engine, SAMPLING, MESSAGES, version=3)[1]
        server.generate = ask
        engine.update = lambda _, version: update(smaller("llama", seed=1), version)
        found["other weights"] = found_by(policy, engine, SAMPLING, MESSAGES, version=3)[1]
        right["other weights"] = [causes.STALE]
    for name, (family, fields, changes, cause) in SERVED.items():
        policy = smaller(family, **fields)
        (tmp_path / name).mkdir()
        with serving(tmp_path / name, policy, changes) as engine:
            found[name] = found_by(policy, engine, SAMPLING, MESSAGES, version=3)[1]
        right[name] = [cause]
    assert found == right
