"""`distill:` in the trainer: both forms, against the exact KL and by hand, and what is refused."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.train.config import ModelConfig
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.update.precompute import teacher_advantages
from tests.rollout.vllm_stand_in import StandIn
from tests.train.tiny_runs import sort

pytestmark = pytest.mark.usefixtures("no_pictures")
FROZEN, LR = "reference.kind=frozen", "optim.lr=1e-2"


def run(folder, *overrides):
    return sort(folder, LR, *overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A teacher that has moved away from the student's start."""
    folder = tmp_path_factory.mktemp("teacher")
    run(folder / "run", "log.save_model=true", "steps=2")
    return folder / "run" / "model"


@pytest.mark.parametrize(
    ("estimator", "kind"), [("exact", "reverse_kl"), ("exact_reference_first", "forward_kl")]
)
def test_a_loss_of_the_teacher_is_the_exact_kl(tmp_path, trained, estimator, kind):
    reference = [FROZEN, f"reference.path={trained}"]
    kl = run(tmp_path / "kl", *reference, "loss.beta=0.5", f"loss.kl_estimator={estimator}")
    own = run(tmp_path / "own", f"distill.teacher={trained}", "distill.coef=0.5",
              f"distill.kind={kind}")  # fmt: skip
    assert kl[0]["kl"] > 0
    for one, other in zip(kl, own, strict=True):
        assert one["kl"] == other["divergence"]
        assert all(one[name] == other[name] for name in ("loss", "grad_norm", "reward"))


def test_the_teacher_alone(tmp_path, trained):
    """task=0: the student comes nearer, and rewards have no gradient; itself it is exactly at 0."""
    near = [f"distill.teacher={trained}", "distill.task=0", "loss.entropy_coef=0", "steps=12"]
    rows = run(tmp_path / "a", *near, "distill.kind=jsd", "distill.beta=0.3")
    assert rows[-1]["divergence"] < 0.5 * rows[0]["divergence"]
    itself = run(tmp_path / "b", FROZEN, "distill={}", "distill.task=0", "loss.entropy_coef=0")
    assert all(row["divergence"] == 0 and row["grad_norm"] == 0 for row in itself)


def test_an_advantage_of_the_teacher(tmp_path, trained):
    rows = run(tmp_path / "a", f"distill.teacher={trained}", *ADVANTAGE, "steps=15")
    assert rows[0]["kl"] > 0 and rows[-1]["kl"] < rows[0]["kl"]

    class Batch:
        advantages = torch.tensor([1.0, torch.nan])

        def of_each(self, name):
            x = {"ref_logps": 0.0, "old_logps": 1.0}[name]
            return [torch.full((2,), x), torch.full((1,), x)]

    found = teacher_advantages(Batch(), 0.5)
    assert [x.tolist() for x in found] == [[0.5, 0.5], [-0.5]]


@pytest.fixture(scope="module")
def server(trained):
    """The same teacher behind a vLLM server."""
    made = StandIn(load_policy(ModelConfig(path=str(trained), device="cpu")))
    yield made
    made.stop()


ADVANTAGE = ["distill.form=advantage", "distill.task=0", "loss.entropy_coef=0"]
KINDS = {
    kind: ([f"distill.kind={kind}", "distill.task=0.5"], ["distill.topk=999"], "divergence")
    for kind in ("forward_kl", "reverse_kl", "jsd")
} | {"advantage": (ADVANTAGE, [], "kl")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_says_every_id_is_the_teacher_itself(tmp_path, trained, server, kind):
    words, every_id, name = KINDS[kind]
    own = run(tmp_path / "own", f"distill.teacher={trained}", *words)
    said = run(tmp_path / "said", f"distill.teacher={server.url}/", *words, *every_id)
    assert own[0][name] > 0
    for one, other in zip(own, said, strict=True):
        for each in ("loss", "grad_norm", "reward", name):
            assert one[each] == pytest.approx(other[each], rel=2e-4, abs=2e-6), each


def test_a_servers_topk_teaches(tmp_path, server):
    """Two ids and the token's own, over micro-batches and minibatches that are packed anew."""
    words = [f"distill.teacher={server.url}", "distill.topk=2", "distill.task=0", "steps=10",
             "loss.entropy_coef=0", "minibatches=2", "inner_iterations=2", "shuffle=completions",
             "tokens_per_microbatch=24"]  # fmt: skip
    rows = run(tmp_path / "a", *words)
    assert rows[-1]["divergence"] < 0.6 * rows[0]["divergence"]
