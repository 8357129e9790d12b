"""Tests of training runs with stand-in vLLM servers, including servers that fail."""

import threading
from pathlib import Path

import pytest

from grpo_fast.data.splits import Splits
from grpo_fast.rollout import EngineError
from grpo_fast.train import loop
from grpo_fast.train.policy import build_tokenizer, load_policy
from tests.rollout.vllm_stand_in import GENERATE, UPDATE, StandIn
from tests.train.runs import config_of, run


def settings_for(*servers: StandIn, **options: float) -> list[str]:
    urls = ", ".join(server.url for server in servers)
    given = {"timeout": 60.0, "patience": 60.0, **options}
    return ["rollout.engine=vllm-server", f"rollout.vllm.urls=[{urls}]", "optim.lr=0.05",
            *(f"rollout.vllm.{name}={value}" for name, value in given.items())]  # fmt: skip


@pytest.fixture
def policy(tmp_path: Path):
    """Return the policy with which the servers start.

    Its random weights differ from the weights of the run.
    """
    config = config_of(tmp_path)
    return load_policy(config.model, build_tokenizer(config.model, Splits(config.data, 0)))


def test_a_run_whose_servers_fail_is_the_run_of_servers_that_do_not(servers, tmp_path):
    """Check that failures and restarts of the servers do not change the results of a run."""
    one, two = servers
    calm = run(tmp_path / "calm", *settings_for(one, two))
    for row in (row for row in calm["metrics"] if row["step"] and "loss" in row):
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
    # Each server receives the initial weights and the weights after each of the three steps. An
    # evaluation and the step after it use the same weights, which must not be sent twice.
    assert [server.calls[UPDATE] for server in servers] == [4, 4]
    one.stop(), two.stop()
    one.start(), two.start()
    two.faults = {GENERATE: [None, None, "die"]}
    one.faults = {GENERATE: [None, 500, None, "die"], UPDATE: [None, None, 500]}

    def restart() -> None:
        assert one.ended.wait(60)
        one.start()

    thread = threading.Thread(target=restart)
    thread.start()
    rough = run(tmp_path / "rough", *settings_for(one, two))
    thread.join()
    assert two.ended.is_set() and not one.ended.is_set()
    for found in (calm, rough):  # the page contains the servers' addresses, which differ
        assert found.pop("page")
    assert calm == rough


def test_a_run_that_its_servers_left_goes_on_with_others(servers, tmp_path):
    calm = run(tmp_path / "calm", *settings_for(servers[0]))
    servers[0].faults = {GENERATE: [None] * 10 + ["die"]}
    left = config_of(tmp_path / "left", *settings_for(servers[0], patience=0.1))
    with pytest.raises(EngineError, match=r"no vLLM server has the.*\nsaved in .*step_000002"):
        loop.train(left)
    again = run(tmp_path / "left", *settings_for(servers[1]), "resume=auto")
    assert calm.pop("page") and again.pop("page")
    assert calm == again


def test_a_server_that_ignores_an_update_is_noticed(servers, tmp_path, caplog):
    servers[0].ignores_updates = True
    run(tmp_path / "run", *settings_for(servers[0]))
    assert caplog.text.count("nats apart per token") == 1
