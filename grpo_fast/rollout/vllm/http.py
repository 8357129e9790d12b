"""The HTTP API of a vLLM server, as of 0.32, started as START says."""

from __future__ import annotations

import http.client
import io
import json
import os
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from pydantic_core import from_json

from grpo_fast.data import escape_control, reason
from grpo_fast.rollout.engine import Completion
from grpo_fast.rollout.vllm.answers import Asked, Choices, R, ServerError, WeightInfo, parsed

CHECK_S = 10.0  # a question that a living server answers at once
WAIT_S = 1.0, 30.0  # before a busy server is asked again: where it does not say, and at most
BODY = 1 << 23  # bytes of an answer that holds no completions
TOKEN = 1 << 10  # bytes of an answer about one token
GENERATE, LOGPROBS = "/inference/v1/generate", "processed_logprobs"
START = (
    "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --logprobs-mode "
    f"{LOGPROBS} --weight-transfer-config '{{\"backend\": …}}'"
)


class Incoming(io.RawIOBase):
    """A reader of a socket that stops at a deadline and at a number of bytes.

    A socket's own timeout holds for each read: a byte now and then would be waited for for ever.
    """

    def __init__(self, sock: socket.socket, deadline: float, limit: int) -> None:
        self.sock, self.deadline, self.bytes_left = sock, deadline, limit

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(self, 1 << 16)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.sock.settimeout(remaining(self.deadline))
        count = self.sock.recv_into(buffer)
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise OSError("a longer answer than what it was asked for can have")
        return count


class Server:
    """The HTTP API of one vLLM server. Every call ends in so many seconds.

    Raises:
        ServerError: no answer in time, or one that says that the server failed.
        BadAnswer: an answer that is not in its form.
        ValueError: the server refuses what it was asked.
    """

    def __init__(self, url: str) -> None:
        parts, self.url = urlsplit(url), url
        kind = "HTTPSConnection" if parts.scheme == "https" else "HTTPConnection"
        self._connection = partial(getattr(http.client, kind), parts.hostname, parts.port)
        self._headers = {"Content-Type": "application/json"}
        key = os.environ.get("VLLM_API_KEY", "").strip()
        if not (key.isascii() and key.isprintable()):  # an error of http.client would quote it
            raise ValueError("VLLM_API_KEY: expected printable ASCII characters (not shown)")
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}

    def call(
        self, method: str, path: str, seconds: float, kind: type[R], body: Any = None,
        limit: int = BODY,
    ) -> R:  # fmt: skip
        """The answer, parsed as `kind`. A busy server (429) is asked again at the time it names."""
        deadline, where = time.monotonic() + seconds, f"{self.url}{path}"
        while True:
            status, wait, answer = self._send(method, path, deadline, body, limit)
            if status != 429 or time.monotonic() + wait > deadline:
                break
            time.sleep(wait)
        if status == 200:
            return parsed(kind, answer, where)
        said = f"{where}: {status} {_words(answer)}"
        if status in (403, 404):
            said += f"; {START}"
        is_refusal = 400 <= status < 500 and status not in (408, 429)
        raise (ValueError if is_refusal else ServerError)(said)

    def is_up(self) -> bool:
        try:
            return self._send("GET", "/health", time.monotonic() + CHECK_S)[0] in (200, 429)
        except ServerError:
            return False

    def _send(
        self, method: str, path: str, deadline: float, body: Any = None, limit: int = BODY
    ) -> tuple[int, float, bytes]:
        """Status, seconds to wait before another try, body."""
        seconds = deadline - time.monotonic()
        connection = self._connection()
        try:
            connection.timeout = remaining(deadline)
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, self._headers)
            incoming: Any = Incoming(connection.sock, deadline, limit)
            response = http.client.HTTPResponse(incoming, method=method)
            response.begin()
            pieces = b"".join(iter(partial(response.read, 1 << 16), b""))
            # http.client ends a body that is too short as if it were whole.
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            after = response.getheader("Retry-After", "")
            wait = float(after) if after.isdecimal() else WAIT_S[0]
            return response.status, min(max(wait, 0.1), WAIT_S[1]), pieces
        # ValueError: http.client does not understand the answer
        except (OSError, ValueError, http.client.HTTPException) as error:
            timed_out = isinstance(error, TimeoutError)
            why = f"no answer within {max(seconds, 0):.3g} s" if timed_out else reason(error)
            raise ServerError(f"{self.url}{path}: {escape_control(why)}") from error
        finally:
            connection.close()

    def weight_version(self) -> str:
        return self.call("GET", "/weight_info", CHECK_S, WeightInfo).weight_version

    def generate(
        self, prompt: Sequence[int], parameters: dict[str, Any], asked: Asked, deadline: float
    ) -> list[Completion]:
        sampling = asked.request.sampling
        rows = sampling.top_k or asked.vocab_size if sampling.truncates else 0
        limit = BODY + asked.per_prompt * sampling.max_new_tokens * (TOKEN + 12 * rows)
        body = {"token_ids": list(prompt), "sampling_params": parameters}
        seconds = deadline - time.monotonic()
        answer = self.call("POST", GENERATE, seconds, Choices, body, limit)
        return asked.completions(answer, f"{self.url}{GENERATE}")


def remaining(deadline: float) -> float:
    """Seconds until a deadline of the monotonic clock. Raises TimeoutError when it is past."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the time is over")
    return seconds


def _words(answer: bytes) -> str:
    try:
        said = from_json(answer)["error"]
        said = str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, KeyError, TypeError):
        said = repr(answer[:200])
    return escape_control(said[:500])
