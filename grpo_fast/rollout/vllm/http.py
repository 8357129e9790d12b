"""Client for the HTTP API of a vLLM 0.32 server."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any, TypeVar

import httpx2

from grpo_fast.data import escape_control, reason
from grpo_fast.rollout.threads import started
from grpo_fast.rollout.vllm.answers import Reply, ServerError, WeightInfo, parsed

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
