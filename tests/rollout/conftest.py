"""Fixtures that create a tiny policy, and simulated vLLM servers that sample with a copy of it."""

from collections.abc import Iterator

import pytest

from grpo_fast.rollout.vllm import servers as servers_module
from grpo_fast.train.policy import Policy
from tests.rollout.vllm_stand_in import StandIn
from tests.tiny import tiny_policy


@pytest.fixture(scope="session")
def shared_policy() -> Policy:
    return tiny_policy()


@pytest.fixture
def policy(shared_policy: Policy) -> Policy:
    """Return a copy of the tiny policy. A test may change the weights of the copy."""
    return shared_policy.frozen_copy()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "PAUSE_S", 0.05)


@pytest.fixture
def servers(policy: Policy, impatient: None) -> Iterator[list[StandIn]]:
    made = [StandIn(policy), StandIn(policy)]
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def server(servers: list[StandIn]) -> StandIn:
    return servers[0]
