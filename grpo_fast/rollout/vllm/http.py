"""The HTTP API of a vLLM server, as of 0.32: this file alone knows its paths and fields.

The paths about weights are there with VLLM_SERVER_DEV_MODE=1, the one for tokens with
--enable-scale-out.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from grpo_fast.data import reason
from grpo_fast.rollout.engine import EngineError
from grpo_fast.rollout.vllm.answers import Answer, BadAnswer

CHECK_S = 10.0  # a question that a living server answers at once
START = (
    "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --logprobs-mode "
    "processed_logprobs --weight-transfer-config '{\"backend\": …}'"
)


class ServerError(EngineError):
    """A server is gone, hangs or failed: another try may do."""


class Server:
    """One vLLM server. Every call has its time, in seconds.

    Raises:
        ServerError: no answer in time, or one that says that the server failed.
        ValueError: the server refuses what it was asked.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url, self.host, self.port = url, parts.hostname, parts.port
        is_tls = parts.scheme == "https"
        self._kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        key = os.environ.get("VLLM_API_KEY")
        self._headers = {"Content-Type": "application/json"}
        self._headers |= {"Authorization": f"Bearer {key}"} if key else {}

    def call(self, method: str, path: str, seconds: float, body: Any = None) -> dict[str, Any]:
        """What the server answers, which is JSON."""
        status, answer = self._send(method, path, seconds, body)
        if status in (403, 404):
            raise ValueError(f"{self.url}{path}: {status} {_words(answer)}; {START}")
        if 400 <= status < 500:
            raise ValueError(f"{self.url}{path}: {status} {_words(answer)}")
        if status != 200:
            raise ServerError(f"{self.url}{path}: {status} {_words(answer)}")
        return _parsed(answer, f"{self.url}{path}")

    def is_up(self) -> bool:
        """Whether it answers, and says that it is well."""
        try:
            return self._send("GET", "/health", CHECK_S)[0] == 200
        except ServerError:
            return False

    def _send(self, method: str, path: str, seconds: float, body: Any = None) -> tuple[int, bytes]:
        connection = self._kind(self.host, self.port, timeout=max(seconds, 0.01))
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            timed_out = isinstance(error, TimeoutError)
            why = f"no answer within {seconds:.3g} s" if timed_out else reason(error)
            raise ServerError(f"{self.url}{path}: {why}") from error
        finally:
            connection.close()

    # ------------------------------------------------------------------------------- weights
    def weight_version(self) -> str:
        return str(self.call("GET", "/weight_info", CHECK_S).get("weight_version"))

    def world_size(self) -> int:
        """How many workers take part in a transfer."""
        return int(self.call("GET", "/get_world_size", CHECK_S)["world_size"])

    def logprobs_mode(self) -> str | None:
        info = self.call("GET", "/server_info?config_format=json", 6 * CHECK_S)
        config = info.get("vllm_config", {}).get("model_config", {})
        return config.get("logprobs_mode")

    def meet(self, where: dict[str, Any], seconds: float) -> None:
        self.call("POST", "/init_weight_transfer_engine", seconds, {"init_info": where})

    def start_update(self, seconds: float) -> None:
        """Nothing is sampled from here to `finish_update`; what is under way is kept."""
        self.call("POST", "/pause?mode=keep", seconds)
        self.call("POST", "/start_weight_update", seconds)

    def announce(self, tensors: Sequence[tuple[str, Any]], seconds: float) -> None:
        """Tensors that are on their way, in this order; returns when they have been loaded."""
        info = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }
        self.call("POST", "/update_weights", seconds, {"update_info": info})

    def finish_update(self, version: str, seconds: float) -> None:
        self.call("POST", "/finish_weight_update", seconds, {"weight_version": version})
        self.call("POST", "/resume", seconds)

    # ----------------------------------------------------------------------------- completions
    def generate(
        self, prompt: Sequence[int], parameters: dict[str, Any], seconds: float
    ) -> list[tuple[Answer, str]]:
        """The completions of a prompt, each with the version that its first token was sampled by.

        Raises:
            BadAnswer: an answer that is not of this form.
        """
        body = {"token_ids": list(prompt), "sampling_params": parameters}
        path = "/inference/v1/generate"
        answer = self.call("POST", path, seconds, body)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if any(choice["finish_reason"] in ("abort", "error") for choice in choices):
                raise ServerError(f"{self.url}{path}: the server left a completion unfinished")
            found = [_answer(choice) for choice in choices]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadAnswer(f"{self.url}{path}: no completions: {reason(error)}") from error
        if len(found) != parameters["n"]:
            expected = f"expected {parameters['n']} completions"
            raise BadAnswer(f"{self.url}{path}: {expected}, got {len(found)}")
        return found


def _answer(choice: dict[str, Any]) -> tuple[Answer, str]:
    content = choice["logprobs"]["content"]
    ids = [int(token) for token in choice["token_ids"]]
    if [one["token_id"] for one in content] != ids[: len(content)]:
        raise ValueError("log-probabilities of other tokens")
    logps = [float(one["logprob"]) for one in content]
    answer = Answer(ids, logps, choice["finish_reason"], choice.get("sampling_mask"))
    return answer, str(choice["weight_versions"][0]["version"])


def _parsed(answer: bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(answer) if answer else {}
    except ValueError as error:
        raise ServerError(f"{where}: expected JSON, got {answer[:60]!r}") from error
    if not isinstance(parsed, dict):
        raise ServerError(f"{where}: expected an object, got {answer[:60]!r}")
    return parsed


def _words(answer: bytes) -> str:
    """What a refusal says."""
    try:
        said = json.loads(answer)["error"]
        return str(said["message"] if isinstance(said, dict) else said)[:500]
    except (ValueError, KeyError, TypeError):
        return repr(answer[:200])
