"""Tests of both vLLM engines with real vLLM on a CPU. Run them with `make test-vllm`."""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_fast import rollout as rollouts
from grpo_fast.data.splits import Splits
from grpo_fast.rollout import EngineError, awake, build_engine
from grpo_fast.rollout.engine import VLLMOptions
from grpo_fast.rollout.vllm.answers import ServerError
from grpo_fast.rollout.vllm.servers import Server, run
from grpo_fast.rollout.vllm.transfer import weights_of
from grpo_fast.train import loop
from grpo_fast.train.config import load_recipe
from grpo_fast.train.policy import build_tokenizer, load_policy
from tests.command_line import invoke
from tests.rollout.vllm_stand_in import difference
from tests.train.runs import result

pytestmark = pytest.mark.skipif(
    "GRPO_FAST_VLLM" not in os.environ, reason="vLLM: make test-vllm runs this against it"
)
START_S = 400.0  # time limit in seconds for starting a server on a busy machine
EXACT = 1e-4  # largest allowed difference in nats between log-probabilities of vLLM and ours
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
         "max_position_embeddings": 512}  # fmt: skip
SORT = ["data.digits=2", "optim.lr=5e-3", "optim.schedule=constant",
        *(f"model.config.{key}={value}" for key, value in SIZES.items())]  # fmt: skip
TIED = "model.config.tie_word_embeddings=true"
LONG = (
    " ".join("31402"[i % 5] for i in range(299)) + " ="
)  # fills several blocks of the prefix cache
PROMPTS = [LONG, "3 1 =", LONG.replace("1 =", "2 ="), "2 ="]


def policy_of(family: str = "llama", *words: str) -> Any:
    """Return a policy with random weights. The LM head is tied, except in the family `qwen2`."""
    tied = [] if family == "qwen2" else [TIED]
    config = load_recipe("sort", [*SORT, f"model.config.model_type={family}", *tied, *words])
    tokenizer = build_tokenizer(config.model, Splits(config.data, 0))
    torch.manual_seed(0)
    policy = load_policy(config.model, tokenizer)
    with torch.no_grad():
        spoil(policy)
        for name, parameter in policy.lm.named_parameters():
            if parameter.dim() > 1 and not parameter.requires_grad and ".lora_" not in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return policy


@torch.no_grad()
def spoil(policy: Any) -> None:
    """Replace the trained weights with different random weights that change the samples."""
    for parameter in policy.trainable():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)


def readme_words() -> list[str]:
    """Return the options of the command `vllm serve MODEL` in the README.

    The backend nccl is replaced with gloo, because the tests run on a CPU.
    """
    text = (Path(rollouts.__file__).parent / "README.md").read_text()
    command = text.partition("vllm serve MODEL ")[2].partition("\ngrpo-fast")[0]
    return shlex.split(command.replace("\\\n", " ").replace("nccl", "gloo"))


class Process:
    """Real vLLM server in a subprocess, which is started with the command in the README."""

    def __init__(self, model: Path, *words: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        self.model, self.url, self.words = model, f"http://127.0.0.1:{self.port}", words
        self.start()

    def start(self) -> None:
        words = [
            *readme_words(), "--model", str(self.model), "--port", str(self.port),
            "--enforce-eager", "--max-num-seqs", "32", *self.words,
        ]  # fmt: skip
        with (self.model.parent / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words],
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        server = Server(self.url, VLLMOptions(), torch.device("cpu"))
        while not run(server.is_up())[0]:
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(1)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def started(folder: Path, *words: str) -> Iterator[Process]:
    """Start a server for a new model in `folder`. Kill the server at the end of the context."""
    policy_of().save(folder)
    process = Process(folder, *words)
    process.wait()  # some tests do not wait until the server has started
    yield process
    process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Process]:
    with started(tmp_path_factory.mktemp("vllm") / "model") as process:
        yield process


@pytest.fixture
def options(server: Process) -> Any:
    return options_of(server)


def options_of(server: Process) -> Any:
    return load_recipe("sort", [
        "rollout.engine=vllm-server", f"rollout.vllm.urls=[{server.url}]",
        "rollout.vllm.timeout=120", f"rollout.vllm.patience={START_S}",
    ]).rollout  # fmt: skip


def generate(policy: Any, engine: Any, options: Any, *, seed: int = 1, **changes: Any) -> Any:
    sampling = options.model_copy(update={"max_new_tokens": 6, **changes})
    return rollouts.generate(policy, PROMPTS, sampling, group_size=3, seed=seed, engine=engine)


def check_engine(policy: Any, engine: Any, options: Any) -> None:
    """Check that a vLLM engine samples correctly from the policy.

    The checks cover log-probabilities, EOS, seeds, greedy sampling, and changes of the weights.
    """
    with awake(engine, policy, 0):
        rollout = generate(policy, engine, options)
        assert difference(policy, rollout) < EXACT
        assert difference(policy, generate(policy, engine, options, temperature=0.7), 0.7) < EXACT
        assert generate(policy, engine, options).completion_ids == rollout.completion_ids
        assert generate(policy, engine, options, seed=2).completion_ids != rollout.completion_ids
        eos = policy.tokenizer.eos_token_id
        assert rollout.truncated.tolist() == [eos not in ids for ids in rollout.completion_ids]
        assert 0 < rollout.truncated.sum() < 12
        greedy = generate(policy, engine, options, temperature=0.0)
        ours = rollouts.generate(
            policy, PROMPTS, options.model_copy(update={"max_new_tokens": 6, "temperature": 0.0}),
            group_size=3, seed=1,
        )  # fmt: skip
        assert greedy.completion_ids == ours.completion_ids
        spoil(policy)
        assert difference(policy, generate(policy, engine, options)) > 0.1
    with awake(engine, policy, 1):  # the cached prefixes of the long prompts are now invalid
        rollout = generate(policy, engine, options)
        assert difference(policy, rollout) < EXACT
        assert rollout.weight_version.tolist() == [1] * 12
        assert generate(policy, engine, options, top_k=3, top_p=0.9).support is None


def test_servers_sample_with_the_weights_they_are_sent(server, options):
    policy = policy_of()
    with build_engine(policy, options) as engine:
        check_engine(policy, engine, options)


def test_stale_weights_of_a_server_are_refused(server, options, caplog):
    """Check that completions by unknown weights are refused, and that the weights are sent again.

    The test simulates another client that has changed the server's version.
    """
    policy = policy_of()
    with build_engine(policy, options) as engine:
        engine.update(policy, 7)
        other = {"new_version": "somebody-else's"}
        engine.servers[0].deadline = time.monotonic() + 10
        run(engine.servers[0].call("POST", "/update_weight_version", other))
        rollout = generate(policy, engine, options)
        assert rollout.weight_version.tolist() == [7] * 12 and difference(policy, rollout) < EXACT
    assert "expected completions by the weights" in caplog.text


def in_the_middle(engine: Any, action: Any) -> None:
    """Make the engine call `action` in its next rollout, while the server is sampling.

    `action` is called just before the last prompt is sent.
    """
    server, sent = engine.servers[0], []
    original = server.generate

    async def generate(*prompt: Any) -> Any:
        sent.append(prompt)
        if len(sent) == len(PROMPTS):
            await asyncio.to_thread(action)
        return await original(*prompt)

    server.generate = generate


def test_a_server_that_is_killed_while_it_samples_and_restarted(server, options):
    policy = policy_of()
    with build_engine(policy, options) as engine:
        engine.update(policy, 3)
        engine.options.patience = 1.0
        in_the_middle(engine, server.kill)
        start = time.monotonic()
        with pytest.raises(ServerError, match=f"no vLLM server has the weights.*{server.url}"):
            generate(policy, engine, options, max_new_tokens=200)
        assert time.monotonic() - start < 60
        server.start()
        engine.options.patience = START_S
        engine.update(policy, 3)
        in_the_middle(engine, lambda: (server.kill(), server.start()))
        rollout = generate(policy, engine, options, max_new_tokens=200)
        assert len(rollout.texts) == 12 and rollout.weight_version.tolist() == [3] * 12
        assert difference(policy, rollout) < EXACT


def test_a_server_of_another_model_is_not_changed(server, options, tmp_path, caplog):
    """Check that a server whose model differs from the policy is refused.

    Neither an engine nor `grpo-fast doctor` may change the weights of such a server. If only the
    dtype differs, a warning is logged.
    """
    policy = policy_of()
    with build_engine(policy, options) as engine:
        engine.update(policy, 5)
        assert "samples in" not in caplog.text
        config = load_recipe("sort", [*SORT, "model.config.hidden_size=32"])
        other = load_policy(config.model, policy.tokenizer)
        with pytest.raises(
            ValueError, match=f"this run's model, got a different model at {server.url}"
        ):
            build_engine(other, options).update(other, 5)
        other.save(tmp_path / "other")
        done = invoke("doctor", str(tmp_path / "other"), server.url)
        assert done.exit_code and f"a different model at {server.url}" in done.output
        run(engine.servers[0].is_up())
        assert engine.servers[0].reported == engine.name
        assert difference(policy, generate(policy, engine, options)) < EXACT
    half = policy_of()
    half.lm.bfloat16()
    build_engine(half, options).update(half, 5)
    assert "samples in float32, the trainer computes in bfloat16" in caplog.text


KILLED = """
import os, signal, sys, time
from grpo_fast.rollout.vllm.servers import Server
from grpo_fast.rollout.vllm.transfer import GlooGroup
from grpo_fast.train import loop
from grpo_fast.train.config import load_recipe
sent, broadcast, call = [], GlooGroup.broadcast, Server.call
def send_or_die(self, tensor):
    sent.append(tensor)
    if len(sent) == int(sys.argv[1]):
        time.sleep(1)  # let the server wait for a tensor that never comes
        os.kill(os.getpid(), signal.SIGKILL)
    broadcast(self, tensor)
async def call_or_die(self, method, path, *rest):
    if path == "/update_weights" and len(sent) > int(sys.argv[1]) - int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return await call(self, method, path, *rest)
GlooGroup.broadcast = send_or_die
if sys.argv[2] == "idle":
    Server.call = call_or_die
loop.train(load_recipe("sort", sys.argv[4:]))
"""


@pytest.mark.parametrize("server_is", ["idle", "waiting"])
def test_a_trainer_that_is_killed_during_a_transfer_and_resumed(server, tmp_path, server_is):
    words = [
        *SORT, TIED, "steps=4", "rollout.engine=vllm-server", f"rollout.vllm.urls=[{server.url}]",
        "rollout.vllm.timeout=60", "rollout.vllm.patience=5", "checkpoint.every=1",
        "log.progress=false", "data.n_test=8", f"output_dir={tmp_path / 'run'}",
        "log.completions_every=0",
    ]  # fmt: skip
    count = len(weights_of(policy_of().lm))
    third = str(2 * count + count // 2)  # kill the trainer in the middle of the third update
    command = [sys.executable, "-c", KILLED, third, server_is, str(count), *words]
    done = subprocess.run(command, timeout=300)
    assert done.returncode == -signal.SIGKILL
    found = run_of(tmp_path / "run", *words[:-2], "resume=auto")
    assert len(rewards(found)) == 4


def run_of(folder: Path, *words: str) -> dict[str, Any]:
    loop.train(load_recipe("sort", [*words, f"output_dir={folder}", "log.completions_every=0"]))
    return result(folder)


def rewards(found: dict[str, Any]) -> list[float]:
    rows = [row for row in found["metrics"] if "loss" in row]
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < EXACT
    return [row["reward"] for row in rows]


def test_a_run_through_a_server_learns(server, tmp_path):
    found = run_of(
        tmp_path / "run", *SORT, TIED, "steps=20", "rollout.engine=vllm-server",
        f"rollout.vllm.urls=[{server.url}]", "log.progress=false", "data.n_test=8",
    )  # fmt: skip
    values = rewards(found)
    assert len(values) == 20 and sum(values[-5:]) > sum(values[:5]) + 2.5


# The tests of the engine `vllm` must be the last tests of this file, because vLLM permanently
# changes the process in which it is imported.
def test_in_process_it_samples_with_the_weights_it_is_given():
    policy = policy_of("qwen2")
    options = load_recipe("sort", [
        "rollout.engine=vllm", "rollout.vllm.options={enforce_eager: true, max_num_seqs: 32}",
    ]).rollout  # fmt: skip
    with build_engine(policy, options) as engine:
        with pytest.raises(EngineError, match="expected update before generate"):
            generate(policy, engine, options)
        check_engine(policy, engine, options)
        with pytest.raises(EngineError, match="expected update before generate"):
            generate(policy, engine, options)


def test_a_run_in_process_learns(tmp_path):
    found = run_of(
        tmp_path / "run", *SORT, "steps=10", "rollout.engine=vllm", "log.progress=false",
        "rollout.vllm.options={enforce_eager: true}", "data.n_test=8",
    )  # fmt: skip
    values = rewards(found)
    assert len(values) == 10 and sum(values[-3:]) > sum(values[:3]) + 1.5
