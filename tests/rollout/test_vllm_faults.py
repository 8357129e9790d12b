"""Tests that faulty responses of a vLLM server end soon with an error message.

A simulated server sends the responses.
"""

import gzip
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_fast import rollout as rollouts
from grpo_fast.rollout import EngineError, NonFiniteLogits, Sampling
from grpo_fast.rollout.vllm.options import VLLMOptions
from grpo_fast.rollout.vllm.servers import build
from grpo_fast.train.models.policy import Policy
from tests.rollout.vllm_stand_in import GENERATE, UPDATE, Raw, StandIn

INFO = "/server_info"
OK = b"HTTP/1.1 200 OK\r\n"
EOS_ID = 1
OTHER_END = {"stop": "length", "length": "stop"}
COMPRESSED = gzip.compress(b"{}")
DEEP = b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def sample(policy: Policy, server: StandIn, **given: float) -> rollouts.Samples:
    """Build an engine for a server, send the server the weights, and sample three completions."""
    options = VLLMOptions(urls=[server.url], **{"timeout": 20.0, "patience": 20.0, **given})
    engine = build(policy, SimpleNamespace(vllm=options))
    engine.update(policy, 3)
    sampling = Sampling(max_new_tokens=6, top_k=5)
    return rollouts.generate(policy, ["3 1 2 ="], sampling, group_size=3, seed=1, engine=engine)


def choice(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that replaces fields of the second completion in a response.

    A field's new value is given directly, or as a function that computes it from the completion.
    """

    def change(answer: dict[str, Any]) -> None:
        one = answer["choices"][1]
        for name, value in fields.items():
            one[name] = value(one) if callable(value) else value

    return change


def ids(change: Callable[[list[int]], Any]) -> Callable[[dict[str, Any]], None]:
    """Return a function that replaces the token ids of the second completion in a response.

    The other fields are adjusted to the new tokens, so that only the token ids can cause the error.
    """

    def changed(answer: dict[str, Any]) -> None:
        one = answer["choices"][1]
        tokens = change(one["token_ids"])
        one["token_ids"] = tokens
        if isinstance(tokens, list):
            one["logprobs"]["content"] = [{"token_id": t, "logprob": -1.0} for t in tokens]
            one["finish_reason"] = "stop" if tokens[-1:] == [EOS_ID] else "length"

    return changed


def content(change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], None]:
    return choice(logprobs=lambda one: {"content": change(one["logprobs"]["content"])})


def logprob(value: Any) -> Callable[[dict[str, Any]], None]:
    return content(lambda every: [*every[:-1], every[-1] | {"logprob": value}])


def versions(*names: str) -> Callable[[dict[str, Any]], None]:
    """Return a function that replaces the weight versions of the second completion in a response.

    Args:
        *names: Names of versions, where "now" means the current version.
    """

    def change(one: dict[str, Any]) -> list[dict[str, str]]:
        now = one["weight_versions"][0]["version"]
        return [{"version": now if name == "now" else name} for name in names]

    return choice(weight_versions=change)


def mask(row: Callable[[int], Any]) -> Callable[[dict[str, Any]], None]:
    return choice(sampling_mask=lambda one: [row(token) for token in one["token_ids"]])


def each_index(*indices: Any) -> Callable[[dict[str, Any]], None]:
    def change(answer: dict[str, Any]) -> None:
        for one, index in zip(answer["choices"], indices, strict=True):
            one["index"] = index

    return change


def answer(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda _: value


def raw(*pieces: bytes) -> Raw:
    return Raw(lambda put: [put(piece) for piece in pieces])


def slowly(text: bytes, seconds: float = 0.05) -> Raw:
    def play(put: Callable[[bytes], None]) -> None:
        for at in range(len(text)):
            put(text[at : at + 1])
            time.sleep(seconds)

    return Raw(play)


def lora(**limits: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["vllm_config"].update(lora_config=limits)


def probed(logp: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function that replaces the last row of log-probabilities of a prompt's tokens."""
    row = logp if logp is None else {"3": {"logprob": logp}}
    return lambda found: {"prompt_logprobs": [*found["prompt_logprobs"][:-1], row]}


# Maps a fault to the path of the HTTP call and to the faulty response.
FAULTS: dict[str, tuple[str, Any]] = {
    # These responses have wrong token ids.
    "id -1": (GENERATE, ids(lambda t: [-1, *t[1:]])),
    "id V": (GENERATE, ids(lambda t: [13, *t[1:]])),
    "id '3'": (GENERATE, ids(lambda t: ["3", *t[1:]])),
    "id 3.0": (GENERATE, ids(lambda t: [3.0] * 6)),
    "id true": (GENERATE, ids(lambda t: [True])),
    "no ids": (GENERATE, ids(lambda t: [])),
    "too many ids": (GENERATE, ids(lambda t: [3] * 7)),
    "ids after the EOS": (GENERATE, ids(lambda t: [EOS_ID, 3])),
    # These responses have wrong log-probabilities.
    "logprob 0.5": (GENERATE, logprob(0.5)),
    "logprob nan": (GENERATE, logprob(float("nan"))),
    "logprob -9999": (GENERATE, logprob(-9999.0)),
    "logprobs of others": (GENERATE, content(lambda c: [c[0] | {"token_id": 0}, *c[1:]])),
    # These responses have missing, repeated or unfinished completions.
    "a choice less": (GENERATE, lambda found: found["choices"].pop() and None),
    "indices twice": (GENERATE, each_index(0, 1, 1)),
    "reason abort": (GENERATE, choice(finish_reason="abort")),
    "reason of another end": (
        GENERATE, choice(finish_reason=lambda x: OTHER_END[x["finish_reason"]])
    ),
    # These responses name missing or wrong versions of the weights.
    "no version": (GENERATE, versions()),
    "version of control characters": (GENERATE, versions("\x1b[2J")),
    "version of the past at the end": (GENERATE, versions("now", "default")),
    # These responses have a wrong support (`sampling_mask`).
    "mask beyond V": (GENERATE, mask(lambda t: [t, 13])),
    "mask twice": (GENERATE, mask(lambda t: [t, t])),
    "mask of 3.5": (GENERATE, mask(lambda t: [t, 3.5])),
    "mask too short": (GENERATE, choice(sampling_mask=[])),
    "mask without the token": (GENERATE, mask(lambda t: [(t + 1) % 13])),
    # These responses are malformed.
    "a million errors": (GENERATE, answer(b'{"choices": [' + b"{}," * 10**6 + b"{}]}")),
    "null": (GENERATE, answer(b"null")),
    "a number": (GENERATE, answer(b"5")),
    "deep JSON": (GENERATE, answer(DEEP)),
    "half of the JSON": (GENERATE, answer(b'{"choices": [')),
    "a compressed answer": (GENERATE, raw(OK, b"Content-Encoding: gzip\r\n\r\n", COMPRESSED)),
    "a Content-Length too long": (UPDATE, raw(OK, b"Content-Length: 9\r\n\r\n{}")),
    "headers without end": (GENERATE, raw(OK, b"A: b\r\n" * (1 << 20))),
    "no HTTP": (GENERATE, raw(b"SSH-2.0-OpenSSH_9.6\r\n")),
    "a byte now and then": (GENERATE, slowly(OK + b"\r\n" + b" " * 999)),
    "a byte of a header now and then": (UPDATE, slowly(OK + b"A: " + b"b" * 999)),
    "a redirect": (GENERATE, raw(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n")),
    "an error of control characters": (
        GENERATE, raw(b'HTTP/1.1 400 No\r\n\r\n{"error": "\\u001b[2J"}')
    ),
    # The server reports wrong facts about itself.
    "no weight_version": ("/weight_info", answer({})),
    "logprobs_mode of control characters": (
        INFO, answer({"vllm_config": {"model_config": {"logprobs_mode": "\x1b", "dtype": ""}}})
    ),
    "no account of the model": ("/collective_rpc", answer({"results": []})),
    "lora_config {}": (INFO, lora()),
    "max_lora_rank '8'": (INFO, lora(max_lora_rank="8", target_modules=None)),
    "target_modules 1": (INFO, lora(max_lora_rank=8, target_modules=1)),
    "a weight_info of 500": ("/weight_info", 500),
    # The log-probabilities of the prompt that are compared after a transfer are wrong.
    "a row null": ("probe", probed(None)),
    "a row of NaN": ("probe", probed(float("nan"))),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_time_and_names_the_server(policy, server, fault):
    path, server.faults[path] = FAULTS[fault][0], FAULTS[fault][1]
    waits = "now and then" in fault  # these faults end by a timeout, all others must end at once
    start = time.monotonic()
    with pytest.raises((EngineError, ValueError, NonFiniteLogits)) as refused:
        sample(policy, server, timeout=0.5 if waits else 10.0, patience=0.1)
    assert time.monotonic() - start < 10
    message = str(refused.value)
    assert waits or "no answer within" not in message
    assert server.url in message and len(message) < 2000 and message.isprintable(), message


def test_the_same_changes_with_valid_values(policy, server):
    for right in (
        ids(lambda t: [12] * 6), logprob(1e-4), logprob(0), each_index(2, 0, 1),
        versions("now", "now"), mask(lambda t: [t, (t + 1) % 13]),
        mask(lambda t: []), choice(new_field={"a": [1]}), choice(sampling_mask=None),
    ):  # fmt: skip
        server.faults[GENERATE] = right
        assert len(sample(policy, server).texts) == 3
