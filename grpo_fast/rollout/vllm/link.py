"""One vLLM server and the process group that sends weights to it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from grpo_fast.data import escape_control, reason
from grpo_fast.errors import EngineError, require
from grpo_fast.rollout.engine import Completion
from grpo_fast.rollout.vllm import answers, transfer
from grpo_fast.rollout.vllm.answers import Asked, ServerError
from grpo_fast.rollout.vllm.http import CHECK_S, GENERATE, LOGPROBS, Server, at_once, remaining
from grpo_fast.rollout.vllm.options import VLLMOptions
from grpo_fast.rollout.vllm.transfer import GlooGroup, Named, NCCLGroup, started

log = logging.getLogger(__name__)


class Link:
    """A server and what the trainer knows about it.

    Attributes:
        label: name of the weights that the server is known to have; None if unknown.
        error: why the server is left out; None if it takes part.
        deadline: of the weight transfer that is in progress.
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

    def check(self, policy: Any) -> None:
        """Raise a ValueError for a server that does not fit the policy. Changes no server."""
        url = self.server.url
        call = partial(self.server.call, seconds=6 * CHECK_S)
        info = call("GET", "/server_info?config_format=json", kind=answers.ModelInfo)
        self.server.weight_version()
        fits = info.logprobs_mode == LOGPROBS
        came = f"{escape_control(info.logprobs_mode[:40])} at {url}"
        require(fits, "rollout.vllm.urls", f"servers with --logprobs-mode {LOGPROBS}", came)
        body = {"method": "get_model_inspection"}
        served = call("POST", "/collective_rpc", kind=answers.Results, body=body)
        transfer.check_shapes(policy.lm, served.results[0], url)
        ours = transfer.dtype_of(policy)
        theirs = escape_control(info.dtype[:40]).removeprefix("torch.")
        if ours != theirs:
            advice = f"start it with --dtype {ours}, or their log-probabilities differ"
            said = "%s samples in %s, the trainer computes in %s: %s"
            log.warning(said, url, theirs, ours, advice)

    def generate(
        self, prompt: Sequence[int], parameters: dict[str, Any], asked: Asked, deadline: float
    ) -> list[Completion]:
        """Return the completions of one prompt."""
        body = {"token_ids": list(prompt), "sampling_params": parameters}
        seconds = deadline - time.monotonic()
        answer = self.server.call("POST", GENERATE, seconds, answers.Choices, body, asked.limit)
        return asked.completions(answer, f"{self.server.url}{GENERATE}")

    def begin(self) -> None:
        """Prepare the server for weights. It samples nothing until `finish`."""
        self.deadline = time.monotonic() + self.options.timeout
        if self.group is None or self.server.weight_version() != self.label:
            self.group = self._meet()
        seconds = remaining(self.deadline)
        is_open = self.server.call("GET", "/is_paused", seconds, answers.Paused).is_paused
        self._post("/pause?mode=keep")
        # A trainer that died during an update left layers half loaded. vLLM refuses a second
        # update or adds to these layers; only a finish puts them back.
        if is_open:
            with suppress(ServerError):
                self._post("/start_weight_update")
            self._post("/finish_weight_update", {"weight_version": "left-in-the-middle"})
        self._post("/start_weight_update")

    def send(self, tensors: Named) -> None:
        group = self.group
        # Broadcast on a thread: the server answers only when it has received all tensors.
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
        self._take_part(label)

    def look(self, label: str) -> None:
        """Let the server take part if another rank has sent it these weights."""
        if self.server.weight_version() == label:
            self._take_part(label)

    def leave_out(self, error: Exception) -> None:
        """Leave the server out until it has joined a new group and has received the weights."""
        if not isinstance(error, EngineError):
            error = ServerError(f"{self.server.url}: sending weights: {reason(error)}")
        if self.error is None:
            log.warning("%s is left out: %s", self.server.url, error)
        self.group = None
        self.label = None
        self.error = error

    def _take_part(self, label: str) -> None:
        if self.error is not None:
            log.warning("%s takes part again", self.server.url)
        self.label = label
        self.error = None

    def _post(self, path: str, body: Any = None) -> None:
        self.server.call("POST", path, remaining(self.deadline), answers.Reply, body)

    def _meet(self) -> GlooGroup | NCCLGroup:
        """Form a group with the workers of the server."""
        address = self.options.address
        workers = self.server.call("GET", "/get_world_size", CHECK_S, answers.WorldSize)
        try:
            listener = socket.create_server((address, 0))
        except OSError as error:
            expected = f"expected an address of this machine, got {address}"
            raise ValueError(f"rollout.vllm.address: {expected}: {reason(error)}") from error
        size = workers.world_size + 1
        port = listener.getsockname()[1]
        info: dict[str, Any] = {"master_address": address, "master_port": port, "rank_offset": 1}
        info["world_size"] = size
        # Join on a thread: the server answers only when it has joined.
        if self.by_nccl:
            listener.close()  # vLLM opens a socket itself
            meeting: Future[Any] = started(partial(NCCLGroup, address, port, size, self.device))
        else:
            info["seconds"] = seconds = self.options.timeout
            meeting = started(partial(GlooGroup, address, port, 0, size, seconds, listener))
        self._post("/init_weight_transfer_engine", {"init_info": info})
        return meeting.result(remaining(self.deadline))


def each(links: list[Link], action: Callable[[Link], None]) -> list[Link]:
    """Run an action on all links at once and return those on which it succeeded."""

    def succeeds(link: Link) -> bool:
        try:
            action(link)
        except (RuntimeError, OSError) as error:  # of the server, the group, or the wait
            link.leave_out(error)
            return False
        return True

    results = at_once(len(links) or 1, succeeds, links)
    return [link for link, success in zip(links, results, strict=True) if success]
