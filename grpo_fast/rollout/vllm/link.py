"""A vLLM server with the group of processes that weights reach it by."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from grpo_fast.data import reason
from grpo_fast.rollout.engine import EngineError
from grpo_fast.rollout.vllm.http import Server
from grpo_fast.rollout.vllm.options import VLLMOptions
from grpo_fast.rollout.vllm.transfer import GlooGroup, Group, Named, NCCLGroup, started

log = logging.getLogger(__name__)


class Link:
    """A server, and the group that weights reach it by.

    `label` names the weights that it is known to have; None: nobody knows.
    """

    def __init__(self, url: str, options: VLLMOptions, device: torch.device) -> None:
        self.server, self.options, self.device = Server(url), options, device
        by_nccl = options.transfer == "nccl" or (options.transfer, device.type) == ("auto", "cuda")
        self.backend = "nccl" if by_nccl else "gloo"
        self.group: Group | None = None
        self.label: str | None = None
        self.error: Exception | None = None  # why it was left out

    def begin(self) -> None:
        """Make it wait for weights; a server that has started anew is met anew."""
        if self.group is None or self.server.weight_version() != self.label:
            self.group = self._meet()
        self.server.start_update(self.options.timeout)

    def send(self, tensors: Named) -> None:
        group, seconds = self.group, self.options.timeout
        sent = started(lambda: [group.broadcast(tensor) for _, tensor in tensors])
        self.server.announce(tensors, seconds)
        sent.result(seconds)

    def finish(self, label: str) -> None:
        self.server.finish_update(label, self.options.timeout)
        if self.error is not None:
            log.warning("%s takes part again", self.server.url)
        self.label, self.error = label, None

    def look(self, label: str) -> None:
        """Whether another rank has sent it these weights."""
        if self.server.weight_version() == label:
            self.label, self.error = label, None

    def leave_out(self, error: Exception) -> None:
        """Until it has been met anew and has the weights."""
        if self.error is None:
            log.warning("%s is left out: %s", self.server.url, said(error))
        self.group = self.label = None
        self.error = error

    def _meet(self) -> Group:
        address, seconds = self.options.address, self.options.timeout
        world_size = 1 + self.server.world_size()
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        where = {
            "master_address": address, "master_port": port, "world_size": world_size,
            "rank_offset": 1,
        }  # fmt: skip
        if self.backend == "nccl":
            listener.close()  # vLLM opens its own
            nccl = partial(NCCLGroup, address, port, world_size, self.device)
            meeting: Any = started(nccl)
        else:
            where["seconds"] = seconds
            meeting = started(lambda: GlooGroup(address, port, 0, world_size, seconds, listener))
        self.server.meet(where, seconds)
        return meeting.result(seconds)


def said(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else reason(error)


def each(links: list[Link], action: Callable[[Link], None]) -> list[Link]:
    """Those that an action succeeded with; it is done with all at once."""

    def succeeds(link: Link) -> bool:
        try:
            action(link)
        except (RuntimeError, TimeoutError) as error:  # of the server, the group, or the wait
            link.leave_out(error)
            return False
        return True

    if not links:
        return []
    with ThreadPoolExecutor(len(links)) as pool:
        return [x for x, good in zip(links, pool.map(succeeds, links), strict=True) if good]
