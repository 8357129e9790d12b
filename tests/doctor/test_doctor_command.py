"""`grpo-fast doctor`: its words, its tables, its JSON and its status."""

import json

import pytest

from grpo_fast.doctor import causes, command, settings
from grpo_fast.doctor.selftest import Check
from grpo_fast.doctor.settings import Words
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.config.words import apply_word
from grpo_fast.train.models.loading import load_policy
from tests.command_line import invoke, refused, write_recipe
from tests.rollout.vllm_stand_in import StandIn
from tests.tiny import tiny_folder

QUICK = ["self_tests=false", "n=3", "tokens=8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


def test_a_model_and_its_own_engine(model):
    done = invoke("doctor", model, *QUICK)
    assert done.exit_code == 0, done.output
    for part in ("engine against trainer", "mean difference of", "ok, allowed 1.0e-04",
                 "what is left", "noise of the kernels"):  # fmt: skip
        assert part in done.output, done.output
    assert "This machine" not in done.output
    done = invoke("doctor", model, "rollout.top_p=0.5", *QUICK)
    assert done.exit_code == 0 and causes.TRUNCATION not in done.output, done.output


def test_a_cause_and_its_json(model):
    over_all = ["rollout.top_p=0.5", "rollout.replay_support=off", *QUICK]
    done = invoke("doctor", model, *over_all, "--json")
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    (cause,) = told["diagnosis"]["causes"]
    assert cause["name"] == causes.TRUNCATION and not told["ok"] and not told["diagnosis"]["ok"]
    assert told["title"].startswith("transformers: ") and told["checks"] == []
    good = invoke("doctor", model, *over_all, "threshold=50")
    assert good.exit_code == 0 and causes.TRUNCATION in good.output


def test_a_recipe_brings_its_model_its_data_and_its_sampling(tmp_path):
    recipe = write_recipe(tmp_path)
    asked = Words([f"recipe={recipe}", "tokens=3", "rollout.temperature=0.5"])
    assert asked.config.data.task == "sort" and asked.sampling.temperature == 0.5
    assert asked.sampling.max_new_tokens == 3 and asked.previous_config() is None
    assert Words([f"recipe={recipe}"]).sampling.max_new_tokens == 4  # the recipe's own is less
    done = invoke("doctor", f"recipe={recipe}", "self_tests=false", "loss.temperature=2.0")
    assert done.exit_code == 1 and causes.TEMPERATURE in done.output


def test_a_runs_folder_is_its_model_and_says_how_it_samples(tmp_path, model):
    text = (
        "output_dir: OUT\nmodel: {path: gone, dtype: bfloat16, trust_remote_code: true}\n"
        "data: {task: open}\nrewards: [{name: 'package.module:function'}]\n"
        "rollout: {temperature: 0.3}\n"
    )
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "model").mkdir()
    asked = Words([str(tmp_path)])
    assert asked.config.model.path == str(tmp_path / "model")
    assert asked.config.model.dtype == "bfloat16" and not asked.config.model.trust_remote_code
    assert asked.config.data.task == "open" and asked.sampling.temperature == 0.3
    earlier = Words([model, f"previous={tmp_path}", "model.dtype=bfloat16"]).previous_config()
    assert earlier.path == str(tmp_path / "model") and earlier.dtype == "bfloat16"


def test_engines_and_servers_by_their_words(model, monkeypatch):
    seen = []

    def read(_, words, fields, also):
        for word in words:
            apply_word(fields, word)
        seen.append(fields)

    monkeypatch.setattr(settings, "read_words", read)
    Words([model, "http://127.0.0.1:8000"])
    Words([model, "vllm"])
    Words([model])
    assert seen[0]["rollout"] == {
        "temperature": 0.8, "engine": "vllm-server",
        "vllm": {"urls": ["http://127.0.0.1:8000"], "patience": 10},
    }  # fmt: skip
    assert seen[1]["rollout"] == {"temperature": 0.8, "engine": "vllm"}
    assert seen[2]["rollout"] == {"temperature": 0.8}


@pytest.mark.parametrize("word", ["vllm", "transformers"])
def test_another_engine_than_that_of_a_run_by_servers(tmp_path, word):
    """The servers that a run was made with are nothing to another engine, nor their options."""
    (tmp_path / "config.yaml").write_text(
        "output_dir: OUT\nmodel: {path: gone}\ndata: {task: open}\n"
        "rewards: [{name: exact_match}]\nrollout: {engine: vllm-server, vllm: "
        "{urls: ['http://10.0.0.2:8000'], address: 10.0.0.1}}\n"
    )
    (tmp_path / "model").mkdir()
    chosen = Words([str(tmp_path), word]).config.rollout
    assert chosen.engine == word.rpartition("=")[2] and chosen.vllm.urls == []
    assert Words([str(tmp_path), "vllm-server"]).config.rollout.vllm.urls == [
        "http://10.0.0.2:8000"
    ]
    other = Words([str(tmp_path), "http://10.0.0.3:8000"]).config.rollout.vllm
    assert other.urls == ["http://10.0.0.3:8000"] and other.address == "10.0.0.1"
    with pytest.raises(ValueError, match=r"vllm.urls: expected none for engine: vllm"):
        Words([str(tmp_path), "vllm", "rollout.vllm.urls=['http://10.0.0.2:8000']"])


def test_a_server_is_sent_the_weights_and_asked(model, tmp_path):
    other = load_policy(ModelConfig(path=tiny_folder(tmp_path / "other", seed=1)))
    server = StandIn(other)
    try:
        done = invoke("doctor", model, server.url, *QUICK)
    finally:
        server.stop()
    assert done.exit_code == 0 and "vllm-server: " in done.output, done.output
    gone = invoke("doctor", model, server.url, *QUICK, "rollout.vllm.patience=0")
    assert refused(gone, "expected a vLLM server, found none", code=1)


def test_without_a_model_the_self_tests_decide(monkeypatch):
    for error, status in ((0.0, 0), (None, 0), (2.0, 1), (float("nan"), 1)):
        checks = [Check("one", 0.5, 1.0), Check("two", error, 1.0, "because \x1b[1m")]
        monkeypatch.setattr(command, "self_checks", lambda found=checks: found)
        done = invoke("doctor")
        assert done.exit_code == status, done.output
        assert "This machine" in done.output and "two: because" in done.output
        assert "\x1b" not in done.output and "against trainer" not in done.output
        told = json.loads(invoke("doctor", "--json").stdout)
        assert told["ok"] == (status == 0) and told["diagnosis"] is None
        assert [c["ok"] for c in told["checks"]] == [True, status == 0]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["n=0"], ["n:", "greater than or equal to 1"]),
        (["threshold=-1"], ["threshold:"]),
        (
            ["rollout.temperature=1"],
            ["model=none conflicts with rollout.temperature=1: it needs a folder, a hub id"],
        ),
        (["a", "b"], ["model: expected one at most, got a, b"]),
        (["a", "vllm", "transformers"], ["engine: expected one at most"]),
        (["recipe=sortt"], ["recipe: expected one of", "sort"]),
        (["recipe=sort", "rollout.temprature=1"], ["temprature", "nearest: temperature"]),
        (["recipe=sort", "rollout.temperature=0"], ["rollout.temperature"]),
        (["/nowhere/at/all"], ["model.path"]),
    ],
)
def test_words_that_do_not_fit_are_refused(words, parts):
    assert refused(invoke("doctor", *words), *parts)


def test_an_engine_that_fails_is_a_sentence(model, monkeypatch):
    def dead(*_):
        raise RuntimeError("the server is gone")

    monkeypatch.setattr(command, "build_engine", dead)
    assert refused(invoke("doctor", model, *QUICK), "the server is gone", code=1)
