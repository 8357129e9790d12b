"""Tests of `rollout.ahead`, which samples with the weights from before the current step."""

import signal
import threading

import pytest
from safetensors.torch import load_file

from grpo_fast.errors import EngineError, Stopped
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.train import collect as collector
from grpo_fast.train import loop
from grpo_fast.train.collect import Collector
from grpo_fast.train.folder import checkpoints_in
from grpo_fast.train.optimizer import Optimizer
from tests.train import rank_runs
from tests.train.resuming import Leave, config_of, run
from tests.train.tiny_runs import logged

FILE = "model-00001-of-00001.safetensors"
AHEAD = ["rollout.ahead=1", "rollout.correct_sampling=true", "rollout.top_p=0.9"]
PROMPT_S = 60  # timeout in seconds of a wait for an update; no test takes this long

pytestmark = pytest.mark.usefixtures("no_pictures")


def holds(checkpoint):
    """Return True if a checkpoint contains completions that were sampled for the next step."""
    return any(name.startswith("ahead.") for name in load_file(checkpoint / "weights" / FILE))


class Apart(rank_runs.Apart):
    """Engine that samples the next step's completions in a thread, during the current step.

    In the thread, `generate` waits for the first optimizer update of the current step, so that
    sampling and training overlap. It then samples from the engine's copy of the old weights.
    `overlapped` counts the calls of `generate` in the thread.
    """

    def __init__(self, policy, options):
        super().__init__(policy, options)
        self.moved, self.busy, self.overlapped = threading.Event(), threading.Lock(), 0

    def update(self, policy, version):
        assert not self.busy.locked()
        super().update(policy, version)
        self.moved.clear()

    def generate(self, *args, **options):
        assert self.busy.acquire(blocking=False)
        try:
            if threading.current_thread() is not threading.main_thread():
                assert self.moved.wait(PROMPT_S)
                self.overlapped += 1
            return super().generate(*args, **options)
        finally:
            self.busy.release()


@pytest.fixture
def apart(monkeypatch):
    """Make training runs build engines of class `Apart`, and return the list of these engines.

    Each optimizer update sets the event `moved` of the newest engine.
    """
    built, step = [], Optimizer.step

    def stepped(self):
        norm = step(self)
        built[-1].moved.set()
        return norm

    monkeypatch.setattr(Optimizer, "step", stepped)
    build = lambda *given: built.append(Apart(*given)) or built[-1]  # noqa: E731
    monkeypatch.setattr(loop, "build_engine", build)
    return built


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the result of an uninterrupted run with `rollout.ahead`."""
    return run(tmp_path_factory.mktemp("ahead") / "whole", *AHEAD)


def training_rows(found):
    return [row for row in found["metrics"] if "loss" in row]


def test_completions_are_one_step_old_and_the_prompts_the_same(tmp_path, whole):
    plain, rows = run(tmp_path / "plain", "rollout.top_p=0.9"), training_rows(whole)
    assert [row["sampling/staleness/max"] for row in rows] == [0, 1, 1]
    assert [row["sampling/staleness/mean"] for row in rows] == [0, 1, 1]
    largest = [row["sampling/sampling_logp_difference/max"] for row in rows]
    assert largest[0] < 1e-5 and min(largest[1:]) > 1e-4  # steps 2 and 3 use older weights
    assert whole["prompts"] == plain["prompts"] and len(plain["prompts"]) == 3
    # Step 1 must be the same with and without `rollout.ahead`. Step 2 must differ, because
    # `rollout.ahead` samples it with older weights.
    others = training_rows(plain)
    assert rows[0]["reward"] == others[0]["reward"] and "sampling/staleness/max" not in others[0]
    assert rows[1] != others[1]


def test_weights_that_stand_still_are_sampled_with_the_same_random_numbers(tmp_path):
    words = ["rollout.correct_sampling=true", "optim.lr=1e-30", "log.completions_every=0",
             "rollout.dynamic={rounds: 1}"]  # fmt: skip
    found, plain = (run(tmp_path / str(i), *words, f"rollout.ahead={i}") for i in (1, 0))
    for row, other in zip(training_rows(found), training_rows(plain), strict=True):
        assert {**row, **other} == row and row["sampling/sampling_logp_difference/max"] < 1e-5


def test_a_step_that_is_left_while_it_asks_again_keeps_what_it_began_with(tmp_path, monkeypatch):
    words = [*AHEAD, "rollout.dynamic={rounds: 1}", "rollout.group_size=2", "data.digits=2"]
    calls, generate = [], collector.generate

    def counted(*args, **options):
        is_refill = len(options["seed"]) == 3  # samples that replace dropped groups
        calls.extend([None] * is_refill)
        if is_refill and len(calls) == last:
            raise Stopped(signal.SIGTERM)
        return generate(*args, **options)

    last = 0
    monkeypatch.setattr(collector, "generate", counted)
    whole = run(tmp_path / "whole", *words)
    last, _ = len(calls), calls.clear()
    with pytest.raises(Stopped):
        run(tmp_path / "left", *words)
    [saved] = checkpoints_in(tmp_path / "left")
    assert holds(saved)
    last = 0
    found = run(tmp_path / "left", *words, "resume=auto")
    assert found == {**whole, "page": found["page"]}


def test_an_engine_that_is_apart_samples_while_the_policy_is_trained(tmp_path, apart):
    """Check that sampling in a thread during training gives the same results.

    The results are compared with those of a run that samples before the training of each step.
    """
    options = [*AHEAD, "eval.every=1", "inner_iterations=2", "minibatches=2"]
    found = run(tmp_path / "apart", *options)
    assert [engine.overlapped for engine in apart] == [2]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Apart, "is_apart", False)
        assert run(tmp_path / "inside", *options) == found
    assert apart[1].overlapped == 0


def test_a_signal_while_the_engine_samples(tmp_path, whole, monkeypatch, apart):
    """Check a signal that arrives in step 2, while the engine already samples for step 3.

    The checkpoint must contain the samples of step 2. The resumed run must sample step 3 again.
    """
    begin = Collector.begin_ahead

    def begun(self, step, clock):
        begin(self, step, clock)
        if step == 2:
            apart[-1].moved.set()
            Leave(monkeypatch, 1)  # sends the signal at the next forward pass, in an update

    with monkeypatch.context() as patched:
        patched.setattr(Collector, "begin_ahead", begun)
        with pytest.raises(Stopped):
            loop.train(config_of(tmp_path / "left", *AHEAD))
    Leave(monkeypatch, None)
    [saved] = checkpoints_in(tmp_path / "left")
    assert saved.name == "step_000001" and holds(saved)
    assert run(tmp_path / "left", *AHEAD, "resume=auto") == whole
    # The resumed process has not sampled the completions of step 2, so it logs no speed for them.
    has_speed = [row.get("perf/rollout_tok_s", 0) > 0 for row in logged(tmp_path / "left")]
    assert has_speed == [False, True, False, True]  # the first row is the evaluation


def test_completions_of_weights_that_are_older_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TransformersEngine, "update", lambda *_, **__: None)  # ignores updates
    with pytest.raises(RuntimeError, match=r"weights at most 1 steps old .* step 3, got some of 2"):
        run(tmp_path / "run", *AHEAD)
    with pytest.raises(EngineError, match="at most 0 steps old"):
        run(tmp_path / "other")


def test_a_failure_in_the_thread_ends_the_step(tmp_path, apart, monkeypatch):
    generate = Apart.generate

    def broken(self, *arguments, **options):
        if self.version == 1:
            raise RuntimeError("no answer within 5 s")
        return generate(self, *arguments, **options)

    monkeypatch.setattr(Apart, "generate", broken)
    with pytest.raises(RuntimeError, match="no answer within 5 s"):
        run(tmp_path / "run", *AHEAD)
