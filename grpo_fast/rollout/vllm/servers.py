"""The engine `vllm-server`: vLLM servers sample, with weights that the trainer sends to them.

A server that is gone, hangs or has other weights is left out, and its prompts go to the other
servers. It takes part again as soon as it has the weights.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist

from grpo_fast.rollout.engine import Completion, Engine, Request
from grpo_fast.rollout.vllm.answers import Asked, ServerError
from grpo_fast.rollout.vllm.http import at_once
from grpo_fast.rollout.vllm.link import Link, each
from grpo_fast.rollout.vllm.options import VLLMOptions, host_of, is_loopback
from grpo_fast.rollout.vllm.transfer import Named, buckets

log = logging.getLogger(__name__)

ATTEMPTS = 3  # to get all completions of a batch, or the weights to a running server
CONNECTIONS = 256  # to one server at a time
PAUSE_S = 1.0  # between two checks of a server that is gone
Question = tuple[Sequence[int], dict[str, Any]]  # a prompt and vLLM's SamplingParams


class VLLMServers(Engine):
    """Engine that samples on vLLM servers; see `build`.

    Args:
        policy: the `Policy` whose weights are sent.
        ahead: whether the policy is trained while `generate` runs. Only `update` sends weights
            then.
    """

    is_apart = True

    def __init__(self, policy: Any, options: VLLMOptions, *, ahead: bool = False) -> None:
        self.policy = policy
        self.options = options
        self.ahead = ahead
        self.may_send = not ahead
        self.links = [Link(url, options, policy.device) for url in options.urls]
        self.rank = 0
        self.run = secrets.token_hex(4)
        self.version = 0
        if dist.is_available() and dist.is_initialized():
            number = torch.tensor([int(self.run, 16)], device=policy.device)
            dist.broadcast(number, 0)
            self.run = f"{number.item():x}"
            self.rank = dist.get_rank()

    @property
    def label(self) -> str:
        """Name of the weights at a server. It differs between runs, so that runs do not mix."""
        return f"{self.run}-{self.version}"

    def check(self) -> None:
        """Wait for every server and raise unless the weights fit it."""
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

    def update(self, policy: Any, version: int) -> None:
        """Send the weights to all servers that have others.

        All ranks call this; rank 0 sends. A server that comes back later receives the weights in
        `sample`, unless they are sharded or `ahead` is set.

        Raises:
            ServerError: no server has the weights within `rollout.vllm.patience`.
        """
        self.policy = policy
        self.version = version
        weights = None
        is_sharded = any(hasattr(p, "full_tensor") for p in policy.lm.parameters())
        if is_sharded:  # gathering the weights needs all ranks, so it cannot wait for a server
            weights = list(buckets(policy))
        self.may_send = not (self.ahead or is_sharded)
        self._bring_up(weights)

    def sample(self, request: Request) -> list[Completion]:
        """Return the completions of a request; see `Engine.sample`.

        Raises:
            ServerError: some prompts have no completions after three tries.
        """
        asked = Asked(self.policy, request, self.version, self.label)
        questions = dict(enumerate(zip(request.prompts, asked.parameters(), strict=True)))
        done: dict[int, list[Completion]] = {}
        for _ in range(ATTEMPTS):
            pending = {i: question for i, question in questions.items() if i not in done}
            if pending:
                done |= self._ask(pending, asked)
        missing = len(questions) - len(done)
        if missing:
            what = f"{missing} of {len(questions)} prompts have no completions"
            raise ServerError(f"{what} after {ATTEMPTS} tries: {self._errors()}")
        return asked.in_groups([done[i] for i in questions])

    def _bring_up(self, weights: list[Named] | None = None) -> list[Link]:
        """Send the weights to all running servers. Return the servers that have them."""
        deadline = time.monotonic() + self.options.patience
        failures = 0
        while True:
            others = [link for link in self.links if link.label != self.label]
            reached = [link for link in others if link.server.is_up()]
            if self.rank:
                each(reached, lambda link: link.look(self.label))
            else:
                self._send(reached, buckets(self.policy) if weights is None else weights)
                failures += bool(reached)
            ready = self._ready()
            if ready:
                return ready
            if failures == ATTEMPTS or time.monotonic() > deadline:
                tried = f"after {self.options.patience:.3g} s and {failures} tries"
                raise ServerError(f"no vLLM server has the weights {tried}: {self._errors()}")
            time.sleep(PAUSE_S)

    def _ready(self) -> list[Link]:
        return [link for link in self.links if link.label == self.label]

    def _send(self, links: list[Link], weights: Iterable[Named]) -> None:
        links = each(links, Link.begin)
        if links:
            for tensors in weights:
                links = each(links, partial(Link.send, tensors=tensors))
        each(links, lambda link: link.finish(self.label))

    def _errors(self) -> str:
        errors = [str(link.error) for link in self.links if link.error is not None]
        return "; ".join(errors) or "none is up"

    def _ask(self, questions: dict[int, Question], asked: Asked) -> dict[int, list[Completion]]:
        """Deal the prompts to the servers. Return the completions by prompt, without failures."""
        links = self._bring_up() if self.may_send else self._ready()
        if not links:
            raise ServerError(f"no vLLM server has the weights: {self._errors()}")
        deadline = time.monotonic() + self.options.timeout

        def ask(link: Link, question: Question) -> list[Completion] | ServerError:
            try:
                return link.generate(*question, asked, deadline)
            except ServerError as error:
                return error

        found = at_once(CONNECTIONS * len(links), ask, cycle(links), questions.values())
        done = {}
        for i, link, answer in zip(questions, cycle(links), found, strict=False):
            if isinstance(answer, ServerError):
                link.leave_out(answer)
            else:
                done[i] = answer
        return done


def build(policy: Any, options: Any) -> VLLMServers:
    """Return the engine `vllm-server`.

    Args:
        options: the section `rollout` of a configuration.

    Raises:
        ServerError: a server is not running within `rollout.vllm.patience`.
        ValueError: a server was started with other options than it needs.
    """
    engine = VLLMServers(policy, options.vllm, ahead=bool(options.ahead))
    for url in options.vllm.urls:
        if not is_loopback(host_of(url)):
            log.warning("%s is not on this machine: its HTTP and weights are not encrypted", url)
    engine.check()
    return engine
