"""Faults of a served model, planted before or in a real vLLM server, and what the doctor names.

`make test-vllm` runs this; `python -m tests.doctor.test_vllm_plants` prints the table.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast.doctor import Diagnosis, causes, diagnose
from grpo_fast.rollout import Engine, Sampling, build_engine
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.models.policy import Policy
from tests.doctor.faulty import tokenizer_with_bos
from tests.doctor.proxy import Proxy
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
Edit = Callable[[Policy], Callable[[dict[str, Any]], Any]]


def policy_of(family: str = "llama", **changes: Any) -> Policy:
    tokenizer = tokenizer_with_bos()
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = tiny_model(family, vocab_size=len(tokenizer), **{**SIZES, **special, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    return Policy(model, tokenizer)


def altered(
    policy: Policy, change: Callable[[torch.Tensor], torch.Tensor], only: str = ""
) -> Policy:
    """A copy with other matrices."""
    twin = policy.frozen_copy()
    for name, parameter in twin.lm.named_parameters():
        if parameter.dim() > 1 and only in name:
            parameter.copy_(change(parameter))
    return twin


def int8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def moved(weight: torch.Tensor) -> torch.Tensor:
    return weight + 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))


class Keeps(Engine):
    """An engine whose updates arrive as another policy's, or one update late."""

    def __init__(self, engine: Engine, keeps: Policy | None) -> None:
        self.engine, self.keeps, self.last = engine, keeps, None

    def update(self, policy: Any, version: int) -> None:
        late, self.last = self.last, policy.frozen_copy()
        self.engine.update(self.keeps or late or policy, version)

    def sample(self, request):
        return self.engine.sample(request)

    def close(self) -> None:
        self.engine.close()


def tied(policy: Policy) -> Policy:
    twin = policy.frozen_copy()
    twin.lm.lm_head.weight.copy_(twin.lm.get_input_embeddings().weight)
    return twin


def told(**values: Any) -> Edit:
    return lambda policy: lambda body: body["sampling_params"].update(values)


def biased(policy: Policy) -> Callable[[dict[str, Any]], Any]:
    return lambda body: body["sampling_params"].update(logit_bias={"40": 2.5})


def prompt(change: Callable[[list[int], Policy], list[int]]) -> Edit:
    def edit(policy: Policy) -> Callable[[dict[str, Any]], Any]:
        return lambda body: body.update(token_ids=change(body["token_ids"], policy))

    return edit


def with_system(ids: list[int], policy: Policy) -> list[int]:
    tokenizer = policy.tokenizer
    text = tokenizer.decode(ids).replace("<|bos|>", "<|bos|>system: You are a helpful assistant.\n")
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def other_template(ids: list[int], policy: Policy) -> list[int]:
    """One that nobody knows."""
    text = policy.tokenizer.decode(ids).replace("user:", "Q>").replace("assistant:", "A>")
    return policy.tokenizer(text, add_special_tokens=False)["input_ids"]


def shifted(by: int) -> Edit:
    """Each token has the log-probability of the one before or behind it."""

    def change(policy: Policy) -> Callable[[dict[str, Any]], Any]:
        def edit(answer: dict[str, Any]) -> None:
            for choice in answer["choices"]:
                content = choice["logprobs"]["content"]
                logps = [one["logprob"] for one in content]
                logps = [logps[0], *logps[:-1]] if by < 0 else [*logps[1:], logps[-1]]
                for one, logp in zip(content, logps, strict=True):
                    one["logprob"] = logp

        return edit

    return change


def by_arrival(policy: Policy) -> Callable[[dict[str, Any]], Any]:
    """Every question gets the answer to another one: all wait for each other, then change."""
    found: dict[int, Any] = {}
    arrived = threading.Barrier(len(CHAT))

    def edit(answer: dict[str, Any]) -> None:
        own = arrived.wait(60)
        found[own] = answer["choices"]
        arrived.wait(60)
        answer["choices"] = found[(own + 1) % len(CHAT)]

    return edit


# name → (what is planted, the cause that is right)
ASKED: dict[str, tuple[Edit, str]] = {
    "temperature 0.6 for 0.8": (told(temperature=0.6), causes.TEMPERATURE),
    "temperature 2 for 0.8": (told(temperature=2.0), causes.TEMPERATURE),
    "top_p 0.9": (told(top_p=0.9), causes.TRUNCATION),
    "top_k 20": (told(top_k=20), causes.TRUNCATION),
    "min_p 0.05": (told(min_p=0.05), causes.TRUNCATION),
    "repetition penalty 1.1": (told(repetition_penalty=1.1), causes.PENALTY),
    "presence penalty 0.5": (told(presence_penalty=0.5), causes.PENALTY),
    "frequency penalty 0.3": (told(frequency_penalty=0.3), causes.PENALTY),
    "logit bias on one token": (biased, causes.LOGIT_BIAS),
    "min_tokens 24": (told(min_tokens=24), causes.ENDS),
    "BOS twice": (prompt(lambda ids, p: [p.tokenizer.bos_token_id, *ids]), causes.TOKENS),
    "first token lost": (prompt(lambda ids, p: ids[1:]), causes.TOKENS),
    "last token lost": (prompt(lambda ids, p: ids[:-1]), causes.TOKENS),
    "system prompt": (prompt(with_system), causes.TEMPLATE),
    "another template": (prompt(other_template), "not found"),
}
ANSWERED: dict[str, tuple[Edit, str]] = {
    "answers in another order": (by_arrival, causes.ORDER),
    "logps one too early": (shifted(1), causes.SHIFTED),
    "logps one too late": (shifted(-1), causes.SHIFTED),
}
SENT: dict[str, tuple[Callable[[Policy], Policy | None], str, bool]] = {
    "stale weights, previous given": (lambda p: altered(p, moved), causes.STALE, True),
    "stale weights, previous not given": (lambda p: altered(p, moved), causes.STALE, False),
    "another model's weights": (lambda p: policy_of(seed=1), causes.STALE, False),
    "one update behind": (lambda p: None, causes.STALE, False),
    "tied head": (tied, causes.TIED, False),
    "int8 weights": (lambda p: altered(p, int8, "proj"), causes.QUANTIZED, False),
}
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
def serving(policy: Policy, changes: dict[str, Any]) -> Iterator[str]:
    """The URL of a server with a copy of the policy whose configuration is changed."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        saved = copy.deepcopy(policy.lm.config)
        rope = {k: v for k, v in changes.items() if k in ("rope_theta", "rope_type", "factor")}
        policy.lm.config.rope_parameters = {**saved.rope_parameters, **rope}
        for name, value in changes.items():
            if name not in (*rope, "dtype"):
                setattr(policy.lm.config, name, value)
        policy.save(Path(folder, "model"))
        policy.lm.config.__dict__.update(saved.__dict__)
        process = Process(Path(folder, "model"), dtype=changes.get("dtype", "float32"))
        try:
            yield process.url
        finally:
            process.kill()
            if os.environ.get("SHOW_LOG"):
                print(Path(folder, "server.log").read_text()[-3000:])


def engine_at(policy: Policy, url: str) -> Engine:
    options = load_recipe("sort", [
        "rollout.engine=vllm-server", f"rollout.vllm.urls=[{url}]", "rollout.vllm.timeout=120",
        f"rollout.vllm.patience={START_S}",
    ]).rollout  # fmt: skip
    return build_engine(policy, options)


def found_by(policy: Policy, engine: Engine, prompts: Any, **options: Any) -> Diagnosis:
    with engine:
        return diagnose(policy, engine, prompts, SAMPLING, version=3, **options)


def cases(names: str = "") -> Iterator[tuple[str, str, Callable[[], Diagnosis]]]:
    """(name, the cause that is right, its diagnosis) of every plant; servers start as needed."""
    policy = policy_of()

    def asked_at(url: str, edit: Edit | None, edits: str, prompts: Any) -> Diagnosis:
        proxy = Proxy(url, **({edits: edit(policy)} if edit else {}))
        try:
            return found_by(policy, engine_at(policy, proxy.url), prompts)
        finally:
            proxy.stop()

    def kept_at(url: str, other: Policy | None, given: bool) -> Diagnosis:
        engine = Keeps(engine_at(policy, url), other)
        if other is None:
            engine.update(altered(policy, moved), 1)
        return found_by(policy, engine, CHAT, previous=other if given else None)

    def matches(name: str) -> bool:
        return not names or any(part in name for part in names.split(","))

    plants: dict[str, tuple[str, Callable[[str], Diagnosis]]] = {
        NOTHING: (NOTHING, lambda url: asked_at(url, None, "asked", CHAT))
    }
    for edits, listed in (("asked", ASKED), ("answered", ANSWERED)):
        for name, (edit, right) in listed.items():
            plants[name] = right, lambda url, e=edit, w=edits: asked_at(url, e, w, CHAT)
    for name, (other, right, given) in SENT.items():
        plants[name] = right, lambda url, o=other, g=given: kept_at(url, o(policy), g)
    chosen = [name for name in plants if matches(name)]
    with serving(policy, {}) if chosen else nullcontext("") as url:
        for name in chosen:
            right, run = plants[name]
            yield name, right, lambda r=run, u=url: r(u)
    for name, (family, fields, changes, right) in SERVED.items():
        if matches(name):
            trainer = policy_of(family, **fields)
            with serving(trainer, changes) as url:
                yield name, right, lambda t=trainer, u=url: found_by(t, engine_at(t, u), CHAT)


def verdict(found: Diagnosis, right: str) -> str:
    names = [cause.name for cause in found.causes] or [NOTHING if found.ok else "not found"]
    if names == [right]:
        return "right"
    return "in part" if right in names else names[0] if names == ["not found"] else "WRONG"


def test_causes_are_named_against_vllm():
    verdicts = {name: verdict(run(), right) for name, right, run in cases()}
    assert "WRONG" not in verdicts.values(), verdicts
    assert len(verdicts) - list(verdicts.values()).count("right") <= 2, verdicts


if __name__ == "__main__":
    for name, right, run in cases(*sys.argv[1:]):
        try:
            found = run()
        except Exception as error:
            print(f"{name:34} ERROR {error!r}", flush=True)
            continue
        what = "; ".join(
            f"{c.name}: {c.advice} [{c.before:.2g} → {c.after:.2g}]" for c in found.causes
        )
        noise = " ".join(f"{n.dtype} {n.mean:.1e} {n.share:.2%}" for n in found.own_noise)
        print(
            f"{name:34} {verdict(found, right):10} mean {found.mean:.3g} own {found.own:.1e} "
            f"left {found.left:.2g} "
            f"{what or found.rest}  ({noise})",
            flush=True,
        )
