"""The engine `vllm-server`, which sends the trainer's weights to vLLM 0.32 servers and samples.

All requests run on one event loop. Every operation on a server has one deadline. A server that is
unreachable, hangs or has other weights is excluded, and the other servers sample its prompts. The
server is included again as soon as it has the current weights.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import httpx2
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_fast.errors import EngineError, escape_control, reason, require
from grpo_fast.rollout.engine import Completion, Engine, Request, VLLMOptions
from grpo_fast.rollout.vllm import answers, transfer
from grpo_fast.rollout.vllm.answers import BadAnswer, ServerError, VLLMRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_fast.rollout.own.model import SampledModel

log = logging.getLogger(__name__)

CHECK_S = 10.0  # timeout in seconds of a call that a healthy server answers at once
PAUSE_S = 1.0  # seconds between two checks of a server that is gone
CONNECTIONS = 256  # maximum number of connections to one server
MAX_BYTES = 1 << 31  # a longer response is refused, because it would fill the trainer's memory
ATTEMPTS = 3  # tries to sample all completions of a batch, or to send weights to a running server
GENERATE = "/inference/v1/generate"
OPTIONS_MISSING = (
    "start it with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out --logprobs-mode "
    f"{answers.LOGPROBS} --weight-transfer-config '{{\"backend\": …}}'"
)


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all requests.

    It runs in a daemon thread, because a notebook's thread already runs a loop, and because a
    request must not delay the exit of the process.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def run(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines concurrently, and return their results. The first error is raised at once."""

    async def gather() -> list[Any]:
        return await asyncio.gather(*calls)

    return asyncio.run_coroutine_threadsafe(gather(), event_loop()).result()


def started(work: Callable[[], Any]) -> Future[Any]:
    """Run a function on a daemon thread, and return a future of its result.

    A ThreadPoolExecutor would keep the process from exiting while a thread waits for a server.
    """
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


class Server:
    """One vLLM server: a client for its HTTP API, with the state of its weights.

    Every request opens a new connection. Redirects are not followed, and the environment's proxies
    and passwords are not used.

    Args:
        url: the server, as `http://host:port`.
        options: the section `rollout.vllm` of a configuration.
        device: device of the policy.

    Attributes:
        has: name of the weights that the server has. None if unknown.
        reported: name of the weights that the server last reported.
        error: why the server is excluded. None if it takes part.
        deadline: deadline of all current requests, on the monotonic clock.

    Raises:
        ValueError: the environment's `VLLM_API_KEY` has characters that a header cannot hold.
    """

    def __init__(self, url: str, options: VLLMOptions, device: torch.device) -> None:
        self.url = url
        self.options = options
        self.device = device
        self.group: transfer.GlooGroup | transfer.NCCLGroup | None = None
        self.has: str | None = None
        self.reported = ""
        self.error: Exception | None = None
        self.deadline = 0.0
        self.key = os.environ.get("VLLM_API_KEY", "").strip()
        if not (self.key.isascii() and self.key.isprintable()):  # httpx's error would quote the key
            raise ValueError("VLLM_API_KEY: expected printable ASCII characters (not shown)")
        # Request no compression, because the body is read and counted as raw bytes.
        headers = {"Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        limits = httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=0)
        self.client = httpx2.AsyncClient(
            base_url=url, headers=headers, timeout=None, trust_env=False, limits=limits
        )

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request, and return the JSON object of the response, or its text.

        A gateway may quote the request's headers in a text, so the key is replaced in texts.

        Args:
            method: "GET" or "POST".
            path: path and query, such as "/health".
            body: value that is sent as JSON, or None.

        Raises:
            ServerError: no complete response before the deadline, or a server error.
            ValueError: the server refuses the request.
        """
        where = f"{self.url}{path}"
        content = bytearray()
        try:
            # The timeout of httpx applies to each read, so a server that sends one byte now and
            # then would never time out. This timeout limits the whole exchange.
            async with (
                asyncio.timeout_at(self.deadline),
                self.client.stream(method, path, json=body) as response,
            ):
                async for piece in response.aiter_raw():
                    content += piece
                    most = f"at most {MAX_BYTES} bytes"
                    require(len(content) <= MAX_BYTES, "response", most, "more")
        except TimeoutError as error:
            raise ServerError(f"{where}: no answer within rollout.vllm.timeout") from error
        except (httpx2.HTTPError, OSError, ValueError) as error:
            raise ServerError(f"{where}: {escape_control(reason(error))}") from error
        status = response.status_code
        if status == 200:
            with suppress(ValueError, RecursionError):
                answer = json.loads(content)
                if isinstance(answer, dict):
                    return answer
        # Replace the key before the text is cut. Otherwise, a part of the key may remain.
        text = content.decode(errors="replace")
        text = text.replace(self.key, "***") if self.key else text
        if status == 200:
            return text
        message = f"{where}: {status} {escape_control(' '.join(text[:500].split()))}"
        if status in (403, 404):
            raise ValueError(f"{message}; {OPTIONS_MISSING}")
        if 400 <= status < 500 and status not in (408, 429):
            raise ValueError(message)
        raise ServerError(message)

    async def read(self, path: str, key: str, kind: type) -> Any:
        """Return a value of the JSON object that the server sends for a path. Check its type."""
        answer = await self.call("GET", path)
        with answers.reading(f"{self.url}{path}"):
            if type(answer[key]) is not kind:
                raise TypeError(f"{key} is no {kind.__name__}")
            return answer[key]

    async def is_up(self) -> bool:
        """Ask the server for the name of its weights. Exclude the server if it is not reachable."""
        self.deadline = time.monotonic() + CHECK_S
        try:
            version = await self.read("/weight_info", "weight_version", str)
        except ServerError as error:
            self.exclude(error)
            return False
        self.reported = escape_control(version[:80])
        return True

    async def check(self, policy: SampledModel) -> None:
        """Check that the server's options and model fit the policy. The server is not changed.

        Raises:
            ValueError: the server reports raw log-probabilities, or has a different model.
        """
        config = await self.read("/server_info?config_format=json", "vllm_config", dict)
        answer = await self.call("POST", "/collective_rpc", {"method": "get_model_inspection"})
        with answers.reading(f"{self.url}/server_info, /collective_rpc"):
            mode = escape_control(config["model_config"]["logprobs_mode"][:40])
            theirs = escape_control(config["model_config"]["dtype"][:40]).removeprefix("torch.")
            served = str(answer["results"][0])
        expected = f"servers with --logprobs-mode {answers.LOGPROBS}"
        require(mode == answers.LOGPROBS, "rollout.vllm.urls", expected, f"{mode} at {self.url}")
        check_model(policy.lm, served, self.url)
        ours = transfer.dtype_of(policy)
        if ours != theirs:
            advice = f"start it with --dtype {ours}, or their log-probabilities differ"
            message = "%s samples in %s, the trainer computes in %s: %s"
            log.warning(message, self.url, theirs, ours, advice)

    async def generate(
        self, prompt: Sequence[int], parameters: dict[str, Any], request: VLLMRequest
    ) -> list[Completion]:
        """Request the completions of one prompt, check them, and return them."""
        body = {"token_ids": list(prompt), "sampling_params": parameters}
        answer = await self.call("POST", GENERATE, body)
        if isinstance(answer, str):  # a proxy may have sent it
            raise ServerError(f"{self.url}{GENERATE}: expected a JSON object, got {answer[:60]!r}")
        return request.completions(answer, f"{self.url}{GENERATE}")

    async def receive(self, name: str, weights: Mapping[str, Tensor], policy: SampledModel) -> None:
        """Send the weights of a policy to the server, and give them a name.

        A new server is checked before it is changed, and so is a server that reports other weights
        than it received last, for example after a restart. The server does not sample while it
        receives weights.
        """
        self.deadline = time.monotonic() + self.options.timeout
        post = partial(self.call, "POST")
        # 1. Form a process group with the server's workers, and stop sampling.
        if self.group is None or self.reported != self.has:
            await self.check(policy)
            self.group = await self._join_group()
        broadcast = self.group.broadcast
        was_paused = await self.read("/is_paused", "is_paused", bool)
        await post("/pause?mode=keep")
        # 2. If the server was already paused, a trainer may have been killed during an update.
        if was_paused:
            await self._close_update()
        # 3. Send the weights, and resume sampling. If sending fails, resume anyway, because the
        #    server would otherwise stay paused. `_close_update` gives the incomplete weights a name
        #    that no trainer uses, so trainers replace them.
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()]
        shapes = [list(tensor.shape) for tensor in weights.values()]
        info = {"names": list(weights), "dtype_names": dtypes, "shapes": shapes}
        try:
            await post("/start_weight_update")
            # Broadcast in a thread, because the server responds only after it has all tensors.
            sent = started(lambda: [broadcast(tensor) for tensor in weights.values()])
            await post("/update_weights", {"update_info": info})
            async with asyncio.timeout_at(self.deadline):
                await asyncio.shield(asyncio.wrap_future(sent))
            await post("/finish_weight_update", {"weight_version": name})
        except (RuntimeError, OSError, ValueError):
            self.deadline = min(self.deadline, time.monotonic() + 6 * CHECK_S)
            with suppress(EngineError, ValueError):  # the server may be gone
                await self._close_update()
                await post("/resume")
            raise
        await post("/resume")

    async def _close_update(self) -> None:
        """Close a weight update that failed or was left open.

        vLLM would refuse a second update, or add it to half-loaded layers. Only
        /finish_weight_update resets these layers, but it fails if no update is open. Therefore
        call /start_weight_update first, and ignore its error, which occurs if an update is open.
        """
        with suppress(ServerError):
            await self.call("POST", "/start_weight_update")
        await self.call("POST", "/finish_weight_update", {"weight_version": "left-in-the-middle"})

    async def _join_group(self) -> transfer.GlooGroup | transfer.NCCLGroup:
        """Form a process group with the workers of the server."""
        # 1. Open a port to which the server's workers connect.
        address = self.options.address
        workers = await self.read("/get_world_size", "world_size", int)
        fits = 0 < workers < 1 << 16
        require(fits, f"{self.url}/get_world_size", "a number of workers", workers, BadAnswer)
        try:
            listener = socket.create_server((address, 0))
        except OSError as error:
            expected = f"expected an IPv4 address or a name of this machine, got {address}"
            raise ValueError(f"rollout.vllm.address: {expected}: {reason(error)}") from error
        port = listener.getsockname()[1]
        place = {"master_address": address, "master_port": port, "world_size": workers + 1}
        info: dict[str, Any] = {**place, "rank_offset": 1}
        # 2. Join the process group in a thread, because the server responds only after its workers
        #    have joined.
        kind = self.options.transfer
        if kind == "nccl" or (kind == "auto" and self.device.type == "cuda"):
            listener.close()  # vLLM opens the socket itself
            joined = started(lambda: transfer.NCCLGroup(place, self.device))
        else:
            info["seconds"] = self.options.timeout
            own: dict[str, Any] = {"rank": 0, "seconds": self.options.timeout, "listener": listener}
            joined = started(lambda: transfer.GlooGroup(**place, **own))
        await self.call("POST", "/init_weight_transfer_engine", {"init_info": info})
        async with asyncio.timeout_at(self.deadline):
            return await asyncio.shield(asyncio.wrap_future(joined))

    def include(self, name: str) -> None:
        if self.error is not None:
            log.warning("%s takes part again", self.url)
        self.has = name
        self.error = None

    def exclude(self, error: Exception) -> None:
        """After an error, exclude the server until it has received weights through a new group."""
        if not isinstance(error, EngineError):
            error = ServerError(f"{self.url}: sending weights: {reason(error)}")
        if self.error is None:
            log.warning("%s is left out: %s", self.url, error)
        self.group = None
        self.has = None
        self.error = error


class VLLMServers(Engine):
    """Engine that samples on vLLM servers.

    Args:
        policy: the `Policy` whose weights are sent.
        options: the section `rollout` of a configuration.
    """

    is_apart = True

    def __init__(self, policy: SampledModel, options: Any) -> None:
        self.policy = policy
        self.options: VLLMOptions = options.vllm
        self.may_send = True  # see `update`
        self.servers = [Server(url, self.options, policy.device) for url in self.options.urls]
        self.rank = 0
        self.run = secrets.token_hex(4)
        self.version = 0
        self.name = ""  # name of the current weights; other runs use other names
        self.count = 0  # number of times that `update` received a different model than before
        if dist.is_available() and dist.is_initialized():
            # All ranks must use the same name for the same weights, so broadcast rank 0's name.
            number = torch.tensor([int(self.run, 16)], device=policy.device)
            dist.broadcast(number, 0)
            self.run = f"{number.item():x}"
            self.rank = dist.get_rank()

    def update(self, policy: SampledModel, version: int) -> None:
        """Send the weights to all servers that do not have them.

        All ranks must call this, but only rank 0 sends. A server that becomes available later
        receives the weights during `sample`, unless the weights are sharded.

        Args:
            policy: the policy.
            version: version number of its weights.

        Raises:
            ServerError: no server has received the weights within `rollout.vllm.patience`.
            ValueError: a server reports raw log-probabilities, or has a different model.
        """
        self.count += policy.lm is not self.policy.lm
        self.policy = policy
        self.version = version
        self.name = f"{self.run}-{self.count}-{version}"
        self.may_send = not any(hasattr(p, "full_tensor") for p in policy.lm.parameters())
        # Gather sharded weights now, because gathering later would make all ranks wait for servers.
        self._bring_up(None if self.may_send else transfer.weights_of(policy.lm))

    def sample(self, request: Request) -> list[Completion]:
        """Return the completions of a request. See `Engine.sample`.

        Raises:
            ServerError: some prompts still have no completions after three tries.
        """
        vllm_request = VLLMRequest(self.policy, request, self.version, self.name)
        parameters = vllm_request.parameters()
        count = len(request.prompts)
        done: dict[int, list[Completion]] = {}

        async def generate(i: int, server: Server) -> None:
            try:
                done[i] = await server.generate(request.prompts[i], parameters[i], vllm_request)
            except ServerError as error:
                server.exclude(error)

        for _ in range(ATTEMPTS):
            pending = [i for i in range(count) if i not in done]
            if not pending:
                break
            servers = self._bring_up() if self.may_send else self._ready()
            if not servers:
                raise ServerError(f"no vLLM server has the weights: {self._errors()}")
            for server in servers:
                server.deadline = time.monotonic() + self.options.timeout
            run(*map(generate, pending, cycle(servers)))
        if len(done) < count:
            what = f"{count - len(done)} of {count} prompts have no completions"
            raise ServerError(f"{what} after {ATTEMPTS} tries: {self._errors()}")
        return vllm_request.in_groups([done[i] for i in range(count)])

    def _bring_up(self, weights: Mapping[str, Tensor] | None = None) -> list[Server]:
        """Send the weights to all running servers. Return the servers that have received them."""
        deadline = time.monotonic() + self.options.patience
        tries = 0
        while True:
            outdated = [server for server in self.servers if server.has != self.name]
            # Ask in parallel, because a server whose machine is gone takes CHECK_S seconds.
            are_up = run(*(server.is_up() for server in outdated))
            reached = [server for server, is_up in zip(outdated, are_up, strict=True) if is_up]
            # Compute the weights only if a server needs them, because this copies the experts of an
            # MoE model.
            if self.rank == 0 and reached and weights is None:
                weights = transfer.weights_of(self.policy.lm)
            tries += self.rank == 0 and bool(reached)
            run(*(self._bring(server, weights) for server in reached))
            ready = self._ready()
            if ready:
                return ready
            if tries == ATTEMPTS or time.monotonic() > deadline:
                tried = f"after {self.options.patience:.3g} s and {tries} tries"
                raise ServerError(f"no vLLM server has the weights {tried}: {self._errors()}")
            time.sleep(PAUSE_S)

    async def _bring(self, server: Server, weights: Mapping[str, Tensor] | None) -> None:
        """Send the current weights to a server, and include it.

        Ranks other than 0 send nothing. They check whether the server has the weights of rank 0.
        """
        try:
            if self.rank == 0 and weights is not None:
                await server.receive(self.name, weights, self.policy)
            if self.rank == 0 or server.reported == self.name:
                server.include(self.name)
        except (RuntimeError, OSError) as error:  # raised by the server, the group or a timeout
            server.exclude(error)

    def _ready(self) -> list[Server]:
        return [server for server in self.servers if server.has == self.name]

    def _errors(self) -> str:
        errors = [str(server.error) for server in self.servers if server.error is not None]
        return "; ".join(errors) or "rank 0 has not sent them"


def check_model(lm: PreTrainedModel, served: str, url: str) -> None:
    """Raise a ValueError if the server's model has an embedding of a different size.

    vLLM refuses weights of other shapes, but only after it has loaded some of the weights.

    Args:
        lm: the trainer's model.
        served: vLLM's printout of its model, which contains the sizes of its embeddings.
        url: the server, for the message.
    """
    rows, width = lm.get_input_embeddings().weight.shape
    ours = {"org_vocab_size": rows, "embedding_dim": width}
    # The first embedding is the input embedding. Others, such as Gemma 3n's per layer, have other
    # sizes.
    sizes = re.findall(r"\b(org_vocab_size|embedding_dim)=(\d{1,9})\b", served)
    for name, number in {name: int(number) for name, number in reversed(sizes)}.items():
        other = f"a different model at {url}: the {name} is {number} there, {ours[name]} here"
        require(number == ours[name], "rollout.vllm.urls", "this run's model", other)
