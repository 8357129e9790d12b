"""One vLLM 0.32 server: a client for its HTTP API, and the transfer of weights to it."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2
import torch

from grpo_fast.data import escape_control, reason
from grpo_fast.errors import EngineError, require
from grpo_fast.rollout.engine import Completion, started
from grpo_fast.rollout.vllm import answers, transfer
from grpo_fast.rollout.vllm.answers import (
    BadAnswer,
    Reply,
    ServerError,
    StaleWeights,
    VLLMRequest,
    WeightInfo,
    parsed,
)
from grpo_fast.rollout.vllm.options import VLLMOptions
from grpo_fast.rollout.vllm.transfer import GlooGroup, Named, NCCLGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_fast.rollout.own.model import SampledModel

CHECK_S = 10.0  # timeout in seconds of a call that a healthy server answers at once
MAX_BYTES = 1 << 31  # a longer response is refused, because it would fill the trainer's memory
GENERATE = "/inference/v1/generate"
LOGPROBS = "processed_logprobs"
START = (
    "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --logprobs-mode "
    f"{LOGPROBS} --weight-transfer-config '{{\"backend\": …}}'"
)

T = TypeVar("T")
Missing = tuple[type[Exception], str]


class Server:
    """Client for one vLLM server.

    Every call opens a new connection. Redirects are not followed.

    Args:
        url: the server, as `http://host:port`.

    Raises:
        ValueError: the environment's `VLLM_API_KEY` has characters that a header cannot hold.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        # Request no compression, because the body is read, counted and parsed as raw bytes.
        self.headers = {"Accept-Encoding": "identity"}
        self.key = os.environ.get("VLLM_API_KEY", "").strip()
        if not (self.key.isascii() and self.key.isprintable()):  # httpx's error would quote the key
            raise ValueError("VLLM_API_KEY: expected printable ASCII characters (not shown)")
        if self.key:
            self.headers["Authorization"] = f"Bearer {self.key}"
        self.tls = httpx2.create_ssl_context(verify=url.startswith("https:"))

    def call(
        self, method: str, path: str, seconds: float, kind: type[Reply] | None = None,
        body: Any = None, missing: Missing = (ValueError, START),
    ) -> Any:  # fmt: skip
        """Send a request and return the response.

        Args:
            method: "GET" or "POST".
            path: path and query, such as "/health".
            seconds: timeout of the whole call, from the connection to the last byte.
            kind: class of the response. If None, the bytes of the response are returned.
            body: value that is sent as JSON, or None.
            missing: error class and advice for the statuses 403 and 404.

        Raises:
            ServerError: no complete response within `seconds` and MAX_BYTES, or a server error.
            BadAnswer: the response does not fit `kind`.
            ValueError: the server refuses the request.
        """
        status, answer = self._send(method, path, seconds, body)
        where = f"{self.url}{path}"
        if status == 200:
            return answer if kind is None else parsed(kind, answer, where)
        if self.key:  # a gateway may quote the request's headers
            answer = answer.replace(self.key.encode(), b"***")
        text = " ".join(answer[:500].decode(errors="replace").split())
        message = f"{where}: {status} {escape_control(text)}"
        if status in (403, 404):
            raise missing[0](f"{message}; {missing[1]}")
        if 400 <= status < 500 and status not in (408, 429):
            raise ValueError(message)
        raise ServerError(message)

    def is_up(self) -> bool:
        """Return whether the server answers /health without an error."""
        try:
            return self._send("GET", "/health", CHECK_S)[0] == 200
        except ServerError:
            return False

    def weight_version(self) -> str:
        info: WeightInfo = self.call("GET", "/weight_info", CHECK_S, WeightInfo)
        return info.weight_version

    def _send(self, method: str, path: str, seconds: float, body: Any = None) -> tuple[int, bytes]:
        """Send a request. Return the HTTP status and the body of the response."""
        exchange = self._exchange(method, path, seconds, body)
        try:
            return asyncio.run_coroutine_threadsafe(exchange, _event_loop()).result()
        except TimeoutError as error:
            why = f"no answer within {max(seconds, 0):.3g} s"
            raise ServerError(f"{self.url}{path}: {why}") from error
        except (httpx2.HTTPError, OSError, ValueError) as error:
            raise ServerError(f"{self.url}{path}: {escape_control(reason(error))}") from error

    async def _exchange(
        self, method: str, path: str, seconds: float, body: Any
    ) -> tuple[int, bytes]:
        pieces = bytearray()
        # The timeout of httpx applies to each read, so a server that sends one byte now and then
        # would never time out. asyncio.timeout limits the whole exchange.
        # trust_env=False ignores the environment's proxies and passwords, which these servers must
        # not receive.
        async with (
            asyncio.timeout(seconds),
            httpx2.AsyncClient(verify=self.tls, timeout=None, trust_env=False) as client,
            client.stream(method, self.url + path, json=body, headers=self.headers) as response,
        ):
            async for piece in response.aiter_raw():
                pieces += piece
                if len(pieces) > MAX_BYTES:
                    raise OSError(f"expected an answer of at most {MAX_BYTES} bytes, got more")
        return response.status_code, bytes(pieces)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all requests.

    The loop runs in a separate thread, because a notebook's thread already runs a loop.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def at_once(threads: int, function: Callable[..., T], *arguments: Iterable[Any]) -> list[T]:
    """Return `list(map(function, *arguments))`, computed by parallel daemon threads.

    The first error is raised at once. Calls that still run do not delay the exit of the process.
    Their deadlines end them.
    """
    calls = deque(enumerate(zip(*arguments, strict=False)))
    results: list[Any] = [None] * len(calls)

    def work() -> None:
        while True:
            try:
                i, call = calls.popleft()
            except IndexError:  # no call is left
                return
            results[i] = function(*call)

    workers = [started(work) for _ in range(min(threads, len(calls)))]
    try:
        for worker in wait(workers, return_when=FIRST_EXCEPTION).done:
            worker.result()
    finally:
        calls.clear()
    return results


# ---------------------------------------------------------------------------- Weights of one server
log = logging.getLogger(__name__)

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


class Link:
    """Connection to one server, with the state of the server's weights.

    Attributes:
        label: name of the weights that the server has. None if unknown.
        error: why the server is excluded. None if it takes part.
        deadline: deadline of the current weight transfer, on the monotonic clock.
        loads_adapters: True if the server loads LoRA adapters at run time. See `check`.
    """

    def __init__(self, url: str, options: VLLMOptions, device: torch.device) -> None:
        self.server = Server(url)
        self.options = options
        self.device = device
        by_default = options.transfer == "auto" and device.type == "cuda"
        self.by_nccl = options.transfer == "nccl" or by_default
        self.group: GlooGroup | NCCLGroup | None = None
        self.label: str | None = None
        self.error: Exception | None = None
        self.deadline = 0.0
        self.loads_adapters = False
        self.dtype = torch.float32  # dtype in which the server computes
        self.adapter: str | None = None  # name of the adapter that the server has loaded

    def check(self, policy: SampledModel) -> None:
        """Check that the server's options and model fit the policy. The server is not changed.

        Raises:
            ValueError: the server reports raw log-probabilities, has a different model, or was
                started with --enable-lora and cannot load the policy's adapter.
        """
        url = self.server.url
        call = partial(self.server.call, seconds=6 * CHECK_S)
        info = call("GET", "/server_info?config_format=json", kind=answers.ModelInfo)
        self.server.weight_version()
        fits = info.logprobs_mode == LOGPROBS
        came = f"{escape_control(info.logprobs_mode[:40])} at {url}"
        require(fits, "rollout.vllm.urls", f"servers with --logprobs-mode {LOGPROBS}", came)
        body = {"method": "get_model_inspection"}
        served = call("POST", "/collective_rpc", kind=answers.Results, body=body)
        check_model(policy.lm, served.results[0], url)
        ours = transfer.dtype_of(policy)
        theirs = escape_control(info.dtype[:40]).removeprefix("torch.")
        self.dtype = getattr(torch, theirs, torch.bfloat16)
        if ours != theirs:
            advice = f"start it with --dtype {ours}, or their log-probabilities differ"
            message = "%s samples in %s, the trainer computes in %s: %s"
            log.warning(message, url, theirs, ours, advice)
        self.loads_adapters = info.lora is not None
        if info.lora is not None and transfer.adapted_modules(policy.lm):
            transfer.check_adapter(policy, info.lora, url)

    def generate(
        self, prompt: Sequence[int], parameters: dict[str, Any], request: VLLMRequest,
        deadline: float,
    ) -> list[Completion]:  # fmt: skip
        """Request the completions of one prompt, check them, and return them."""
        body = {"token_ids": list(prompt), "sampling_params": parameters}
        missing: Missing = (ValueError, START)
        if request.adapter is not None:  # a restarted server lacks the adapter
            body["model"] = request.adapter
            missing = (StaleWeights, "the adapter is sent again")
        seconds = deadline - time.monotonic()
        answer = self.server.call("POST", GENERATE, seconds, answers.Choices, body, missing)
        return request.completions(answer, f"{self.server.url}{GENERATE}")

    def receive(self, weights: Iterable[Named], label: str) -> None:
        """Send weights to the server under the name `label`. It pauses until it has them all."""
        # 1. Join a process group with the server's workers, and stop sampling.
        self.deadline = time.monotonic() + self.options.timeout
        if self.group is None or self.server.weight_version() != self.label:
            self.group = self._join_group()
        seconds = remaining(self.deadline)
        is_open = self.server.call("GET", "/is_paused", seconds, answers.Paused).is_paused
        self._post("/pause?mode=keep")
        # 2. If the server was already paused, a trainer may have been killed during an update. vLLM
        #    then refuses a second update, or adds it to half-loaded layers. Only
        #    /finish_weight_update resets these layers, but it fails if no update is open. Therefore
        #    start an update first, and ignore the error of this call if an update is open already.
        if is_open:
            with suppress(ServerError):
                self._post("/start_weight_update")
            self._post("/finish_weight_update", {"weight_version": "left-in-the-middle"})
        # 3. Send the weights, and continue sampling.
        self._post("/start_weight_update")
        for tensors in weights:
            self.send(tensors)
        self._post("/finish_weight_update", {"weight_version": label})
        self._post("/resume")
        self._include(label)

    def send(self, tensors: Named) -> None:
        """Send a bucket of named weights to the server."""
        group = self.group
        # Broadcast in a thread, because the server responds only after it has all tensors.
        sent = started(lambda: [group.broadcast(tensor) for _, tensor in tensors])
        info = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }
        self._post("/update_weights", {"update_info": info})
        sent.result(remaining(self.deadline))

    def likeliest(self, ids: Sequence[int], adapter: str | None) -> list[tuple[int, float]]:
        """Return the likeliest id after each prefix of `ids`, with its log-probability."""
        parameters = {"max_tokens": 1, "prompt_logprobs": 1, "detokenize": False}
        body: dict[str, Any] = {"token_ids": list(ids), "sampling_params": parameters}
        if adapter is not None:
            body["model"] = adapter
        scores = self.server.call("POST", GENERATE, self.options.timeout, answers.Scores, body)
        rows = scores.prompt_logprobs[1:]
        where = f"{self.server.url}{GENERATE}: prompt_logprobs"
        fits = len(rows) == len(ids) - 1 and all(rows)
        require(fits, where, f"a row for each of {len(ids)} tokens", len(rows), BadAnswer)
        return [max(((i, x.logprob) for i, x in row.items()), key=lambda x: x[1]) for row in rows]

    def has_weights(self, label: str) -> bool:
        """Return whether the server reports the weights named `label`. False if it fails."""
        with suppress(EngineError):
            return self.server.weight_version() == label
        return False

    def load_adapter(self, label: str, folder: str) -> None:
        """Make the server load the adapter in `folder` under the name `label`.

        Afterwards, the server unloads the previous version of the adapter.
        """
        advice = "start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; it must be able to "
        advice += f"read the trainer's folder {folder} (see TMPDIR)"
        # If the server was excluded after it had loaded this adapter, it still has the adapter.
        # vLLM would then refuse a request without load_inplace.
        body = {"lora_name": label, "lora_path": folder, "load_inplace": True}
        seconds = self.options.timeout
        self.server.call("POST", LOAD, seconds, body=body, missing=(ValueError, advice))
        if self.adapter not in (None, label):
            with suppress(EngineError, ValueError):  # a restarted server lacks the adapter
                self.server.call("POST", UNLOAD, CHECK_S, body={"lora_name": self.adapter})
        self.adapter = label
        self._include(label)

    def include_if_current(self, label: str, base: str | None) -> None:
        """Mark the server as up to date if it has received the weights named `label` from rank 0.

        Args:
            label: name of the weights, or of an adapter.
            base: name of the adapter's base weights, or None if `label` names a complete set of
                weights.
        """
        if self.server.weight_version() != (base or label):
            return
        if base is None or label.encode() in self.server.call("GET", "/v1/models", CHECK_S):
            self._include(label)

    def exclude(self, error: Exception) -> None:
        """After an error, exclude the server until it has received weights through a new group."""
        if not isinstance(error, EngineError):
            error = ServerError(f"{self.server.url}: sending weights: {reason(error)}")
        if self.error is None:
            log.warning("%s is left out: %s", self.server.url, error)
        self.group = None
        self.label = None
        self.error = error

    def _include(self, label: str) -> None:
        if self.error is not None:
            log.warning("%s takes part again", self.server.url)
        self.label = label
        self.error = None

    def _post(self, path: str, body: Any = None) -> None:
        self.server.call("POST", path, remaining(self.deadline), answers.Reply, body)

    def _join_group(self) -> GlooGroup | NCCLGroup:
        """Form a process group with the workers of the server."""
        # 1. Open a port to which the server's workers connect.
        address = self.options.address
        workers = self.server.call("GET", "/get_world_size", CHECK_S, answers.WorldSize)
        try:
            listener = socket.create_server((address, 0), family=transfer.family_of(address))
        except OSError as error:
            expected = f"expected an address of this machine, got {address}"
            raise ValueError(f"rollout.vllm.address: {expected}: {reason(error)}") from error
        size = workers.world_size + 1
        port = listener.getsockname()[1]
        info: dict[str, Any] = {"master_address": address, "master_port": port, "rank_offset": 1}
        info["world_size"] = size
        # 2. Join the process group in a thread, because the server responds only after its workers
        #    have joined.
        if self.by_nccl:
            listener.close()  # vLLM opens the socket itself
            joined: Future[Any] = started(partial(NCCLGroup, address, port, size, self.device))
        else:
            info["seconds"] = seconds = self.options.timeout
            joined = started(partial(GlooGroup, address, port, 0, size, seconds, listener))
        self._post("/init_weight_transfer_engine", {"init_info": info})
        return joined.result(remaining(self.deadline))


def check_model(lm: PreTrainedModel, served: str, url: str) -> None:
    """Raise a ValueError if the server's model has a different embedding size or layer count.

    vLLM refuses weights of other shapes while it loads them, but does not notice missing layers.
    If the server's model had more layers than the trainer's, the additional layers would keep
    their old weights.

    Args:
        lm: the trainer's model.
        served: vLLM's printout of its model, with lines like `(0-11): 12 x LlamaDecoderLayer()(`.
        url: the server, for the message.
    """
    rows, width = lm.get_input_embeddings().weight.shape
    layers = lm.config.get_text_config().num_hidden_layers
    ours = {"org_vocab_size": rows, "embedding_dim": width, "number of layers": layers}
    numbers = re.findall(r"\b(org_vocab_size|embedding_dim)=(\d{1,9})\b", served)
    # The first embedding is the input embedding. Others, such as Gemma 3n's per layer, have other
    # sizes.
    theirs = {name: int(number) for name, number in reversed(numbers)}
    indices = re.findall(r"^( +)\((?:\d+-)?(\d{1,6})\): ", served, re.M)
    if indices:
        outer = min(indent for indent, _ in indices)  # lists inside a layer are indented further
        last = max(int(index) for indent, index in indices if indent == outer)
        theirs["number of layers"] = last + 1
    for name, number in theirs.items():
        other = f"a different model at {url}: the {name} is {number} there, {ours[name]} here"
        require(number == ours[name], "rollout.vllm.urls", "this run's model", other)


def each(links: list[Link], action: Callable[[Link], None]) -> None:
    """Run an action on all links in parallel. Exclude the servers for which it fails."""

    def run(link: Link) -> None:
        try:
            action(link)
        except (RuntimeError, OSError) as error:  # raised by the server, the group or a timeout
            link.exclude(error)

    at_once(len(links), run, links)


def remaining(deadline: float) -> float:
    """Return the number of seconds until a deadline on the monotonic clock.

    Raises:
        TimeoutError: the deadline has passed.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the time is over")
    return seconds
