"""Tests that faulty responses of a vLLM server end soon with an error message."""

import gzip
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_fast import rollout as rollouts
from grpo_fast.rollout import Completion, EngineError, NonFiniteLogits, Sampling
from grpo_fast.rollout.engine import Request, VLLMOptions
from grpo_fast.rollout.vllm.answers import VLLMRequest
from grpo_fast.rollout.vllm.servers import VLLMServers
from grpo_fast.train.policy import Policy
from tests.rollout.vllm_stand_in import GENERATE, UPDATE, Raw

ERRORS = EngineError, ValueError, NonFiniteLogits
URL = "http://127.0.0.1:8000"
EOS_ID = 1
IDS = [3, 4, 5, 6, 7, 12]  # as many tokens as the requests of these tests allow
OTHERS = {0: [8] * 6, 2: [9] * 6}  # the ids of the completions 0 and 2


def tokens(ids: list[Any], logprob: Any = -1.0) -> dict[str, Any]:
    """Return the fields of a completion that depend on its token ids."""
    return {
        "token_ids": ids,
        "finish_reason": "stop" if ids[-1:] == [EOS_ID] else "length",
        "logprobs": {"content": [{"token_id": t, "logprob": logprob} for t in ids]},
    }


def completions(policy: Policy, change: dict[str, Any]) -> list[Completion]:
    """Check a response with three completions. `change` replaces fields of the second one."""
    fields = {**tokens(IDS), "weight_versions": [{"version": "now"}], "sampling_mask": None}
    others = [{"index": i, **fields, **tokens(OTHERS[i])} for i in (2, 0)]
    choices = [*others, {"index": 1, **fields, **change}]
    request = Request([[3]], Sampling(max_new_tokens=6, top_k=5), 3, 0)
    return VLLMRequest(policy, request, 3, "now").completions({"choices": choices}, URL)


WRONG: dict[str, list[dict[str, Any]]] = {
    f"1 to 6 ids below 13 up to the first EOS, got {len(ids)} ids": [tokens(ids)]
    for ids in ([], [3] * 7, [EOS_ID, 3])
}
WRONG["1 to 6 ids below 13"] = [tokens([id_, *IDS[1:]]) for id_ in (-1, 13, "3", 3.0, True, None)]
WRONG |= {
    "max_model_len: .*, got an end after 2": [tokens([3, 4])],
    "other fields than vLLM 0.32's": [
        {"token_ids": None}, {"logprobs": None}, {"index": "1"}, tokens(IDS, None),
        {"weight_versions": [None]}, {"sampling_mask": 5}, {"sampling_mask": []},
    ],
    "log-probabilities up to 0, got 0.5": [tokens(IDS, 0.5)],
    "logits are NaN or infinite": [tokens(IDS, float("nan")), tokens(IDS, -9999.0)],
    "a log-probability of each of the 6 tokens": [{"logprobs": tokens(IDS[::-1])["logprobs"]}],
    "completions 0 to 2": [{"index": 2}, {"index": 3}],
    "left a completion unfinished": [{"finish_reason": "abort"}, {"finish_reason": "error"}],
    "completions by the weights now": [
        {"weight_versions": [{"version": version} for version in versions]}
        for versions in ([], ["\x1b[2J"], ["now", "default"])
    ] + [{"weight_versions": None}],
    "a sampling_mask of distinct ids": [
        {"sampling_mask": [row(t) for t in IDS]}
        for row in (
            lambda t: [4], lambda t: [t, 13], lambda t: [t, t], lambda t: [t, 3.5],
            lambda t: [t, True],
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_completion_is_refused(policy, message):
    for change in WRONG[message]:
        with pytest.raises(ERRORS, match=message) as refused:
            completions(policy, change)
        said = str(refused.value)
        assert URL in said and len(said) < 2000 and said.isprintable(), said


@pytest.mark.parametrize(
    "change",
    [
        {}, tokens([3, EOS_ID]), tokens([12] * 6, 1e-4), tokens(IDS, 0), {"new_field": {"a": [1]}},
        {"weight_versions": [{"version": "now"}] * 2}, {"sampling_mask": [[]] * 6},
        {"sampling_mask": [[t, 2] for t in IDS]},
    ],
    ids=str,
)  # fmt: skip
def test_a_valid_completion_is_taken(policy, change):
    found = completions(policy, change)
    assert [one.ids for one in found] == [OTHERS[0], change.get("token_ids", IDS), OTHERS[2]]
    assert found[1].finish_reason == ("eos" if EOS_ID in found[1].ids else "length")
    assert found[1].weight_version == 3 and found[1].logps.shape == (len(found[1].ids),)
    assert (found[1].support is None) == ("sampling_mask" not in change)


def answer(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda _: value


def raw(*pieces: bytes, seconds: float = 0.0) -> Raw:
    def play(put: Callable[[bytes], None]) -> None:
        for piece in pieces:
            put(piece)
            time.sleep(seconds)

    return Raw(play)


def slowly(text: bytes) -> Raw:
    return raw(*(text[at : at + 1] for at in range(len(text))), seconds=0.05)


OK = b"HTTP/1.1 200 OK\r\n"
INFO = "/server_info"
CONTROL = {"vllm_config": {"model_config": {"logprobs_mode": "\x1b", "dtype": ""}}}
GZIP = b"Content-Encoding: gzip\r\n\r\n"
# Maps a fault to the path of the HTTP call and to the faulty response.
FAULTS: dict[str, tuple[str, Any]] = {
    "a choice less": (GENERATE, lambda found: found["choices"].pop() and None),
    "a million errors": (GENERATE, answer(b'{"choices": [' + b"{}," * 10**6 + b"{}]}")),
    "null": (GENERATE, answer(b"null")),
    "a number": (GENERATE, answer(b"5")),
    "deep JSON": (GENERATE, answer(b'{"choices": ' + b"[" * 10**5 + b"]" * 10**5 + b"}")),
    "half of the JSON": (GENERATE, answer(b'{"choices": [')),
    "an empty compressed answer": (GENERATE, raw(OK, GZIP, gzip.compress(b"{}"))),
    "a broken compressed answer": (GENERATE, raw(OK, GZIP, b"{}")),
    "a Content-Length too long": (UPDATE, raw(OK, b"Content-Length: 9\r\n\r\n{}")),
    "headers without end": (GENERATE, raw(OK, b"A: b\r\n" * (1 << 20))),
    "no HTTP": (GENERATE, raw(b"SSH-2.0-OpenSSH_9.6\r\n")),
    "a byte now and then": (GENERATE, slowly(OK + b"\r\n" + b" " * 999)),
    "a byte of a header now and then": (UPDATE, slowly(OK + b"A: " + b"b" * 999)),
    "a redirect": (GENERATE, raw(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n")),
    "control characters": (GENERATE, raw(b'HTTP/1.1 400 No\r\n\r\n{"error": "\\u001b[2J"}')),
    "world_size 0": ("/get_world_size", answer({"world_size": 0})),
    "world_size -1": ("/get_world_size", answer({"world_size": -1})),
    "world_size 65536": ("/get_world_size", answer({"world_size": 1 << 16})),
    "no weight_version": ("/weight_info", answer({})),
    "a weight_info of 500": ("/weight_info", 500),
    "logprobs_mode of control characters": (INFO, answer(CONTROL)),
    "no account of the model": ("/collective_rpc", answer({"results": []})),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_time_and_names_the_server(policy, server, fault):
    path, server.faults[path] = FAULTS[fault][0], FAULTS[fault][1]
    waits = "now and then" in fault  # these faults end by a timeout, all others must end at once
    options = VLLMOptions(urls=[server.url], timeout=0.5 if waits else 10.0, patience=0.1)
    start = time.monotonic()
    with pytest.raises(ERRORS) as refused:
        engine = VLLMServers(policy, SimpleNamespace(vllm=options))
        engine.update(policy, 3)
        sampling = Sampling(max_new_tokens=6)
        rollouts.generate(policy, ["3 1 2 ="], sampling, group_size=3, seed=1, engine=engine)
    assert time.monotonic() - start < 10
    message = str(refused.value)
    assert waits or "no answer within" not in message
    assert server.url in message and len(message) < 2000 and message.isprintable(), message
