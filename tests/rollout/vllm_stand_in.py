"""Simulated vLLM server, with the same HTTP interface but a tiny transformers model.

The server receives weights through gloo, like a real server. Tests can make its calls fail.
"""

import copy
import json
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch

from grpo_fast.rollout import Samples, Sampling
from grpo_fast.rollout.engine import VLLMOptions
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.rollout.vllm.servers import VLLMServers
from grpo_fast.rollout.vllm.transfer import GlooGroup
from tests.train.tiny_steps import batch_of

GENERATE, UPDATE = "/inference/v1/generate", "/update_weights"
START, FINISH = "/start_weight_update", "/finish_weight_update"
JOIN = "/init_weight_transfer_engine"
SECONDS = 20.0  # timeout of the engine's calls, which no working call exceeds on a busy machine
Change = Callable[[dict[str, Any]], Any]  # changes a response in place or returns a new response


def difference(policy: Any, samples: Samples, temperature: float = 1.0) -> float:
    """Return the largest difference between the log-probs of the sampler and of the policy.

    The samples must be in groups of three.
    """
    batch = batch_of(samples, torch.zeros(len(samples))).micro_batches[0]
    with torch.no_grad():
        logps = policy.logps(batch.packed, temperature)
    return float((logps - batch.column("logps")).abs().max())


@torch.no_grad()
def spoil(policy: Any) -> None:
    """Halve the LM head's weights, so that the policy differs from the copies on all servers."""
    policy.lm.get_output_embeddings().weight.mul_(0.5)


def engine_of(
    policy: Any, *servers: "StandIn", version: int | None = None, **options: float
) -> VLLMServers:
    """Return an engine for the servers. If `version` is given, send the weights as this version."""
    given = {"timeout": SECONDS, "patience": SECONDS, **options}
    options = VLLMOptions(urls=[x.url for x in servers], **given)
    engine = VLLMServers(policy, SimpleNamespace(vllm=options))
    if version is not None:
        engine.update(policy, version)
    return engine


class Raw:
    """Fault that sends raw bytes instead of a response.

    `play(write)` calls `write` with each part of the bytes.
    """

    def __init__(self, play: Callable[[Callable[[bytes], None]], None]) -> None:
        self.play = play


class StandIn:
    """Replacement for a vLLM server. It answers HTTP calls in threads of this process.

    It samples with a copy of `policy` instead of vLLM. A restart restores the initial weights.

    Attributes:
        faults: Maps a URL path to the faults of its next calls. A list has one fault for each call,
            and a single fault applies to all calls. A fault is an HTTP status, "hang" (send no
            response), "die" (stop the server), a `Raw`, a `Change`, or None for no fault.
        calls: Maps a URL path to the number of its calls.
        prompts: The token ids of all prompts that were received, in order.
    """

    def __init__(self, policy: Any) -> None:
        self.initial, self.port = policy.frozen_copy(), 0
        self.faults: dict[str, Any] = {}
        self.calls: Counter[str] = Counter()
        self.prompts: list[list[int]] = []
        self.mode, self.dtype = "processed_logprobs", "torch.float32"
        self.ignores_updates = False  # True receives weights, but keeps the old ones
        self.start()

    def start(self) -> None:
        """Start the server, or restart it on the same port with its initial weights."""
        self.policy, self.version, self.is_updating = copy.deepcopy(self.initial), "default", False
        self.is_paused, self.versions = False, []  # `versions` names the finished weight updates
        self.group: GlooGroup | None = None
        self.ended, self.lock = threading.Event(), threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Stop the server. Calls in progress never receive a response."""
        self.ended.set()
        self.http.shutdown()
        self.http.server_close()
        self.group = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        name = path.strip("/").split("?")[0].replace("/", "_")
        rows, width = self.policy.lm.get_input_embeddings().weight.shape
        embedding = f"VocabParallelEmbedding(embedding_dim={width}, org_vocab_size={rows})"
        facts: dict[str, dict[str, Any]] = {
            "weight_info": {"weight_version": self.version},
            "get_world_size": {"world_size": 1},
            "is_paused": {"is_paused": self.is_paused},
            "server_info": {
                "vllm_config": {"model_config": {"logprobs_mode": self.mode, "dtype": self.dtype}}
            },
            # The engine uses `collective_rpc` only to request the printout of the model.
            "collective_rpc": {"results": [f"Model()(\n  (embed_tokens): {embedding}\n)"]},
        }
        return facts[name] if name in facts else getattr(self, f"on_{name}")(**body) or {}

    def on_init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.group = GlooGroup(
            init_info["master_address"], init_info["master_port"], init_info["world_size"],
            init_info["rank_offset"], init_info["seconds"],
        )  # fmt: skip

    def on_pause(self) -> None:
        self.is_paused = True

    def on_resume(self) -> None:
        self.is_paused = False

    def on_start_weight_update(self) -> None:
        if self.is_updating:
            raise RuntimeError("a weight update is already active")
        self.is_updating = True

    def on_update_weights(self, update_info: dict[str, Any]) -> None:
        assert self.is_updating
        if self.group is None:
            raise RuntimeError("not initialized")
        state = dict(self.policy.lm.state_dict())
        for name, dtype, shape in zip(*update_info.values(), strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast(tensor)
            if not self.ignores_updates:
                state[name].copy_(tensor)

    def on_finish_weight_update(self, weight_version: str) -> None:
        if not self.is_updating:
            raise RuntimeError("finish_weight_update called without start_weight_update")
        self.version, self.is_updating = weight_version, False
        self.versions.append(weight_version)

    def on_inference_v1_generate(
        self, token_ids: list[int], sampling_params: dict[str, Any]
    ) -> dict[str, Any]:
        given = sampling_params
        assert given["n"] == 1 or given["temperature"] > 0
        assert given["ignore_eos"] and set(given["stop_token_ids"]) == self.policy.eos_ids
        sampling = Sampling(
            max_new_tokens=given["max_tokens"], temperature=given["temperature"],
            top_p=given["top_p"], top_k=given["top_k"], min_p=given["min_p"],
        )  # fmt: skip
        with self.lock:
            self.prompts.append(token_ids)
            sample = TransformersEngine(self.policy).generate
            found = sample([token_ids], sampling, group_size=given["n"], seed=given["seed"])
        return {"choices": [self._choice(i, one) for i, one in enumerate(found)]}

    def _choice(self, index: int, one: Any) -> dict[str, Any]:
        pairs = zip(one.ids, one.logps.tolist(), strict=True)
        return {
            "index": index, "token_ids": one.ids, "sampling_mask": None,
            "finish_reason": "stop" if one.finish_reason == "eos" else "length",
            "weight_versions": [{"version": self.version, "start": 0, "end": len(one.ids)}],
            "logprobs": {"content": [{"token_id": t, "logprob": x, "rank": 1} for t, x in pairs]},
        }  # fmt: skip

    def _handler(stand_in) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        ended = stand_in.ended  # keep this event, because a restart creates a new one

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.respond()

            do_POST = do_GET

            def respond(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or "{}")
                path = self.path.split("?")[0]
                stand_in.calls[path] += 1
                faults = stand_in.faults.get(path)
                fault = faults
                if isinstance(faults, list):
                    fault = faults.pop(0) if faults else None
                if fault == "die":
                    threading.Thread(target=stand_in.stop, daemon=True).start()
                if fault in ("hang", "die"):
                    ended.wait(30)
                if ended.is_set():
                    self.close_connection = True
                    return
                if isinstance(fault, Raw):
                    with suppress(OSError):  # the client has gone
                        fault.play(self.put)
                    self.close_connection = True
                    return
                if isinstance(fault, int):
                    stand_in.is_updating &= path != "/update_weights"  # vLLM ends a failed update
                    self.say(fault, {"error": {"message": f"told to say {fault}"}})
                    return
                try:
                    answer = stand_in.answer(self.path, body)
                except Exception as error:
                    self.say(500, {"error": {"message": repr(error)}})
                    return
                changed = fault(answer) if callable(fault) else None
                self.say(200, answer if changed is None else changed)

            def put(self, text: bytes) -> None:
                if ended.is_set():
                    raise ConnectionAbortedError
                self.wfile.write(text)
                self.wfile.flush()

            def say(self, status: int, answer: Any) -> None:
                text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                with suppress(OSError):  # the client has gone
                    self.end_headers()
                    self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                """Write no log line for a request."""

        return Handler
