"""The engine `vllm-server` against a stand-in: weights, versions, servers that fail."""

import asyncio
import threading
import time
from contextlib import nullcontext
from json import dumps
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers

from grpo_fast import rollout as rollouts
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.vllm import http, transfer
from grpo_fast.rollout.vllm.answers import ServerError, StaleWeights, WeightInfo
from grpo_fast.rollout.vllm.options import VLLMOptions
from grpo_fast.rollout.vllm.servers import VLLMServers, build
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.models.policy import Policy
from tests.rollout.vllm_stand_in import GENERATE, UPDATE, Raw, StandIn, difference, spoil
from tests.tiny import SYMBOLS, tiny_model, tiny_policy

PROMPTS = ["3 1 2 =", "5 =", "0 9 8 7 6 5 4 =", "1 1 ="]
SECONDS = 20.0  # more than any of this takes on a busy machine


def engine_of(policy: Policy, *servers: StandIn, **options: float) -> VLLMServers:
    given = {"timeout": SECONDS, "patience": SECONDS, **options}
    return VLLMServers(policy, VLLMOptions(urls=[x.url for x in servers], **given))


@pytest.fixture
def engine(policy: Policy, server: StandIn) -> VLLMServers:
    """Of one server, which has the weights."""
    made = engine_of(policy, server)
    made.update(policy, 0)
    return made


def generate(policy, engine, prompts=PROMPTS, *, seed=1, places=None, **options):
    asked = {"group_size": 3, "seed": seed, "engine": engine, "places": places}
    return rollouts.generate(policy, prompts, Sampling(max_new_tokens=6, **options), **asked)


# ------------------------------------------------------------------------------------- weights
def test_weights_arrive_and_old_ones_are_seen(policy, server):
    spoil(policy)  # the server starts with others
    engine = engine_of(policy, server)
    engine.update(policy, 3)
    rollout = generate(policy, engine, temperature=0.7)
    assert difference(policy, rollout, 0.7) < 1e-5
    assert set(rollout.weight_version.tolist()) == {3}
    other = engine_of(policy, server)
    other.version = 3
    assert other.label != engine.label  # another run's weights have another name
    spoil(policy)
    assert difference(policy, generate(policy, engine)) > 0.01
    engine.update(policy, 4)
    assert difference(policy, generate(policy, engine)) < 1e-5


@pytest.mark.parametrize("size", [1, 20_000, 1 << 28])
def test_a_tied_model_in_buckets_of_any_size(monkeypatch, size):
    monkeypatch.setattr(transfer, "BUCKET", size)
    policy = tiny_policy("qwen2")
    sent = [pair for bucket in transfer.buckets(policy) for pair in bucket]
    stored = {name: tensor for name, tensor in policy.lm.state_dict().items()}
    del stored["lm_head.weight"]  # the embedding's
    assert dict(sent).keys() == stored.keys() and len(sent) == len(stored)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in sent)
    count = len(list(transfer.buckets(policy)))
    assert count == (len(sent) if size == 1 else 1 if size > 1 << 20 else count)
    assert count > 1 or size > 1 << 20


def test_adapters_are_sent_merged():
    model = tiny_model("llama", vocab_size=14)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    policy = Policy(model, build_symbol_tokenizer(SYMBOLS))
    before = {n: p.clone() for n, p in model.named_parameters()}
    pairs = (pair for bucket in transfer.buckets(policy) for pair in bucket)
    sent = {name: tensor.clone() for name, tensor in pairs}  # merging writes into the weights
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    merged = model.merge_and_unload().state_dict()
    assert sent.keys() == merged.keys()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in sent.items())


def test_weights_of_the_same_version_are_sent_once_and_sampling_waits(policy, server):
    engine = engine_of(policy, server)
    for version in (0, 0, 1, 1):
        engine.update(policy, version)
        generate(policy, engine)
    begun = [f"/{x}_weight_update" for x in ("start", "finish")]
    assert [server.calls[path] for path in (UPDATE, *begun)] == [2, 2, 2]
    assert server.calls["/init_weight_transfer_engine"] == 1
    order = []
    server.answer = lambda path, body: order.append(path) or StandIn.answer(server, path, body)
    engine_of(policy, server).update(policy, 0)
    names = ["/pause?mode=keep", "/start_weight_update", UPDATE, "/finish_weight_update", "/resume"]
    assert order[-5:] == names


def test_of_several_ranks_the_first_one_sends(policy, server):
    first, second = engine_of(policy, server), engine_of(policy, server)
    second.run, second.rank = first.run, 1  # as the ranks of a run agree on it
    spoil(policy)
    late = threading.Timer(0.2, first.update, (policy, 0))
    late.start()
    second.update(policy, 0)  # waits for the first one
    late.join()
    assert difference(policy, generate(policy, second)) < 1e-5
    first.update(policy, 1)
    with pytest.raises(ServerError, match="no vLLM server has the weights"):
        second.options.patience = 0.1
        second.update(policy, 2)
    assert server.calls["/init_weight_transfer_engine"] == 1 and server.calls[UPDATE] == 2


# --------------------------------------------------------------------------------- completions
def test_a_seed_gives_the_same_samples_on_any_servers(policy, servers):
    one, two = engine_of(policy, servers[0]), engine_of(policy, *servers)
    for engine in (one, two):
        engine.update(policy, 0)
    whole = generate(policy, one, seed=(7, 1))
    assert whole.completion_ids == generate(policy, two, seed=(7, 1)).completion_ids
    assert whole.completion_ids != generate(policy, one, seed=(7, 2)).completion_ids
    part = generate(policy, one, PROMPTS[1:3], seed=(7, 1), places=[1, 2])
    assert part.completion_ids == whole.completion_ids[3:9]
    same = generate(policy, one, ["5 =", "5 ="], seed=(7, 1)).completion_ids
    assert same[:3] != same[3:]


def test_prompts_are_dealt_to_all_servers(policy, servers):
    engine = engine_of(policy, *servers)
    engine.update(policy, 0)
    rollout = generate(policy, engine)
    dealt = [sorted(server.prompts) for server in servers]
    assert dealt == [sorted(rollout.prompt_ids[first::6]) for first in (0, 3)]


def test_ends_of_completions_and_greedy_ones(policy, engine):
    rollout = generate(policy, engine, seed=2)
    eos = policy.tokenizer.eos_token_id
    assert 0 < rollout.truncated.sum() < len(rollout)
    assert rollout.truncated.tolist() == [eos not in ids for ids in rollout.completion_ids]
    ours = generate(policy, None, temperature=0.0).completion_ids
    assert generate(policy, engine, temperature=0.0).completion_ids == ours


def test_completions_of_a_group_are_in_the_order_of_their_seeds(policy, server, engine):
    given = []

    def shuffled(answer):
        given.extend(choice["token_ids"] for choice in answer["choices"])
        answer["choices"] = answer["choices"][1:] + answer["choices"][:1]

    server.faults[GENERATE] = [shuffled]
    assert generate(policy, engine, PROMPTS[:1]).completion_ids == given
    assert given[0] != given[2]


def with_kept(answer):
    for choice in answer["choices"]:
        choice["sampling_mask"] = [sorted({token, 1}) for token in choice["token_ids"]]


def test_kept_tokens_where_the_server_names_them(policy, server, engine):
    server.faults[GENERATE] = [with_kept]
    rollout = generate(policy, engine, PROMPTS[:1], top_k=2)
    rows = [sorted({token, 1}) for ids in rollout.completion_ids for token in ids]
    assert rollout.support.ids.tolist() == [token for row in rows for token in row]
    assert rollout.support.offsets.diff().tolist() == [len(row) for row in rows]
    server.faults[GENERATE] = [with_kept]
    assert generate(policy, engine, PROMPTS[:1]).support is None  # nothing was truncated


# ------------------------------------------------------------------------ servers that fail
def test_a_server_that_dies_is_replaced_by_the_others(policy, servers, caplog):
    engine = engine_of(policy, *servers)
    engine.update(policy, 0)
    expected = generate(policy, engine).completion_ids
    servers[1].faults[GENERATE] = ["die"]
    assert generate(policy, engine).completion_ids == expected
    assert caplog.text.count("is left out") == 1
    assert generate(policy, engine).completion_ids == expected  # without it from the beginning
    servers[1].start()
    engine.update(policy, 1)
    assert "takes part again" in caplog.text
    asked = len(servers[1].prompts)
    assert generate(policy, engine).completion_ids == expected
    assert len(servers[1].prompts) == asked + 2


def test_a_server_killed_in_the_middle_and_restarted(policy, server):
    """It comes back with its old weights: they are sent again before it is asked again."""
    spoil(policy)
    engine = engine_of(policy, server)
    engine.update(policy, 5)
    expected = generate(policy, engine)
    server.faults[GENERATE] = [None, None, "die", "hang"]

    def restart():
        assert server.ended.wait(SECONDS)
        time.sleep(0.3)
        server.start()

    thread = threading.Thread(target=restart)
    thread.start()
    again = generate(policy, engine)
    thread.join()
    assert again.completion_ids == expected.completion_ids
    assert again.weight_version.tolist() == [5] * 12 and difference(policy, again) < 1e-5


def test_a_server_that_started_anew_between_two_steps(policy, server, engine, caplog):
    server.stop()
    server.start()
    spoil(policy)
    engine.update(policy, 1)
    assert difference(policy, generate(policy, engine)) < 1e-5
    assert server.calls["/init_weight_transfer_engine"] == 2 and not caplog.text


def test_a_server_that_stays_away(policy, server):
    engine = engine_of(policy, server, patience=0.2)
    engine.update(policy, 0)
    server.stop()
    start = time.monotonic()
    with pytest.raises(ServerError, match="no vLLM server has the weights after 0.2 s"):
        generate(policy, engine)
    assert time.monotonic() - start < 10
    server.start()
    assert len(generate(policy, engine).texts) == 12


@pytest.mark.parametrize("path", [GENERATE, UPDATE, "/finish_weight_update", "/weight_info"])
def test_an_error_is_tried_again(policy, server, path):
    engine = engine_of(policy, server)
    server.faults[path] = [500]
    engine.update(policy, 0)
    engine.update(policy, 1)
    assert difference(policy, generate(policy, engine)) < 1e-5
    assert not server.faults[path]


def test_an_error_that_stays_is_quoted(policy, server):
    engine = engine_of(policy, server)
    server.faults[UPDATE] = [500] * 9
    with pytest.raises(ServerError, match="and 3 tries: .*500 .*told to say 500"):
        engine.update(policy, 0)
    assert server.calls[UPDATE] == 3


def of_an_older_version(answer):
    versions = answer["choices"][-1]["weight_versions"][0]
    run, _, version = versions["version"].rpartition("-")
    versions["version"] = f"{run}-{int(version) - 1}"


def test_completions_by_other_weights_are_refused(policy, server, caplog):
    engine = engine_of(policy, server)
    engine.update(policy, 2)
    expected = generate(policy, engine)
    server.faults[GENERATE] = [of_an_older_version]
    again = generate(policy, engine)
    assert again.completion_ids == expected.completion_ids
    assert again.weight_version.tolist() == [2] * 12
    assert "expected completions by the weights" in caplog.text
    assert server.calls[UPDATE] == 2  # they were sent again
    server.faults[GENERATE] = [of_an_older_version] * 99
    with pytest.raises(ServerError, match=r"prompts have no completions after 3 tries"):
        generate(policy, engine)
    assert isinstance(engine.links[0].error, StaleWeights)


def test_a_completion_that_the_server_has_no_room_for(policy, server, engine):
    def cut(answer):
        for choice in answer["choices"]:
            choice["token_ids"] = [5, 5]
            choice["logprobs"]["content"] = [{"token_id": 5, "logprob": -1.0}] * 2
            choice["finish_reason"] = "length"
            choice["weight_versions"][0]["end"] = 2

    server.faults[GENERATE] = [cut]
    with pytest.raises(ValueError, match="max_model_len: .*an end after 2"):
        generate(policy, engine)

    def aborted(answer):
        answer["choices"][0] |= {"finish_reason": "abort", "token_ids": [], "logprobs": None}

    server.faults[GENERATE] = [aborted]
    assert len(generate(policy, engine).texts) == 12


# ------------------------------------------------------------------------ left in the middle
@pytest.mark.parametrize("left_at", ["/start_weight_update", UPDATE, "/finish_weight_update"])
def test_an_update_that_a_dead_trainer_left_open_is_begun_anew(policy, server, left_at):
    """It died behind this call: nobody finished the update, or resumed the server."""
    dead = engine_of(policy, server, patience=0.0)
    answer = server.answer

    def die(path, body):
        found = answer(path, body)
        if path == left_at:
            raise ConnectionAbortedError
        return found

    server.answer = die
    with pytest.raises(ServerError):
        dead.update(policy, 1)
    assert server.is_paused and server.is_updating == (left_at != "/finish_weight_update")
    server.answer = answer
    spoil(policy)
    engine = engine_of(policy, server, patience=0.0)
    engine.update(policy, 1)
    assert not server.is_paused and not server.is_updating
    assert difference(policy, generate(policy, engine)) < 1e-5
    # A layer that was filled in half is put back by a finish, which names no weights of a run.
    assert "left-in-the-middle" in server.versions


def test_the_timeout_is_of_the_whole_transfer(policy, server, monkeypatch):
    """Each of many buckets would come in time."""
    monkeypatch.setattr(transfer, "BUCKET", 1)
    answer = server.answer
    server.answer = lambda path, body: (time.sleep(0.2 * (path == UPDATE)), answer(path, body))[1]
    engine = engine_of(policy, server, timeout=1.0, patience=0.1)
    start = time.monotonic()
    with pytest.raises(ServerError, match=f"{server.url}.*no answer within|time is over"):
        engine.update(policy, 0)
    assert server.calls[UPDATE] < 8 and time.monotonic() - start < 4


# ------------------------------------------------------------------------------------- busy
@pytest.mark.parametrize("path", [GENERATE, UPDATE, "/health"])
def test_a_busy_server_is_asked_again(policy, server, path, monkeypatch, caplog):
    monkeypatch.setattr(http, "WAIT_S", 0.05)
    engine = engine_of(policy, server)
    busy = Raw(lambda put: put(b"HTTP/1.1 429 Too Many Requests\r\n\r\n"))
    server.faults[path] = [busy, busy]
    engine.update(policy, 0)
    engine.update(policy, 1)
    assert len(generate(policy, engine).texts) == 12 and not server.faults[path]
    assert not caplog.text  # it was not left out


def test_a_busy_server_is_waited_for_as_long_as_it_says(policy, server, monkeypatch):
    waits = []
    monkeypatch.setattr(http.time, "sleep", waits.append)
    asked = engine_of(policy, server).links[0].server
    for after in (b"7", b"99999999999", b"0", b"-1", b"Sun, 22 Nov 2026 10:00:00 GMT"):
        said = b"HTTP/1.1 429 No\r\nRetry-After: " + after + b"\r\n\r\n"
        server.faults["/weight_info"] = [Raw(lambda put, said=said: put(said))]
        asked.call("GET", "/weight_info", 60.0, WeightInfo)
    assert waits == [7.0, http.LONGEST_WAIT_S, 0.1, http.WAIT_S, http.WAIT_S]


# --------------------------------------------------------------------------------- refusals
def options_of(**given):
    return SimpleNamespace(ahead=0, vllm=VLLMOptions(**given))


@pytest.mark.parametrize("status", [403, 404])
def test_a_server_without_the_paths_is_told_how_to_start(policy, server, status):
    server.faults["/server_info"] = [status]
    with pytest.raises(ValueError, match=f"{status} .*told to say.*VLLM_SERVER_DEV_MODE=1"):
        build(policy, options_of(urls=[server.url]))


def test_raw_log_probabilities_and_nobody_there_are_refused(policy, server):
    server.mode = "raw_logprobs"
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs.* raw_logprobs"):
        build(policy, options_of(urls=[server.url]))
    server.stop()
    with pytest.raises(ServerError, match="expected a vLLM server, found none within 0.1 s"):
        build(policy, options_of(urls=[server.url], patience=0.1))
    server.start()


def test_a_server_of_another_dtype_is_said(policy, server, caplog):
    build(policy, options_of(urls=[server.url]))
    assert not caplog.text
    server.dtype = "torch.bfloat16"
    build(policy, options_of(urls=[server.url]))
    assert f"{server.url} samples in bfloat16, the trainer computes in float32" in caplog.text
    assert "--dtype float32" in caplog.text


def test_a_server_of_another_model_is_left_as_it_is(policy, server):
    other = Policy(tiny_model("llama", vocab_size=15), policy.tokenizer)
    with pytest.raises(ValueError, match=r"embed_tokens is \[13, 32\] there, \[15, 32\] here"):
        build(other, options_of(urls=[server.url]))
    changing = {"/pause", "/init_weight_transfer_engine", "/start_weight_update", UPDATE}
    assert not changing & server.calls.keys()


# What vLLM 0.32 says of a Llama with two layers, its kernels left out.
SERVED = """LlamaForCausalLM()(
  (model): LlamaModel()(
    (embed_tokens): VocabParallelEmbedding(num_embeddings=8, org_vocab_size=8, embedding_dim=64)
    (layers): ModuleList()(
      (0-1): 2 x LlamaDecoderLayer()(
        (self_attn): LlamaAttention()(
          (qkv_proj): QKVParallelLinear(in_features=64, output_features=96, bias=False, tp_size=2)
          (o_proj): RowParallelLinear(in_features=32, output_features=64, bias=False, tp_size=2)
        )
        (mlp): LlamaMLP()(
          (down_proj): RowParallelLinear(in_features=96, output_features=64, tp_size=2)
        )
      )
    )
    (norm): RMSNorm(hidden_size=64, eps=1e-06)
  )
  (lm_head): ParallelLMHead(num_embeddings=8, embedding_dim=64, org_vocab_size=8, tp_size=2)
)"""


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"lora": True}, None),
        ({"vocab_size": 9}, "model.embed_tokens"),
        ({"hidden_size": 32}, "model.embed_tokens"),
        ({"num_hidden_layers": 1}, "model.layers is 2 there, 1 here"),
        ({"num_hidden_layers": 3}, "model.layers is 2 there, 3 here"),
        ({"intermediate_size": 96}, r"model.layers.0.mlp.down_proj is \[64, 192\] there"),
        ({"head_dim": 16}, r"model.layers.0.self_attn.o_proj is \[64, 64\] there, \[32, 64\] here"),
    ],
)
def test_the_shapes_of_a_servers_model(changed, message):
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 192, "head_dim": 32,
             "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
             "tie_word_embeddings": False, **changed}  # fmt: skip
    with_adapters = sizes.pop("lora", False)
    lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if with_adapters:
        lm = peft.get_peft_model(lm, peft.LoraConfig(target_modules="all-linear")).get_base_model()
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        transfer.check_shapes(lm, SERVED, "http://127.0.0.1:1")


REFUSED = [
    "SECRET:8000", "ftp://SECRET:8000", "http://SECRET", "http://SECRET:65536",
    "http://user:SECRET@h:1", "http://127.0.0.1:1?key=SECRET", "http://127.0.0.1:1/SECRET",
    "http://127.0.0.1\\@SECRET:1", "http://127.0.0.1:1\r\nKey: SECRET",
]  # fmt: skip


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_that_is_refused_is_not_shown(url):
    """Nor is one that is no list."""
    for urls in ([url], ["http://127.0.0.1:2", url], url, {url: 1}):
        with pytest.raises(ValueError, match="urls: expected http://host:port") as refused:
            load_recipe("sort", ["rollout.engine=vllm-server", f"rollout.vllm.urls={dumps(urls)}"])
        assert "SECRET" not in str(refused.value)


def test_every_server_is_named_once_and_can_reach_the_trainer():
    for url in ("http://LOCALHOST.:8000", "https://127.1:8000/", "http://[::1]:08000",
                "http://[::ffff:127.0.0.1]:8000", "http://0.0.0.0:8000"):  # fmt: skip
        with pytest.raises(ValueError, match="every server once"):
            VLLMOptions(urls=["http://127.0.0.1:8000", url])
    urls = ["http://127.0.0.1:1", "http://127.0.0.2:1", "http://h.org:1", "http://[fe80::1]:1"]
    assert VLLMOptions(urls=urls, address="10.0.0.9").urls == urls
    with pytest.raises(ValueError, match="address: expected .* that 10.0.0.7 can reach"):
        VLLMOptions(urls=["http://10.0.0.7:8000"])


@pytest.mark.parametrize("key", ["SECRET\nX: y", "SECRET€"])
def test_a_key_that_no_header_takes_is_not_shown(policy, server, monkeypatch, key):
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(ValueError, match="VLLM_API_KEY: expected printable ASCII") as refused:
        engine_of(policy, server)
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_of_this_machine(policy, server, address):
    with pytest.raises(ValueError, match=f"rollout.vllm.address: .*, got {address}"):
        engine_of(policy, server, address=address).update(policy, 0)


def test_another_machine_is_said(policy, server, monkeypatch, caplog):
    monkeypatch.setattr(VLLMServers, "check", lambda self: None)
    build(policy, options_of(urls=[server.url]))
    assert not caplog.text
    build(policy, options_of(urls=["http://10.0.0.7:8000"], address="10.0.0.1"))
    assert "http://10.0.0.7:8000 is not on this machine" in caplog.text


def test_a_proxy_of_the_environment_is_not_used(policy, server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert engine_of(policy, server).links[0].server.weight_version() == "default"


def test_a_server_is_called_from_inside_a_running_event_loop(policy, server):
    """A notebook runs its cells in one."""

    async def cell():
        return engine_of(policy, server).links[0].server.weight_version()

    assert asyncio.run(cell()) == "default"


def test_the_key_is_sent(policy, server, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "word\n")  # as a file has it
    heard = []
    monkeypatch.setattr(server.http.RequestHandlerClass, "respond", lambda self: (
        heard.append(self.headers["Authorization"]), self.say(200, {"weight_version": "1"})
    ))  # fmt: skip
    assert engine_of(policy, server).links[0].server.weight_version() == "1"
    assert heard == ["Bearer word"]
