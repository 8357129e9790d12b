"""Tests of `grpo-fast doctor`: command-line arguments, report, exit status and self-tests.

The self-tests must pass on this machine, and each self-test must find a planted fault.
"""

from dataclasses import replace

import pytest
import torch

from grpo_fast.attention import Head
from grpo_fast.attention import model as attention_model
from grpo_fast.attention.dispatch import Provider
from grpo_fast.doctor import causes, command, diagnosis, selftest
from grpo_fast.doctor.command import read
from grpo_fast.doctor.selftest import checked, table
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


CPU = torch.device("cpu")
VALUES, GRADIENTS = "loss and logps against fp64", "loss and gradients against fp64"
AGAIN, ALONE = "same bits again", "same bits alone"


def checks_of(*starts: str) -> dict[str, tuple[bool, str]]:
    """Run the self-tests whose names have one of these prefixes. Return the results by name."""
    return {entry[0]: checked(*entry) for entry in table(CPU) if entry[0].startswith(starts)}


def failed(*starts: str) -> list[str]:
    return [name for name, (ok, _) in checks_of(*starts).items() if not ok]


def test_kernels_of_this_machine():
    checks = checks_of(*selftest.BACKENDS)
    assert all(ok for ok, _ in checks.values())
    ran = {name for name, (_, line) in checks.items() if line.startswith("ok ")}
    for dtype in ("float32", "bfloat16"):
        assert {f"torch {dtype}: {x}" for x in (VALUES, GRADIENTS, AGAIN, ALONE)} <= ran
    assert checked("x", 0.0, "no compiler") == (True, "skipped  x no compiler")
    assert checked("x", 0.0, lambda: 0.0)[0]
    assert not checked("x", 1.0, lambda: float("nan"))[0] and not checked("x", 1.0, lambda: 2.0)[0]


def no_kernel(*_):
    raise RuntimeError("no such kernel\nsecond line")


# For each fault: the field of the loss function's result that becomes wrong, a function that gets
# (correct value, number of the call, weight) and returns the wrong value, and the self-tests that
# must fail.
FAULTS = {
    "logps": ("logps", lambda x, *_: x + 1e-4, [VALUES]),
    "loss": ("loss", lambda x, *_: x + 1e-4, [VALUES, GRADIENTS]),
    "NaN": ("logps", lambda x, *_: x * torch.nan, [VALUES, ALONE]),
    "gradients": ("loss", lambda x, _, w: x + 1e-3 * (w - w.detach()).sum(), [GRADIENTS]),
    "bits that depend on the batch": ("logps", lambda x, *_: x + 2**-22 * len(x), [ALONE]),
    "bits that depend on the call": ("loss", lambda x, n, _: x * (1 + 2**-23 * (n % 2)), [AGAIN]),
    "raises": ("loss", no_kernel, [VALUES, GRADIENTS, AGAIN, ALONE]),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_kernel_that_is_wrong(monkeypatch, kind):
    field, fault, expected = FAULTS[kind]
    correct = selftest.linear_grpo_loss
    calls = []

    def loss(hidden, weight, *rest, **options):
        out = correct(hidden, weight, *rest, **options)
        if hidden.dtype == torch.float64:  # the fp64 reference must stay correct
            return out
        calls.append(kind)
        wrong = fault(getattr(out, field), len(calls), weight)
        return replace(out, **{field: wrong})

    monkeypatch.setattr(selftest, "BACKENDS", ("torch",))
    monkeypatch.setattr(selftest, "DTYPES", (torch.float32,))
    monkeypatch.setattr(selftest, "linear_grpo_loss", loss)
    lines = {name: line for name, (ok, line) in checks_of("torch").items() if not ok}
    assert [*lines] == [f"torch float32: {name}" for name in expected]
    if kind == "raises":
        assert [*lines.values()][0].endswith(") RuntimeError: no such kernel second line")


def test_attention_of_this_machine_and_a_kernel_that_is_wrong(monkeypatch):
    monkeypatch.setattr(selftest, "DTYPES", (torch.float32,))
    assert failed("attention") == []
    wrong = Provider("own", None, lambda q, k, v, layout, rule: q * k.sum() * v.sum())
    monkeypatch.setattr(selftest, "candidates", lambda kind: [wrong])
    expected = [f"attention own float32{x}" for x in ("", ", window", ", softcap")]
    assert failed("attention") == expected


@pytest.mark.parametrize(
    ("module", "name"), [(attention_model, "packed_rows_attention"), (Head, "logits_of")]
)
def test_a_small_model_and_layers_that_are_wrong(monkeypatch, module, name):
    """Check that wrong attention and wrong logits of our loop fail."""
    assert failed("packed rows") == []
    correct = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *x, **y: 0.5 * correct(*x, **y))
    assert failed("packed rows") == ["packed rows and our loop: logps against the model's"]


@pytest.mark.parametrize("name", ["packed_gap", "gap_of"])
def test_a_nan_of_packed_rows_or_of_our_loop_fails(monkeypatch, name):
    monkeypatch.setattr(selftest, name, lambda *_: float("nan"))
    assert failed("packed rows") == ["packed rows and our loop: logps against the model's"]
