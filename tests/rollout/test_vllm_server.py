"""Tests of the engine `vllm-server` with stand-in servers, including servers that fail."""

import asyncio
import socket
import threading
import time

import pytest
import torch

from grpo_fast import rollout as rollouts
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.vllm import transfer
from grpo_fast.rollout.vllm.answers import ServerError, StaleWeights
from grpo_fast.rollout.vllm.servers import Server, VLLMServers
from grpo_fast.train.policy import Policy
from tests.rollout.vllm_stand_in import (
    FINISH,
    GENERATE,
    JOIN,
    START,
    UPDATE,
    StandIn,
    difference,
    engine_of,
    spoil,
)
from tests.tiny import tiny_policy

PROMPTS = ["3 1 2 =", "5 =", "0 9 8 7 6 5 4 =", "1 1 ="]


@pytest.fixture
def engine(policy: Policy, server: StandIn) -> VLLMServers:
    return engine_of(policy, server, version=0)


def generate(policy, engine, prompts=PROMPTS, *, seed=1, places=None, **options):
    sampling = Sampling(max_new_tokens=6, **options)
    return rollouts.generate(
        policy, prompts, sampling, group_size=3, seed=seed, engine=engine, places=places
    )


def test_weights_arrive_and_old_ones_are_seen(policy, server):
    spoil(policy)  # the server started with other weights
    engine = engine_of(policy, server, version=3)
    rollout = generate(policy, engine, temperature=0.7)
    assert difference(policy, rollout, 0.7) < 1e-5
    assert set(rollout.weight_version.tolist()) == {3}
    assert engine_of(policy, server).run != engine.run  # so their names of weights differ, too
    spoil(policy)
    assert difference(policy, generate(policy, engine)) > 0.01
    engine.update(policy, 4)
    assert difference(policy, generate(policy, engine)) < 1e-5


def test_the_store_of_a_group_listens_at_the_given_address_only(policy, server):
    engine = engine_of(policy, server, version=0)
    port = engine.servers[0].group.store.port
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


def test_servers_that_do_not_answer_are_asked_in_parallel(policy, servers, monkeypatch):
    asked = []

    async def is_up(self):
        asked.append(self)
        while len(asked) % 2:  # wait until both servers are asked
            await asyncio.sleep(0.01)
        return await original(self)

    original = Server.is_up
    monkeypatch.setattr(Server, "is_up", is_up)
    engine = engine_of(policy, *servers)
    engine.update(policy, 0)
    assert len(engine._ready()) == 2


def test_a_tied_weight_is_sent_once():
    policy = tiny_policy("qwen2")
    sent = transfer.weights_of(policy.lm)
    expected = dict(policy.lm.state_dict())
    del expected["lm_head.weight"]  # it is tied to the embedding
    assert sent.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sent.items())


def test_weights_of_the_same_version_are_sent_once_and_sampling_waits(policy, server):
    engine = engine_of(policy, server)
    for version in (0, 0, 1, 1):
        engine.update(policy, version)
        generate(policy, engine)
    assert [server.calls[path] for path in (UPDATE, START, FINISH, JOIN)] == [2, 2, 2, 1]
    order = []
    server.answer = lambda path, body: order.append(path) or StandIn.answer(server, path, body)
    engine_of(policy, server, version=0)
    assert order[-5:] == ["/pause?mode=keep", START, UPDATE, FINISH, "/resume"]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_of_several_ranks_the_first_one_sends(policy, server, is_sharded):
    for parameter in policy.lm.parameters() if is_sharded else ():
        parameter.full_tensor = parameter.detach
    first, second = engine_of(policy, server), engine_of(policy, server)
    second.run, second.rank = first.run, 1  # all ranks of a run use the same names for weights
    spoil(policy)
    late = threading.Timer(0.2, first.update, (policy, 0))
    late.start()
    second.update(policy, 0)  # waits for the first rank
    late.join()
    assert difference(policy, generate(policy, second)) < 1e-5
    first.update(policy, 1)
    second.options.patience = 0.1
    with pytest.raises(ServerError, match="no vLLM server has the weights"):
        second.update(policy, 2)
    assert server.calls[JOIN] == 1 and server.calls[UPDATE] == 2


def test_a_seed_gives_the_same_samples_on_any_servers(policy, servers):
    one, two = (engine_of(policy, *some, version=0) for some in (servers[:1], servers))
    whole = generate(policy, two, seed=(7, 1))
    dealt = [sorted(server.prompts) for server in servers]
    assert dealt == [sorted(whole.prompt_ids[first::6]) for first in (0, 3)]
    assert whole.completion_ids == generate(policy, one, seed=(7, 1)).completion_ids
    assert whole.completion_ids != generate(policy, one, seed=(7, 2)).completion_ids
    part = generate(policy, one, PROMPTS[1:3], seed=(7, 1), places=[1, 2])
    assert part.completion_ids == whole.completion_ids[3:9]
    same = generate(policy, one, ["5 =", "5 ="], seed=(7, 1)).completion_ids
    assert same[:3] != same[3:]


def test_ends_of_completions_and_greedy_ones(policy, engine):
    rollout = generate(policy, engine, seed=2)
    eos = policy.tokenizer.eos_token_id
    assert 0 < rollout.truncated.sum() < len(rollout)
    assert rollout.truncated.tolist() == [eos not in ids for ids in rollout.completion_ids]
    ours = generate(policy, None, temperature=0.0).completion_ids
    assert generate(policy, engine, temperature=0.0).completion_ids == ours


def test_the_support_if_the_server_reports_it(policy, server, engine):
    def masked(answer):
        for choice in answer["choices"]:
            choice["sampling_mask"] = [sorted({token, 1}) for token in choice["token_ids"]]

    server.faults[GENERATE] = [masked, masked]
    rollout = generate(policy, engine, PROMPTS[:1], top_k=2)
    rows = [sorted({token, 1}) for ids in rollout.completion_ids for token in ids]
    assert rollout.support.ids.tolist() == [token for row in rows for token in row]
    assert rollout.support.offsets.diff().tolist() == [len(row) for row in rows]
    assert generate(policy, engine, PROMPTS[:1]).support is None  # nothing was truncated


def test_a_server_that_dies_is_replaced_by_the_others(policy, servers, caplog):
    engine = engine_of(policy, *servers, version=0)
    expected = generate(policy, engine).completion_ids
    servers[1].faults[GENERATE] = ["die"]
    assert generate(policy, engine).completion_ids == expected
    assert caplog.text.count("is left out") == 1
    assert generate(policy, engine).completion_ids == expected  # the server is excluded now
    servers[1].start()
    engine.update(policy, 1)
    assert "takes part again" in caplog.text
    count = len(servers[1].prompts)
    assert generate(policy, engine).completion_ids == expected
    assert len(servers[1].prompts) == count + 2


def test_a_server_that_hangs(policy, server, engine):
    engine.options.timeout = 1.0  # it also limits the transfers of weights between the tries
    server.faults[GENERATE] = ["hang"] * 12
    start = time.monotonic()
    with pytest.raises(ServerError, match=r"of 4 prompts have no completions.*no answer within"):
        generate(policy, engine)
    assert time.monotonic() - start < 15
    server.ended.set()


def test_a_server_that_is_restarted_with_other_options_is_refused(policy, server, engine):
    server.stop()
    server.mode = "raw_logprobs"
    server.start()
    with pytest.raises(ValueError, match="processed_logprobs, got raw_logprobs at"):
        generate(policy, engine)


def test_a_server_that_stays_away(policy, server):
    engine = engine_of(policy, server, version=0, patience=0.2)
    server.stop()
    start = time.monotonic()
    with pytest.raises(ServerError, match="no vLLM server has the weights after 0.2 s"):
        generate(policy, engine)
    assert time.monotonic() - start < 10
    server.start()
    assert len(generate(policy, engine).texts) == 12


def aborted(answer):
    answer["choices"][0] |= {"finish_reason": "abort", "token_ids": [], "logprobs": None}


@pytest.mark.parametrize(
    ("path", "fault"),
    [(GENERATE, 500), (GENERATE, aborted), (UPDATE, 500), (FINISH, 500), ("/weight_info", 500)],
    ids=["sample", "aborted", "update", "finish", "check"],
)
def test_a_call_that_fails_is_repeated(policy, server, path, fault):
    server.faults[path] = [fault]
    engine = engine_of(policy, server, version=0)
    engine.update(policy, 1)
    assert difference(policy, generate(policy, engine)) < 1e-5
    assert not server.faults[path]


@pytest.mark.parametrize("path", [START, UPDATE, FINISH])
def test_a_server_that_refuses_weights_is_not_left_paused(policy, server, path):
    server.faults[path] = [500]
    engine = engine_of(policy, server, patience=0.0)
    with pytest.raises(ServerError, match="told to say 500"):
        engine.update(policy, 0)
    assert not server.is_paused and not server.is_updating
    assert server.version == "left-in-the-middle"
    engine.update(policy, 0)
    assert difference(policy, generate(policy, engine)) < 1e-5


def test_an_error_that_stays_is_quoted(policy, server):
    server.faults[UPDATE] = [500] * 9
    with pytest.raises(ServerError, match="and 3 tries: .*500 .*told to say 500"):
        engine_of(policy, server, version=0)
    assert server.calls[UPDATE] == 3


def of_an_older_version(answer):
    span = answer["choices"][-1]["weight_versions"][0]
    run, _, version = span["version"].rpartition("-")
    span["version"] = f"{run}-{int(version) - 1}"


def test_completions_by_other_weights_are_refused(policy, server, caplog):
    engine = engine_of(policy, server, version=2)
    expected = generate(policy, engine)
    server.faults[GENERATE] = [of_an_older_version]
    again = generate(policy, engine)
    assert again.completion_ids == expected.completion_ids
    assert again.weight_version.tolist() == [2] * 12
    assert "expected completions by the weights" in caplog.text
    assert server.calls[UPDATE] == 2  # the weights were sent again
    server.faults[GENERATE] = [of_an_older_version] * 99
    with pytest.raises(ServerError, match=r"prompts have no completions after 3 tries"):
        generate(policy, engine)
    assert isinstance(engine.servers[0].error, StaleWeights)


@pytest.mark.parametrize("last", [START, UPDATE, FINISH])
def test_an_update_that_a_dead_trainer_left_open_is_repeated(policy, server, last):
    """Check that a new trainer can send weights after a trainer died during an update.

    The first trainer dies directly after its HTTP call to the path `last`.
    """
    dead = engine_of(policy, server, patience=0.0)
    answer, seen = server.answer, []

    def die(path, body):
        if last not in seen:
            found = answer(path, body)
        seen.append(path)
        if last in seen:
            raise ConnectionAbortedError
        return found

    server.answer = die
    with pytest.raises(ServerError):
        dead.update(policy, 1)
    assert server.is_paused and server.is_updating == (last != FINISH)
    server.answer = answer
    spoil(policy)
    engine = engine_of(policy, server, version=1, patience=0.0)
    assert not server.is_paused and not server.is_updating
    assert difference(policy, generate(policy, engine)) < 1e-5
    # The new trainer first finishes the old update, because the server may have half-loaded layers.
    # The name of this half-finished version must differ from the names of all complete versions.
    assert "left-in-the-middle" in server.versions


def test_the_timeout_is_for_the_whole_transfer(policy, server):
    """Check that the timeout limits the whole transfer of the weights instead of each call."""
    answer = server.answer
    server.answer = lambda path, body: (time.sleep(0.3), answer(path, body))[1]
    start = time.monotonic()
    with pytest.raises(ServerError, match=f"{server.url}.*no answer within rollout.vllm.timeout"):
        engine_of(policy, server, version=0, timeout=1.0, patience=0.1)
    assert server.calls["/resume"] == 0 and time.monotonic() - start < 4


def test_a_temperature_that_vllm_would_raise_is_refused(policy, engine):
    with pytest.raises(ValueError, match=r"temperature: expected 0 \(greedy\) or at least 0.01"):
        generate(policy, engine, temperature=0.005)
