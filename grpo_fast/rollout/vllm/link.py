"""One vLLM server and the group of processes by which it gets weights."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from grpo_fast.data import escape_control, reason
from grpo_fast.errors import EngineError, require
from grpo_fast.rollout.vllm.answers import ModelInfo, Paused, Reply, Results, ServerError, WorldSize
from grpo_fast.rollout.vllm.http import CHECK_S, LOGPROBS, Server, remaining
from grpo_fast.rollout.vllm.options import VLLMOptions
from grpo_fast.rollout.vllm.transfer import (
    GlooGroup,
    Named,
    NCCLGroup,
    check_shapes,
    dtype_of,
    started,
)

log = logging.getLogger(__name__)


class Link:
    def __init__(self, url: str, options: VLLMOptions, device: torch.device) -> None:
        self.server, self.options, self.device = Server(url), options, device
        transfer = options.transfer
        self.by_nccl = transfer == "nccl" or (transfer, device.type) == ("auto", "cuda")
        self.group: GlooGroup | NCCLGroup | None = None
        self.label: str | None = None  # of the weights that it is known to have
        self.error: Exception | None = None  # why it was left out
        self.deadline = 0.0  # of the transfer that is under way

    def check(self, policy: Any) -> None:
        """Raise for a server that these weights cannot be sent to; nothing of it is changed."""
        url, call = self.server.url, partial(self.server.call, seconds=6 * CHECK_S)
        info = call("GET", "/server_info?config_format=json", kind=ModelInfo)
        self.server.weight_version()
        fits, expected = info.logprobs_mode == LOGPROBS, f"servers with --logprobs-mode {LOGPROBS}"
        came = f"{escape_control(info.logprobs_mode[:40])} at {url}"
        require(fits, "rollout.vllm.urls", expected, came)
        body = {"method": "get_model_inspection"}
        served = call("POST", "/collective_rpc", kind=Results, body=body).results[0]
        check_shapes(policy.lm, served, url)
        ours, theirs = dtype_of(policy), escape_control(info.dtype[:40]).removeprefix("torch.")
        if ours != theirs:
            advice = f"start it with --dtype {ours}, or their log-probabilities differ"
            said = "%s samples in %s, the trainer computes in %s: %s"
            log.warning(said, url, theirs, ours, advice)

    # ------------------------------------------------------------------------------- weights
    def begin(self) -> None:
        """Have the server wait for weights: it samples nothing until `finish`."""
        self.deadline = time.monotonic() + self.options.timeout
        if self.group is None or self.server.weight_version() != self.label:
            self.group = self._meet()
        seconds = remaining(self.deadline)
        is_open = self.server.call("GET", "/is_paused", seconds, Paused).is_paused
        self._post("/pause?mode=keep")
        # A trainer that died in the middle left an update open, with layers half loaded. vLLM
        # begins none beside it, or adds to those layers: only a finish puts them back.
        if is_open:
            with suppress(ServerError):
                self._post("/start_weight_update")
            self._post("/finish_weight_update", {"weight_version": "left-in-the-middle"})
        self._post("/start_weight_update")

    def send(self, tensors: Named) -> None:
        group = self.group
        # On a thread: the server answers when it has received all, so each waits for the other.
        sent = started(lambda: [group.broadcast(tensor) for _, tensor in tensors])
        info = {
            "names": [name for name, _ in tensors],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
            "shapes": [list(tensor.shape) for _, tensor in tensors],
        }
        self._post("/update_weights", {"update_info": info})
        sent.result(remaining(self.deadline))

    def finish(self, label: str) -> None:
        self._post("/finish_weight_update", {"weight_version": label})
        self._post("/resume")
        if self.error is not None:
            log.warning("%s takes part again", self.server.url)
        self.label, self.error = label, None

    def look(self, label: str) -> None:
        """Mark the server as ready if another rank has sent it these weights."""
        if self.server.weight_version() == label:
            self.label, self.error = label, None

    def leave_out(self, error: Exception) -> None:
        """Leave the server out until a new group is met and it has the weights."""
        if not isinstance(error, EngineError):  # of the group, or the wait for it
            error = ServerError(f"{self.server.url}: sending weights: {reason(error)}")
        if self.error is None:
            log.warning("%s is left out: %s", self.server.url, error)
        self.group = self.label = None
        self.error = error

    def _post(self, path: str, body: Any = None) -> None:
        self.server.call("POST", path, remaining(self.deadline), Reply, body)

    def _meet(self) -> GlooGroup | NCCLGroup:
        address = self.options.address
        size = self.server.call("GET", "/get_world_size", CHECK_S, WorldSize).world_size + 1
        try:
            listener = socket.create_server((address, 0))
        except OSError as error:
            expected = f"expected an address of this machine, got {address}"
            raise ValueError(f"rollout.vllm.address: {expected}: {reason(error)}") from error
        port = listener.getsockname()[1]
        where: dict[str, Any] = {
            "master_address": address, "master_port": port, "world_size": size, "rank_offset": 1,
        }  # fmt: skip
        if self.by_nccl:
            listener.close()  # vLLM opens its own
            meeting: Any = started(partial(NCCLGroup, address, port, size, self.device))
        else:
            seconds = where["seconds"] = self.options.timeout
            meeting = started(lambda: GlooGroup(address, port, 0, size, seconds, listener))
        self._post("/init_weight_transfer_engine", {"init_info": where})
        # The server answers when it has joined, so the group is met on a thread meanwhile.
        return meeting.result(remaining(self.deadline))


def each(links: list[Link], action: Callable[[Link], None]) -> list[Link]:
    def succeeds(link: Link) -> bool:
        try:
            action(link)
        except (RuntimeError, OSError) as error:  # of the server, the group, or the wait
            link.leave_out(error)
            return False
        return True

    with ThreadPoolExecutor(len(links) or 1) as pool:
        return [x for x, good in zip(links, pool.map(succeeds, links), strict=True) if good]
