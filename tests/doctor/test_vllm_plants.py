"""Tests that plant faults in a real vLLM server and check that the doctor names the faults.

`make test-vllm` runs these tests.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.doctor import causes
from grpo_fast.rollout import Engine, Sampling, build_engine
from grpo_fast.train.policy import Policy
from tests.doctor.test_causes import MESSAGES, found_by, policy_of
from tests.rollout.test_vllm_real import Process, options_of

pytestmark = pytest.mark.skipif(
    "GRPO_FAST_VLLM" not in os.environ, reason="vLLM: make test-vllm runs this against it"
)
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
SAMPLING = Sampling(max_new_tokens=24, temperature=0.8)
# For each planted fault: how to plant it, and the causes that the doctor must name. A fault is a
# dictionary of additional request fields, or a function that changes the token ids of the prompt.
REQUESTED: dict[str, tuple[Any, list[str]]] = {
    "nothing": ({}, []),
    "temperature lost": ({"temperature": 1.0}, [causes.TEMPERATURE]),
    "top_k": ({"top_k": 20}, [causes.TRUNCATION]),
    "penalty": ({"repetition_penalty": 1.1}, [causes.TRUNCATION]),
    "BOS twice": (lambda ids: [ids[0], *ids], [causes.PROMPT]),
    "last token lost": (lambda ids: ids[:-1], [causes.PROMPT]),
}


def smaller(seed: int = 0) -> Policy:
    policy = policy_of(seed=seed, **SIZES)
    with torch.no_grad():
        for parameter in policy.lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    return policy


@contextmanager
def serving(folder: Path, policy: Policy, dtype: str) -> Iterator[Engine]:
    policy.save(folder / "model")
    process = Process(folder / "model", "--dtype", dtype)
    try:
        with build_engine(policy, options_of(process)) as engine:
            yield engine
    finally:
        process.kill()


def test_causes_are_named_against_vllm(tmp_path, monkeypatch):
    policy = smaller()
    shipped = {"top_k": 20, "repetition_penalty": 1.1, "temperature": 0.6}
    found: dict[str, list[str]] = {}
    right: dict[str, list[str]] = {name: cause for name, (_, cause) in REQUESTED.items()}
    with serving(tmp_path / "float32", policy, "float32") as engine:
        server = engine.servers[0]
        update = engine.update
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
        engine.update = lambda _, version: update(smaller(seed=1), version)
        # Use a new version number, because the engine sends no weights under a version that the
        # server already has.
        found["other weights"] = found_by(policy, engine, SAMPLING, MESSAGES, version=4)[1]
        right["other weights"] = [causes.STALE]
    with serving(tmp_path / "bfloat16", policy, "bfloat16") as engine:
        found["bf16 server"] = found_by(policy, engine, SAMPLING, MESSAGES, version=3)[1]
    assert found == {**right, "bf16 server": [causes.DTYPE]}
