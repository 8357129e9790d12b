"""Tests of the options of the engine `vllm-server`, its checks of servers, and its HTTP client.

Faulty responses of a server must end soon with an error message.
"""

import asyncio
import gzip
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from json import dumps
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_fast import rollout as rollouts
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout import Completion, EngineError, NonFiniteLogits, Sampling
from grpo_fast.rollout.engine import Request, VLLMOptions
from grpo_fast.rollout.vllm import servers
from grpo_fast.rollout.vllm.answers import ServerError, VLLMRequest
from grpo_fast.rollout.vllm.servers import Server, VLLMServers, check_model, run
from grpo_fast.train.config import load_recipe
from grpo_fast.train.policy import Policy
from tests.command_line import invoke, refused
from tests.rollout.vllm_stand_in import GENERATE, JOIN, START, UPDATE, Raw, StandIn, engine_of
from tests.tiny import SYMBOLS, tiny_model

INFO = "/server_info"


def client(server: StandIn) -> Server:
    made = Server(server.url, VLLMOptions(), torch.device("cpu"))
    made.deadline = time.monotonic() + 20
    return made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: setattr(x, "mode", "raw_logprobs"), "processed_logprobs.*, got raw_logprobs at"),
        (lambda x: x.faults.update({INFO: 404}), "404 .*told to say.*VLLM_SERVER_DEV_MODE=1"),
        (lambda x: x.faults.update({INFO: 403}), "403 .*told to say.*VLLM_SERVER_DEV_MODE=1"),
        (StandIn.stop, "has the weights after 0.1 s and 0 tries: .*/weight_info: .*connection"),
    ],
    ids=["raw", "404", "403", "missing"],
)
def test_servers_that_are_refused(policy, server, change, message):
    change(server)
    with pytest.raises((ValueError, ServerError), match=message):
        engine_of(policy, server, version=0, patience=0.1)


def test_another_dtype_is_logged(policy, server, caplog):
    engine_of(policy, server, version=0)
    assert not caplog.text
    server.dtype = "torch.bfloat16"
    engine_of(policy, server, version=0)
    assert f"{server.url} samples in bfloat16, the trainer computes in float32" in caplog.text
    assert "--dtype float32" in caplog.text


def test_a_server_of_another_model_is_not_changed(server, tmp_path):
    """Check that neither an engine nor `grpo-fast doctor` changes a server of a different model."""
    symbols = build_symbol_tokenizer(SYMBOLS)
    other = Policy(tiny_model("llama", vocab_size=15), symbols)
    with pytest.raises(ValueError, match="the org_vocab_size is 13 there, 15 here"):
        engine_of(other, server, version=0)
    other.save(tmp_path)
    message = f"this run's model, got a different model at {server.url}"
    assert refused(invoke("doctor", str(tmp_path), server.url), message)
    assert not {"/pause", JOIN, START, UPDATE} & server.calls.keys()


# This is the text that vLLM 0.32 prints for a Llama model, shortened. The engine reads the size of
# the input embedding from such a text.
SERVED = """LlamaForCausalLM()(
  (model): LlamaModel()(
    (embed_tokens): VocabParallelEmbedding(num_embeddings=14, embedding_dim=32, org_vocab_size=13)
    (embed_tokens_per_layer): VocabParallelEmbedding(embedding_dim=16, org_vocab_size=9)
"""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"vocab_size": 14}, "the org_vocab_size is 13 there, 14 here"),
        ({"hidden_size": 64}, "the embedding_dim is 32 there, 64 here"),
    ],
)
def test_the_size_of_a_servers_model(changed, message):
    lm = tiny_model("llama", **{"vocab_size": 13, **changed})
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_model(lm, SERVED, "http://127.0.0.1:1")


BAD_URLS = [
    "SECRET:8000", "ftp://SECRET:8000", "http://SECRET", "http://SECRET:65536",
    "http://user:SECRET@h:1", "http://127.0.0.1:1?key=SECRET", "http://127.0.0.1:1/SECRET",
    "http://127.0.0.1\\@SECRET:1", "http://127.0.0.1:1\r\nKey: SECRET",
]  # fmt: skip


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_bad_url_is_not_quoted(url):
    for urls in ([url], ["http://127.0.0.1:2", url], url, {url: 1}):
        with pytest.raises(ValueError, match="urls: expected http://host:port") as error:
            load_recipe("sort", ["rollout.engine=vllm-server", f"rollout.vllm.urls={dumps(urls)}"])
        assert "SECRET" not in str(error.value)


def test_servers_are_different_and_can_reach_the_trainer(policy, server):
    for url in ("http://LOCALHOST:8000", "http://127.0.0.1:8000/"):
        with pytest.raises(ValueError, match="every server once"):
            VLLMOptions(urls=["http://127.0.0.1:8000", url])
    urls = ["http://127.0.0.1:1", "http://127.0.0.2:1", "http://h.org:1", "http://[fe80::1]:1"]
    assert VLLMOptions(urls=urls, address="10.0.0.9").urls == urls
    assert VLLMOptions(urls=["http://[::1]:1", "http://localhost:1"]).address == "127.0.0.1"
    with pytest.raises(ValueError, match="address: expected .* http://10.0.0.7:8000 can reach"):
        VLLMOptions(urls=["http://10.0.0.7:8000"])
    for address in ("192.0.2.1", "no-such-host.invalid", "::1"):
        with pytest.raises(ValueError, match=f"rollout.vllm.address: .*, got {address}"):
            engine_of(policy, server, version=0, address=address)


@pytest.mark.parametrize("key", ["SECRET\nX: y", "SECRET€"])
def test_a_key_that_no_header_can_hold_is_not_quoted(server, monkeypatch, key):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ValueError, match="VLLM_API_KEY: expected printable ASCII") as error:
        client(server)
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"401 No\r\n\r\nBearer SECRET", r"401 Bearer \*\*\*$"),
        (b"401 No\r\n\r\n" + b"x" * 497 + b"SECRET", r"401 x{497}\*\*\*$"),
        (b"200 OK\r\n\r\n" + b"SECRET " * 30, r"expected a JSON object, got '\*\*\* "),
        (b'200 OK\r\n\r\n"SECRET"', r"""expected a JSON object, got '"\*\*\*"'"""),
    ],
)
def test_a_key_that_a_gateway_quotes_is_not_shown(server, monkeypatch, answer, message):
    """Check that no part of the key is shown, even if the message is cut inside of the key."""
    monkeypatch.setenv("VLLM_API_KEY", "SECRET")
    server.faults[GENERATE] = Raw(lambda put: put(b"HTTP/1.1 " + answer))
    with pytest.raises((ServerError, ValueError), match=message) as error:
        run(client(server).generate([3], {}, VLLMRequest(None, None, 0, "")))
    assert "SEC" not in str(error.value)


def test_a_response_without_end_is_refused(server, monkeypatch):
    monkeypatch.setattr(servers, "MAX_BYTES", 1 << 20)
    blanks = Raw(lambda put: put(b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (1 << 22)))
    server.faults["/weight_info"] = blanks
    with pytest.raises(ServerError, match="/weight_info: .*at most 1048576 bytes, got more"):
        run(client(server).call("GET", "/weight_info"))


def test_an_error_does_not_wait_for_running_calls():
    """Check that the first error is raised while an earlier call still runs.

    The calls run on a daemon thread, so that the process can exit.
    """

    async def call(i):
        if i:
            raise ServerError("gone")
        await asyncio.sleep(60)

    before = {*threading.enumerate()}
    start = time.monotonic()
    with pytest.raises(ServerError, match="gone"):
        run(*map(call, range(9)))
    assert time.monotonic() - start < 30 and run() == []
    assert all(thread.daemon for thread in {*threading.enumerate()} - before)


def test_a_call_from_a_notebook_sends_the_key_and_uses_no_proxy(server, monkeypatch):
    """Check that a server can be called inside a running event loop, as in a notebook.

    The call must send the API key and must not use proxies from environment variables.
    """
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("VLLM_API_KEY", "word\n")  # a key read from a file may end with a newline
    keys = []
    monkeypatch.setattr(server.http.RequestHandlerClass, "respond", lambda self: (
        keys.append((self.headers["Authorization"], self.headers["Accept-Encoding"])),
        self.say(200, {"weight_version": "1"})
    ))  # fmt: skip

    async def cell():
        return run(client(server).call("GET", "/weight_info"))

    assert asyncio.run(cell()) == [{"weight_version": "1"}]
    assert keys == [("Bearer word", "identity")]


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
