"""Tests of the options of the engine `vllm-server`, its checks of servers, and its HTTP client."""

import asyncio
import threading
import time
from contextlib import nullcontext
from json import dumps

import pytest
import torch

from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout.engine import VLLMOptions
from grpo_fast.rollout.vllm import servers
from grpo_fast.rollout.vllm.answers import ServerError, VLLMRequest
from grpo_fast.rollout.vllm.servers import Server, check_model, run
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
