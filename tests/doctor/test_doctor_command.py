"""Tests of `grpo-fast doctor`: command-line arguments, report and exit status."""

import pytest

from grpo_fast.doctor import causes, command, diagnosis
from grpo_fast.doctor.command import read
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.policy import load_policy
from tests.command_line import invoke, refused, write_recipe
from tests.rollout.vllm_stand_in import StandIn
from tests.tiny import tiny_folder

QUICK = ["n=3", "tokens=8"]
RUN = """
output_dir: OUT
model: {path: gone, dtype: bfloat16, trust_remote_code: true}
data: {task: sort}
rewards: [{name: 'package.module:function'}]
rollout: {temperature: 0.3, engine: vllm-server, vllm: {urls: ['http://10.0.0.2:8000'],
  address: 10.0.0.1}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


def test_a_model_and_its_own_engine(model):
    done = invoke("doctor", model, "rollout.top_p=0.5", *QUICK)
    assert done.exit_code == 0 and "Cause" not in done.output, done.output
    for part in ("mean of ", "ok, allowed 1.0e-04", "the trainer against the model"):
        assert part in done.output, done.output


def test_a_cause_and_a_threshold(model):
    words = [model, "rollout.top_p=0.5", "rollout.replay_support=off", *QUICK]
    done = invoke("doctor", *words)
    text = f"Cause: {causes.TRUNCATION}. What happens: the engine uses"
    assert done.exit_code == 1 and done.output.count("Cause: ") == 1 and text in done.output
    assert causes.ADVICE[causes.TRUNCATION] in done.output and "TOO MUCH" in done.output
    done = invoke("doctor", *words, "threshold=50")
    assert done.exit_code == 0 and text in done.output


def test_a_recipe_brings_its_model_its_data_and_its_sampling(tmp_path):
    recipe = write_recipe(tmp_path)
    _, config = read([f"recipe={recipe}", "tokens=3", "rollout.temperature=0.5"])
    assert config.data.task == "sort" and config.rollout.temperature == 0.5 and config.tokens == 3
    done = invoke("doctor", f"recipe={recipe}", "loss.temperature=2.0")
    assert done.exit_code == 1 and causes.TEMPERATURE in done.output


def test_a_runs_folder_is_its_model_and_says_how_it_samples(tmp_path):
    (tmp_path / "config.yaml").write_text(RUN)
    (tmp_path / "model").mkdir()
    folder = str(tmp_path)
    model, config = read([folder])
    assert model == folder and config.model.path == str(tmp_path / "model")
    assert config.model.dtype == "bfloat16" and not config.model.trust_remote_code
    assert config.data.task == "sort" and config.rollout.temperature == 0.3
    assert config.rollout.vllm.urls == ["http://10.0.0.2:8000"]
    other = read([folder, "http://10.0.0.3:8000"])[1].rollout.vllm
    assert other.urls == ["http://10.0.0.3:8000"] and other.patience == command.PATIENCE
    assert other.address == "10.0.0.1"


def test_a_server_is_sent_the_weights(model, tmp_path):
    other = load_policy(ModelConfig(path=tiny_folder(tmp_path / "other", seed=1)))
    server = StandIn(other)
    try:
        done = invoke("doctor", model, server.url, *QUICK)
    finally:
        server.stop()
    assert done.exit_code == 0 and "vllm-server: " in done.output, done.output
    gone = invoke("doctor", model, server.url, *QUICK, "rollout.vllm.patience=0")
    assert refused(gone, "no vLLM server has the weights", "ConnectError", code=1)


@pytest.mark.parametrize("is_ok", [True, False])
def test_without_a_model_the_self_tests_decide(monkeypatch, is_ok):
    monkeypatch.setattr(command, "self_checks", lambda: (is_ok, ["one", "two \x1b[1m"]))
    done = invoke("doctor")
    assert done.exit_code == (0 if is_ok else 1) and done.output == "one\ntwo \\x1b[1m\n"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["recipe=sort", "n=0"], ["n:", "greater than or equal to 1"]),
        (["recipe=sort", "threshold=-1"], ["threshold:"]),
        (["n=3"], ["model: expected a folder, a hub id or recipe=NAME together with", "got n=3"]),
        (["http://x"], ["recipe=NAME together with the other arguments, got http://x"]),
        (["a", "b"], ["model: expected one at most, got a, b"]),
        (["recipe=sortt"], ["recipe: expected one of", "sort"]),
        (["recipe=sort", "rollout.temprature=1"], ["temprature", "nearest: temperature"]),
        (["recipe=sort", "rollout.temperature=0"], ["rollout.temperature"]),
        (["/nowhere/at/all"], ["model: expected a model or a run", "no such folder"]),
    ],
)
def test_words_that_do_not_fit_are_refused(words, parts):
    assert refused(invoke("doctor", *words), *parts)


def test_an_engine_that_fails_is_a_sentence(model, monkeypatch):
    def dead(*_):
        raise RuntimeError("the server is gone")

    monkeypatch.setattr(diagnosis, "build_engine", dead)
    assert refused(invoke("doctor", model, *QUICK), "the server is gone", code=1)
