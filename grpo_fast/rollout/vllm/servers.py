"""The engine `vllm-server`: completions by vLLM servers, which are sent the weights.

A server that is gone, hangs or has other weights is left out, and what it was asked is asked
again; it takes part again as soon as it has the weights.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from grpo_fast.rollout.engine import Completion, Engine, Request
from grpo_fast.rollout.vllm.answers import Asked, ServerError
from grpo_fast.rollout.vllm.link import Link, each
from grpo_fast.rollout.vllm.options import VLLMOptions, host_of, is_loopback
from grpo_fast.rollout.vllm.transfer import Named, buckets

log = logging.getLogger(__name__)

ATTEMPTS = 3  # to get all completions of a batch, or the weights to a server that is up
CONNECTIONS = 256  # to one server at a time
PAUSE_S = 1.0  # between two looks for a server that is gone
Question = tuple[Sequence[int], dict[str, Any]]  # a prompt and vLLM's SamplingParams


class VLLMServers(Engine):
    """Servers that are sent the policy's weights; see `build`.

    ahead: the policy is trained while `generate` runs, so that only `update` may send weights.
    """

    is_apart = True

    def __init__(self, policy: Any, options: VLLMOptions, *, ahead: bool = False) -> None:
        self.policy, self.options, self.rank = policy, options, 0
        self.ahead, self.may_send = ahead, not ahead
        self.links = [Link(url, options, policy.device) for url in options.urls]
        self.run, self.version = secrets.token_hex(4), 0
        if dist.is_available() and dist.is_initialized():
            number = torch.tensor([int(self.run, 16)], device=policy.device)
            dist.broadcast(number, 0)
            self.run, self.rank = f"{number.item():x}", dist.get_rank()

    @property
    def label(self) -> str:
        """The name of these weights on a server; it holds the run, so that another's do not fit."""
        return f"{self.run}-{self.version}"

    def check(self) -> None:
        """Raise unless every server is there and can be sent weights."""
        for link in self.links:
            deadline = time.monotonic() + self.options.patience
            if not link.server.is_up():
                log.warning("%s is waited for", link.server.url)
            while not link.server.is_up():
                if time.monotonic() > deadline:
                    waited = f"found none within {self.options.patience:.3g} s"
                    raise ServerError(f"{link.server.url}: expected a vLLM server, {waited}")
                time.sleep(PAUSE_S)
            link.check(self.policy)

    # ------------------------------------------------------------------------------- weights
    def update(self, policy: Any, version: int) -> None:
        """Send the weights to all servers that have others.

        Of several ranks the first one sends; all of them call this. A server that comes back later
        is sent them as they are then, in `generate`: unless those are sharded, or `ahead`.

        Raises:
            ServerError: no server has them within `patience`.
        """
        self.policy, self.version = policy, version
        is_sharded = any(hasattr(p, "full_tensor") for p in policy.lm.parameters())
        self.may_send = not (self.ahead or is_sharded)
        self._bring_up(list(buckets(policy)) if is_sharded else None)

    def _bring_up(self, whole: list[Named] | None = None) -> list[Link]:
        """Send the weights to servers that are up; returns those that have them, at least one."""
        deadline, failures = time.monotonic() + self.options.patience, 0
        while True:
            reached = [x for x in self.links if x.label != self.label and x.server.is_up()]
            if self.rank:
                each(reached, lambda link: link.look(self.label))
            else:
                self._send(reached, buckets(self.policy) if whole is None else whole)
            ready = self._ready()
            if ready:
                return ready
            failures += bool(reached) and not self.rank
            if failures == ATTEMPTS or time.monotonic() > deadline:
                tried = f"after {self.options.patience:.3g} s and {failures} tries"
                raise ServerError(f"no vLLM server has the weights {tried}: {self._why()}")
            time.sleep(PAUSE_S)

    def _ready(self) -> list[Link]:
        return [link for link in self.links if link.label == self.label]

    def _send(self, links: list[Link], weights: Iterable[Named]) -> None:
        links = each(links, Link.begin)
        for tensors in weights if links else ():
            links = each(links, partial(Link.send, tensors=tensors))
        each(links, lambda link: link.finish(self.label))

    def _why(self) -> str:
        return "; ".join(str(x.error) for x in self.links if x.error is not None) or "none is up"

    # --------------------------------------------------------------------------- completions
    def sample(self, request: Request) -> list[Completion]:
        """See `Engine`. Raises ServerError where prompts have no completions after some tries."""
        asked = Asked(self.policy, request, self.version, self.label)
        prompts, parameters = request.prompts, asked.parameters()
        done: dict[int, list[Completion]] = {}
        for _ in range(ATTEMPTS):
            pending = [i for i in range(len(prompts)) if i not in done]
            if pending:
                done |= self._ask({i: (prompts[i], parameters[i]) for i in pending}, asked)
        if len(done) < len(prompts):
            missing = f"{len(prompts) - len(done)} of {len(prompts)} prompts have no completions"
            raise ServerError(f"{missing} after {ATTEMPTS} tries: {self._why()}")
        return asked.in_groups([done[i] for i in range(len(prompts))])

    def _ask(self, questions: dict[int, Question], asked: Asked) -> dict[int, list[Completion]]:
        links = self._bring_up() if self.may_send else self._ready()
        if not links:
            raise ServerError(f"no vLLM server has the weights: {self._why()}")
        deadline = time.monotonic() + self.options.timeout
        pool = ThreadPoolExecutor(min(len(questions), CONNECTIONS * len(links)))
        futures, done = {}, {}
        for k, (i, question) in enumerate(questions.items()):
            link = links[k % len(links)]
            futures[pool.submit(link.server.generate, *question, asked, deadline)] = i, link
        try:
            for future in as_completed(futures):
                i, link = futures[future]
                try:
                    done[i] = future.result()
                except ServerError as error:
                    link.leave_out(error)
        finally:  # without waiting: calls that are under way end by the deadline
            pool.shutdown(wait=False, cancel_futures=True)
        return done


def build(policy: Any, options: Any) -> VLLMServers:
    """The engine `vllm-server`, for a configuration `rollout`.

    Raises:
        ServerError: a server is not there within `rollout.vllm.patience`.
        ValueError: a server that was started otherwise than it has to be.
    """
    engine = VLLMServers(policy, options.vllm, ahead=bool(options.ahead))
    for url in options.vllm.urls:
        if not is_loopback(host_of(url)):
            log.warning("%s is not on this machine: its HTTP and weights are not encrypted", url)
    engine.check()
    return engine
