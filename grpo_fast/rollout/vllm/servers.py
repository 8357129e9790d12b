"""The engine `vllm-server`, which sends the trainer's weights to vLLM servers that sample.

A server that is unreachable, hangs or has other weights is excluded, and the other servers sample
its prompts. The server is included again as soon as it has the current weights.
"""

from __future__ import annotations

import logging
import secrets
import time
from functools import partial
from itertools import cycle
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from grpo_fast.data import escape_control
from grpo_fast.errors import require
from grpo_fast.rollout.engine import NOISE, Completion, Engine, Request
from grpo_fast.rollout.vllm import transfer
from grpo_fast.rollout.vllm.answers import BadAnswer, ServerError, VLLMRequest
from grpo_fast.rollout.vllm.options import VLLMOptions, host_of, is_loopback
from grpo_fast.rollout.vllm.server import Link, at_once, each
from grpo_fast.rollout.vllm.transfer import Named, adapted_modules, buckets

if TYPE_CHECKING:
    from grpo_fast.rollout.own.model import SampledModel

log = logging.getLogger(__name__)

ATTEMPTS = 3  # tries to sample all completions of a batch, or to send weights to a running server
CONNECTIONS = 256  # most connections to one server
PROBE = (2, 3, 5, 7, 3, 2, 7, 5)  # token ids whose continuations are compared after a transfer
PAUSE_S = 1.0  # seconds between two checks of a server that is gone


class VLLMServers(Engine):
    """Engine that samples on vLLM servers. See `build`.

    Args:
        policy: the `Policy` whose weights are sent.
        options: the section `rollout.vllm` of a configuration.
        ahead: True if the policy is trained while `generate` runs. The weights then change during
            `generate`, so only `update` sends them.
    """

    is_apart = True

    def __init__(self, policy: SampledModel, options: VLLMOptions, *, ahead: bool = False) -> None:
        self.policy = policy
        self.options = options
        self.ahead = ahead
        self.may_send = not ahead
        self.links = [Link(url, options, policy.device) for url in options.urls]
        self.rank = 0
        self.run = secrets.token_hex(4)
        self.version = 0
        self.expected: torch.Tensor | None = None  # of sharded weights, see `probe_logps`
        self.folder = TemporaryDirectory(prefix="grpo_fast-lora-")
        self.lm: Any = None  # the model whose adapter was sent last
        self.count = 0  # number of models whose adapters were sent
        # The name under which servers report the base weights of the adapter. It is None if servers
        # receive full weights instead of adapters.
        self.base: str | None = None
        if dist.is_available() and dist.is_initialized():
            # All ranks must use the same name for the same weights, so broadcast rank 0's name.
            number = torch.tensor([int(self.run, 16)], device=policy.device)
            dist.broadcast(number, 0)
            self.run = f"{number.item():x}"
            self.rank = dist.get_rank()

    @property
    def label(self) -> str:
        """The name under which a server reports the current weights. It differs between runs."""
        return f"{self.run}-{self.count}-{self.version}"

    def check(self) -> None:
        """Wait for every server, and check that its options and its model fit the policy.

        Raises:
            ServerError: a server does not respond within `rollout.vllm.patience` seconds.
            ValueError: a server has different options or a different model.
        """
        for link in self.links:
            deadline = time.monotonic() + self.options.patience
            if not link.server.is_up():
                log.warning("waiting for %s", link.server.url)
            while not link.server.is_up():
                if time.monotonic() > deadline:
                    waited = f"found none within {self.options.patience:.3g} s"
                    raise ServerError(f"{link.server.url}: expected a vLLM server, {waited}")
                time.sleep(PAUSE_S)
            link.check(self.policy)

    def update(self, policy: SampledModel, version: int) -> None:
        """Send the weights to all servers that do not have them.

        All ranks must call this, but only rank 0 sends. A server that becomes available later
        receives the weights during `sample`, unless the weights are sharded or `ahead` is set.

        Args:
            policy: the policy.
            version: version number of its weights.

        Raises:
            ServerError: no server has received the weights within `rollout.vllm.patience`.
        """
        self.policy = policy
        written = self.base and self.label  # name of the adapter that is in the folder
        self.version = version
        weights = None
        self.base = None
        if all(link.loads_adapters for link in self.links) and adapted_modules(policy.lm):
            self.count += policy.lm is not self.lm
            self.lm = policy.lm
            self.base = f"{self.run}-base-{self.count}"
            if self.label != written:  # an evaluation and the next rollout use the same version
                transfer.write_adapter(policy, self.folder.name, is_writer=self.rank == 0)
        is_sharded = any(hasattr(p, "full_tensor") for p in policy.lm.parameters())
        # Gather sharded weights now, because gathering later would make all ranks wait for servers.
        if is_sharded:
            weights = list(buckets(policy, merged=self.base is None))
        self.may_send = not (self.ahead or is_sharded)
        self.expected = probe_logps(policy) if is_sharded else None
        self._bring_up(weights)

    def sample(self, request: Request) -> list[Completion]:
        """Return the completions of a request. See `Engine.sample`.

        Raises:
            ServerError: some prompts still have no completions after three tries.
        """
        names = (self.label, None) if self.base is None else (self.base, self.label)
        vllm_request = VLLMRequest(self.policy, request, self.version, *names)
        parameters = vllm_request.parameters()
        count = len(request.prompts)
        deadline = 0.0
        done: dict[int, list[Completion]] = {}
        failed: dict[Link, ServerError] = {}

        def generate(i: int, link: Link) -> None:
            try:
                done[i] = link.generate(request.prompts[i], parameters[i], vllm_request, deadline)
            except ServerError as error:
                failed[link] = error

        for _ in range(ATTEMPTS):
            pending = [i for i in range(count) if i not in done]
            if not pending:
                break
            links = self._bring_up() if self.may_send else self._ready()
            if not links:
                raise ServerError(f"no vLLM server has the weights: {self._errors()}")
            deadline = time.monotonic() + self.options.timeout
            at_once(CONNECTIONS * len(links), generate, pending, cycle(links))
            for link, error in failed.items():
                link.exclude(error)
            failed.clear()
        if len(done) < count:
            what = f"{count - len(done)} of {count} prompts have no completions"
            raise ServerError(f"{what} after {ATTEMPTS} tries: {self._errors()}")
        return vllm_request.in_groups([done[i] for i in range(count)])

    def _bring_up(self, weights: list[Named] | None = None) -> list[Link]:
        """Send the weights to all running servers. Return the servers that have received them."""
        deadline = time.monotonic() + self.options.patience
        failures = 0
        while True:
            outdated = [link for link in self.links if link.label != self.label]
            # Ask in parallel, because a server whose machine is gone takes CHECK_S seconds.
            are_up = at_once(len(outdated), lambda link: link.server.is_up(), outdated)
            reached = [link for link, is_up in zip(outdated, are_up, strict=True) if is_up]
            if self.rank:
                each(reached, partial(Link.include_if_current, label=self.label, base=self.base))
            elif reached:
                lacking = reached
                if self.base is not None:
                    lacking = [link for link in reached if not link.has_weights(self.base)]
                # Compute the weights only if a server needs them, because this copies the experts
                # of an MoE model.
                if lacking and weights is None:
                    weights = list(buckets(self.policy, merged=self.base is None))
                each(reached, partial(self._send, weights=weights or [], lacking=lacking))
                failures += 1
                received = [link for link in reached if link.label == self.label]
                if received and self.checks_weights:
                    expected = probe_logps(self.policy) if self.expected is None else self.expected
                    at_once(len(received), partial(self._probe, expected), received)
            ready = self._ready()
            if ready:
                return ready
            if failures == ATTEMPTS or time.monotonic() > deadline:
                tried = f"after {self.options.patience:.3g} s and {failures} tries"
                raise ServerError(f"no vLLM server has the weights {tried}: {self._errors()}")
            time.sleep(PAUSE_S)

    def _ready(self) -> list[Link]:
        return [link for link in self.links if link.label == self.label]

    def _send(self, link: Link, weights: list[Named], lacking: list[Link]) -> None:
        """Send the policy to a server: its weights, or its adapter if all servers load adapters.

        Args:
            link: the connection to the server.
            weights: the merged weights, or the base weights of the adapter.
            lacking: the connections to the servers that do not have `weights` yet.
        """
        if link in lacking:
            link.receive(weights, self.base or self.label)
        if self.base is not None:
            link.load_adapter(self.label, self.folder.name)

    def _probe(self, expected: torch.Tensor, link: Link) -> None:
        """Compare log-probabilities of a server that has received the weights with the policy's.

        Args:
            expected: the policy's log-probabilities, see `probe_logps`.
            link: the connection to the server.

        Raises:
            BadAnswer: the difference is larger than rounding explains, so the server has kept
                other weights than it claims to have.
        """
        if not expected.isfinite().all():
            return  # sampling reports the policy's NaN
        try:
            found = link.likeliest(PROBE, self.label if self.base is not None else None)
            ids, logps = zip(*found, strict=True)
            fits = max(ids) < expected.shape[1]
            most = f"ids below {expected.shape[1]}"
            require(fits, link.server.url, most, max(ids), BadAnswer)
            ours = expected[torch.arange(len(ids)), list(ids)]
            difference = float((ours - torch.tensor(logps)).abs().mean())
            dtypes = link.dtype, self.policy.autocast or self.policy.head.weight.dtype
            limit = max(NOISE.get(dtype, NOISE[torch.bfloat16]) for dtype in dtypes)
            if self.options.tolerance is not None:
                limit = self.options.tolerance
            if difference <= limit:
                return
            claimed = escape_control(link.server.weight_version()[:40])
        except ServerError as error:
            link.exclude(error)
            return
        raise BadAnswer(
            f"{link.server.url} claims to have the weights {self.label} (/weight_info: {claimed}), "
            f"but its log-probabilities differ from the policy's by {difference:.3g} nats per "
            f"token. At most {limit:g} is allowed. Check that the server applies weight updates. "
            "For a quantised server, set rollout.vllm.tolerance."
        )

    def _errors(self) -> str:
        errors = [str(link.error) for link in self.links if link.error is not None]
        return "; ".join(errors) or "none is up"


@torch.no_grad()
def probe_logps(policy: SampledModel) -> torch.Tensor:
    """Return the policy's log-probabilities of all ids after each prefix of PROBE, fp32.

    If the weights are sharded, this is a collective call.

    Returns:
        Tensor of shape (len(PROBE) - 1, V), on the CPU.
    """
    ids = torch.tensor([PROBE], device=policy.device)
    with policy.generation():
        logits = policy.lm(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).cpu()


def build(policy: SampledModel, options: Any) -> VLLMServers:
    """Return the engine `vllm-server`.

    Args:
        policy: a `Policy`.
        options: the section `rollout` of a configuration.

    Raises:
        ServerError: a server does not respond within `rollout.vllm.patience` seconds.
        ValueError: a server was started with different options or a different model.
    """
    engine = VLLMServers(policy, options.vllm, ahead=bool(options.ahead))
    for url in options.vllm.urls:
        if not is_loopback(host_of(url)):
            log.warning("%s is not on this machine: its HTTP and weights are not encrypted", url)
    engine.check()
    return engine
