"""Faults planted in a real vLLM server, and what the doctor names: `make test-vllm`."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.doctor import Diagnosis, causes, diagnose
from grpo_fast.rollout import Engine, Sampling, build_engine
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.models.policy import Policy
from tests.doctor.faulty import tokenizer_with_bos
from tests.rollout.test_vllm_real import START_S, Process
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(
    "GRPO_FAST_VLLM" not in os.environ, reason="vLLM: make test-vllm runs this against it"
)
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
         "max_position_embeddings": 512}  # fmt: skip
TEXTS = ["What is 12 + 30?", "4 more apples and 3 more", "The answer is what she buys, 7",
         "Janet has 3 apples", "What is the answer? The answer is", "12"]  # fmt: skip
CHAT = [[{"role": "user", "content": text}] for text in TEXTS]
SAMPLING = Sampling(max_new_tokens=24, temperature=0.8)
NOTHING = "nothing"
Question = tuple[list[int], dict[str, Any]]  # the prompt, what is wanted
Edit = Callable[[list[int], dict[str, Any]], Question]


def policy_of(family: str = "llama", **changes: Any) -> Policy:
    tokenizer = tokenizer_with_bos()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = tiny_model(family, vocab_size=len(tokenizer), **{**SIZES, **special, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    return Policy(model, tokenizer)


def told(**values: Any) -> Edit:
    return lambda prompt, wanted: (prompt, wanted | values)


def read(change: Callable[[list[int]], list[int]]) -> Edit:
    return lambda prompt, wanted: (change(prompt), wanted)


def written(*pairs: tuple[str, str]) -> Edit:
    """The prompt's text with other words."""

    def change(ids: list[int]) -> list[int]:
        tokenizer = tokenizer_with_bos()
        text = tokenizer.decode(ids)
        for old, new in pairs:
            text = text.replace(old, new)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return read(change)


# name → (what the server is asked, the cause that is right)
ASKED: dict[str, tuple[Edit, str]] = {
    NOTHING: (told(), NOTHING),
    "temperature 0.6 for 0.8": (told(temperature=0.6), causes.TEMPERATURE),
    "temperature 2 for 0.8": (told(temperature=2.0), causes.TEMPERATURE),
    "top_p 0.9": (told(top_p=0.9), causes.TRUNCATION),
    "top_k 20": (told(top_k=20), causes.TRUNCATION),
    "min_p 0.05": (told(min_p=0.05), causes.TRUNCATION),
    "repetition penalty 1.1": (told(repetition_penalty=1.1), causes.PENALTY),
    "presence penalty 0.5": (told(presence_penalty=0.5), causes.PENALTY),
    "frequency penalty 0.3": (told(frequency_penalty=0.3), causes.PENALTY),
    "logit bias on one token": (told(logit_bias={"40": 2.5}), causes.LOGIT_BIAS),
    "min_tokens 24": (told(min_tokens=24), causes.ENDS),
    "BOS twice": (read(lambda ids: [tokenizer_with_bos().bos_token_id, *ids]), causes.TOKENS),
    "first token lost": (read(lambda ids: ids[1:]), causes.TOKENS),
    "last token lost": (read(lambda ids: ids[:-1]), causes.TOKENS),
    "system prompt": (
        written(("<|bos|>", "<|bos|>system: You are a helpful assistant.\n")), causes.TEMPLATE
    ),
    "another template": (written(("user:", "Q>"), ("assistant:", "A>")), "not found"),
}  # fmt: skip
# a configuration of the served copy that is not the trainer's
SERVED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "bf16 server": ("llama", {}, {"dtype": "bfloat16"}, causes.MODEL),
    "rope_theta": ("llama", {}, {"rope_theta": 1e6}, causes.ROPE),
    "rope scaling linear by 4": ("llama", {}, {"rope_type": "linear", "factor": 4.0}, causes.ROPE),
    "window lost": ("mistral", {"sliding_window": 6}, {"sliding_window": None}, causes.WINDOW),
    "other softcap": ("gemma2", {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 50.0},
                      {"final_logit_softcapping": 5.0}, causes.CAP),
}  # fmt: skip


@contextmanager
def serving(folder: Path, policy: Policy, changes: dict[str, Any]) -> Iterator[Engine]:
    """An engine at a server with a copy of the policy whose configuration is changed."""
    saved = copy.deepcopy(policy.lm.config)
    rope = {k: v for k, v in changes.items() if k in ("rope_theta", "rope_type", "factor")}
    policy.lm.config.rope_parameters = {**saved.rope_parameters, **rope}
    for name, value in changes.items():
        if name not in (*rope, "dtype"):
            setattr(policy.lm.config, name, value)
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


def verdict(policy: Policy, engine: Engine, right: str) -> str:
    found: Diagnosis = diagnose(policy, engine, CHAT, SAMPLING, version=3)
    names = [cause.name for cause in found.causes] or [NOTHING if found.ok else "not found"]
    if names == [right]:
        return "right"
    return "in part" if right in names else names[0] if names == ["not found"] else "WRONG"


def test_causes_are_named_against_vllm(tmp_path):
    verdicts, policy = {}, policy_of()
    with serving(tmp_path, policy, {}) as engine:
        server, update = engine.links[0].server, engine.update
        ask = server.generate
        for name, (edit, right) in ASKED.items():
            server.generate = lambda prompt, wanted, *rest, edit=edit: ask(
                *edit(list(prompt), wanted), *rest
            )
            verdicts[name] = verdict(policy, engine, right)
        server.generate = ask
        engine.update = lambda _, version: update(policy_of(seed=1), version)
        verdicts["another model's weights"] = verdict(policy, engine, causes.STALE)
    for name, (family, fields, changes, right) in SERVED.items():
        policy = policy_of(family, **fields)
        (tmp_path / name).mkdir()
        with serving(tmp_path / name, policy, changes) as engine:
            verdicts[name] = verdict(policy, engine, right)
    assert "WRONG" not in verdicts.values(), verdicts
    assert len(verdicts) - list(verdicts.values()).count("right") <= 2, verdicts
