"""Tests of several processes: refusals, shares of the work, faults, and sharded models."""

import itertools
import os
import signal
import time
from typing import Any
from unittest.mock import Mock, patch

import peft
import pytest
import safetensors.torch
import torch

from grpo_fast.attention import pack_groups
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.rollout.vllm.transfer import weights_of
from grpo_fast.train import loop
from grpo_fast.train import ranks as train_ranks
from grpo_fast.train import update as gradients
from grpo_fast.train.batch import balanced
from grpo_fast.train.config import ModelConfig, load_recipe
from grpo_fast.train.folder import checkpoints_in
from grpo_fast.train.policy import Policy, load_policy
from grpo_fast.train.report import report
from grpo_fast.train.update import Optimizer
from tests.data.test_data import write_lines
from tests.tiny import FAMILIES, SYMBOLS, tiny_folder, tiny_model
from tests.train.runs import SMALL, train


def train_apart(kind: str, folder: str, *words_of_ranks: list[str]) -> Any:
    """Train with different settings on every rank, and return the result of `train`.

    The word `cd=FOLDER` changes the working folder of a rank.
    """
    words = list(words_of_ranks[train_ranks.rank()])
    for word in [word for word in words if word.startswith("cd=")]:
        words.remove(word)
        os.chdir(word.removeprefix("cd="))
    return train("mu", kind, folder, "steps=1", *words)


FILES = ["data.task=jsonl", "data.path=d.jsonl", "data.n_test=2", "rewards=[{name: exact_match}]"]
APART = {  # for each case the words of both ranks, the word of rank 1, and a part of the message
    "seed": ([], ["seed=1"], "\n  seed: 0 → 1"),
    "kind": ([], ["distributed=fsdp2"], "\n  distributed: 'ddp' → 'fsdp2'"),
    "reward": ([], ["rewards=[{name: 'FOLDER/1/mine.py:score'}]"], "\n  rewards"),
    "data": ([*FILES, "cd=FOLDER/0"], ["cd=FOLDER/1"], "files.data.t"),
}


def test_ranks_that_were_started_differently_do_not_train(ranks, tmp_path):
    """Check that training does not start if the ranks have different settings or files.

    The error on every rank must name the rank and the setting that differ. No folder is created.
    """
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        rows = [{"prompt": f"{i} {i}", "answer": str(i + rank * (i == 5))} for i in range(8)]
        write_lines(tmp_path / str(rank) / "d.jsonl", *rows)
    reward = "def score(completions):\n    return [1.0] * len(completions)\n"
    (tmp_path / "1" / "mine.py").write_text(reward)
    for name, (both, other, said) in APART.items():
        first = [word.replace("FOLDER", str(tmp_path)) for word in both]
        second = [*first, *(word.replace("FOLDER", str(tmp_path)) for word in other)]
        for [one] in ranks(2, [train_apart, "ddp", str(tmp_path / name), first, second]):
            expected = "rank 1: expected the settings and files of rank 0, got others"
            assert one.get("error") == "ValueError" and expected in one["text"], (name, one)
            assert said in one["text"], (name, one)
        assert not (tmp_path / name).exists()


def test_a_model_whose_prompts_are_not_shared_is_refused_by_all_ranks(ranks, tmp_path):
    """Check that sharding does not start, and that the message says why."""
    for [found] in ranks(2, [train, "alone", "fsdp2", str(tmp_path / "run")], timeout=120):
        assert found["error"] == "ValueError", found
        assert "distributed: expected ddp, because this model computes every" in found["text"]
        assert "nats" in found["text"]  # the reason


def test_a_warm_start_of_shards_is_refused(ranks, tmp_path):
    """Check that a warm start with sharded weights is refused before any training."""
    for [found] in ranks(2, [train, "warm", "fsdp2", str(tmp_path / "run")]):
        assert "warm_start: expected one process or distributed=ddp, got fsdp2" in found["text"]


def test_groups_are_dealt_by_their_tokens():
    assert balanced([5, 1, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4, 5]]
    assert balanced([3], 3) == [[0], [], []]
    assert balanced([2, 2, 2], 1) == [[0, 1, 2]]


@pytest.mark.parametrize(
    "ranks, words, said",
    [(None, ["distributed=ddp"], "distributed: expected processes .torchrun"),
     ("2", [], "distributed: expected ddp, fsdp2 or hsdp for 2"),
     ("3", ["distributed=hsdp", "distributed_replicas=2"], "divides the 3 processes, got 2")],
)  # fmt: skip
def test_processes_that_do_not_fit_are_refused(tmp_path, monkeypatch, ranks, words, said):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", ranks)):
        monkeypatch.delenv(name, raising=False)
        if ranks is not None:
            monkeypatch.setenv(name, value)
    config = load_recipe("sort", [*SMALL, *words, f"output_dir={tmp_path / 'run'}"])
    with pytest.raises(ValueError, match=said):
        loop.train(config)
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------- Faults of one rank
def train_with(fault: str, case: str, kind: str | None, folder: str, *words: str) -> Any:
    """Train a case with a simulated fault, and return the result of `train`.

    Args:
        fault: "disk" makes every write of a checkpoint fail. "memory" and "nan" make the fourth
            call of the loss on the last rank raise a MemoryError or return NaN. "nans" does this
            with all calls on the last rank. "log" makes rank 0 fail to log step 2,
            and "finish" makes it fail to finish the logs. "stale" makes the engines ignore new
            weights.
        case: Key of `CASES`.
        kind: The setting `distributed`.
        folder: The output folder.
        *words: Further settings.
    """
    calls, own = itertools.count(1), gradients.packed_loss
    is_last = train_ranks.rank() == train_ranks.size() - 1
    write = getattr(report.RunReport, fault, None)

    def failing_loss(*given: Any, **options: Any) -> Any:
        is_here = (next(calls) == 4 or fault == "nans") and is_last
        if is_here and fault == "memory":
            raise MemoryError("no room")
        loss, *others = own(*given, **options)
        return loss * (float("nan") if is_here else 1), *others

    def failing_log(self: Any, *given: Any) -> None:
        if train_ranks.is_main() and (fault == "finish" or given[0] == 2):
            raise TypeError("a bug")
        write(self, *given)

    full_disk = safetensors.torch, "save", Mock(side_effect=OSError(28, "No space left on device"))
    in_logs = report.RunReport, fault, failing_log
    old_weights = TransformersEngine, "update", lambda *_, **__: None
    patches = {"disk": full_disk, "log": in_logs, "finish": in_logs, "stale": old_weights}
    with patch.object(*patches.get(fault, (gradients, "packed_loss", failing_loss))):
        return train(case, kind, folder, *words)


def test_out_of_memory_on_one_rank_ends_all(ranks, tmp_path):
    [[first], [second]] = ranks(2, [train_with, "memory", "mu", "ddp", str(tmp_path / "run")])
    assert second["error"] == "ValueError" and "resume=auto and fewer tokens" in second["text"]
    assert first["error"] == "RankError", first


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(ranks, tmp_path, kind):
    """Check also that three such steps in a row end the run, and that the run is saved.

    The resumed run counts the two skipped steps of the checkpoint, too.
    """
    jobs = ("nan", "mu", kind, str(tmp_path / "run")), ("nans", "few", kind, str(tmp_path / "end"))
    found = ranks(2, *([train_with, *job] for job in jobs))
    assert [x[0]["skipped"] for x in found] == [1, 1], found
    assert [x[1].get("error") for x in found] == ["NonFiniteGradient"] * 2, found
    assert [path.name for path in checkpoints_in(tmp_path / "end")] == ["step_000002"]
    found = ranks(2, [train, "few", kind, str(tmp_path / "end"), "resume=auto"])
    assert [x[0].get("skipped") for x in found] == [2, 2], found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_full_disk_of_rank_0_ends_all_ranks(ranks, tmp_path, kind):
    folder = str(tmp_path / "run")
    # DCP raises an error of rank 0 on all ranks. With ddp, rank 0 alone calls DCP.
    error_of_rank_1 = "RankError" if kind == "ddp" else "WriteError"
    found = ranks(2, [train_with, "disk", "mu", kind, folder, "checkpoint.every=1"])
    assert [x[0].get("error") for x in found] == ["WriteError", error_of_rank_1], found
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


LOGGING, STALE = ["TypeError", "RankError"], ["EngineError", "EngineError"]


@pytest.mark.parametrize(
    "fault, errors, place",
    [("log", LOGGING, "step_000002"), ("finish", LOGGING, "step_000003"),
     ("stale", STALE, "step_000001")],
)  # fmt: skip
def test_an_error_of_logs_or_old_samples_ends_all_ranks_and_saves_the_run(
    ranks, tmp_path, fault, errors, place
):
    found = ranks(2, [train_with, fault, "few", "ddp", str(tmp_path / "run")])
    assert [x[0].get("error") for x in found] == errors, found
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == [place]


def raise_on_main() -> Any:
    """Call a function on rank 0 that fails, and return the error of this rank."""
    try:
        train_ranks.from_main(lambda: {}["key"])
    except Exception as error:
        return [type(error).__name__, str(error), train_ranks.is_common(error)]
    return None


def test_an_error_of_rank_0_is_raised_by_all(ranks):
    first, second = ranks(2, [raise_on_main])
    assert first == [["KeyError", "'key'", True]]
    assert second == [["RankError", "rank 0: KeyError: 'key'", True]]


def ended(folder: str, rank: int) -> Any:
    """Train on all ranks, but kill the process of `rank` in its first loss computation.

    Returns:
        On the other ranks, the result of `train` and the `seconds` until the training ended.
    """
    os.environ["MASTER_PORT"] = os.environ["ANOTHER_PORT"]
    torch.distributed.destroy_process_group()
    if int(os.environ["RANK"]) == rank:

        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        gradients.packed_loss = die
    began = time.monotonic()
    return {**train("mu", "ddp", folder), "seconds": time.monotonic() - began}


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_killed_ends_the_others(ranks, tmp_path, dead):
    """Check that a rank ends with an error if the other rank is killed, even without torchrun."""
    found = ranks(2, [ended, str(tmp_path / "run"), dead])
    survivor, gone = found[1 - dead], found[dead]
    assert gone == [] and survivor[0]["error"] == "RankError", survivor
    assert "a rank, which torchrun names, has ended" in survivor[0]["text"]
    assert survivor[0]["seconds"] < 60
    saved = [path.name for path in checkpoints_in(tmp_path / "run")]
    assert saved == ([] if dead == 0 else ["step_000000"])  # rank 0 has all weights


# ----------------------------------------------------------------------------------- Sharded models
def shards(case: str, kind: str, folder: str) -> Any:
    """Train one step, and return the fraction of the tensors that this rank stores.

    Returns:
        The result of `train`. It also contains the fractions of `weights`, `grads` and Adam's
        `moments`.
    """
    found: dict[str, Any] = {}

    def looking(self: Any) -> float:
        grads = [p.grad for p in self.parameters]
        norm = step(self)
        state = [s["exp_avg"] for s in self.adam.state.values()]
        for name, tensors in (("weights", self.parameters), ("grads", grads), ("moments", state)):
            local = sum(getattr(x, "_local_tensor", x).numel() for x in tensors)
            found[name] = local / sum(x.numel() for x in tensors)
        return norm

    step = Optimizer.step
    with patch.object(Optimizer, "step", looking):
        return {**train(case, kind, folder, "steps=1"), **found}


def test_a_rank_holds_its_shard_of_weights_gradients_and_moments(ranks, tmp_path):
    for kind, count in (("fsdp2", 2), ("ddp", 2), ("hsdp", 4)):
        for [found] in ranks(count, [shards, "mu", kind, str(tmp_path / kind)]):
            share = 1.0 if kind == "ddp" else 0.5
            assert all(abs(found[x] - share) < 0.05 for x in ("weights", "grads", "moments")), found


def load_shards(*folders: str) -> Any:
    """Load each model sharded and unsharded, and return the names of tensors that differ."""
    apart = []
    for folder in folders:
        for lora in (None, {"r": 2}):
            config = ModelConfig(path=folder, dtype="float32", device="cpu", lora=lora)
            torch.manual_seed(3)
            plain = load_policy(config)
            torch.manual_seed(3)
            policy = load_policy(config)
            train_ranks.shard_all([policy], policy.device, None)
            for kind in ("named_parameters", "named_buffers"):
                ours, theirs = (dict(getattr(x.model, kind)()) for x in (policy, plain))
                apart += [f"{folder} {x}" for x in ours.keys() ^ theirs.keys()]
                apart += [
                    f"{folder} {x}" for x, tensor in ours.items()
                    if not torch.equal(train_ranks.full_tensor(tensor).detach(), theirs[x])
                    or tensor.requires_grad != theirs[x].requires_grad
                    or (kind == "named_parameters") != hasattr(tensor, "full_tensor")
                ]  # fmt: skip
            tied = [x.lm.get_output_embeddings().weight is x.lm.get_input_embeddings().weight
                    for x in (policy, plain)]  # fmt: skip
            apart += [] if tied[0] == tied[1] else [f"{folder} tie"]
            packed = pack_groups([([1, 2, 3], [[4, 5], [6, 7, 8]])])
            if not torch.allclose(policy.logps(packed), plain.logps(packed), atol=1e-5):
                apart.append(f"{folder} logps")
    return apart


def test_a_sharded_model_has_the_weights_of_an_unsharded_one(ranks, tmp_path):
    """Check weights, buffers and adapters. Tied weights must stay tied."""
    folders = [str(tiny_folder(tmp_path / family, family)) for family in FAMILIES]
    for [apart] in ranks(2, [load_shards, *folders]):
        assert apart == []


def send_adapters() -> Any:
    """Return the tensors that a sharded model would send to vLLM with other values."""
    apart = []
    for settings in ({}, {"use_dora": True}, {"modules_to_save": ["norm"]},
                     {"trainable_token_indices": [2]}):  # fmt: skip
        lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, **settings)
        model = peft.get_peft_model(tiny_model("llama", vocab_size=14), lora)
        policy = Policy(model, build_symbol_tokenizer(SYMBOLS))
        torch.manual_seed(3)
        for parameter in policy.trainable():
            torch.nn.init.normal_(parameter)
        expected = weights_of(policy.lm)
        train_ranks.shard_all([policy], policy.device, None)
        before = [p.full_tensor() for p in policy.model.parameters()]
        sent = weights_of(policy.lm)
        assert sent.keys() == expected.keys()
        apart += [f"{settings} {x}" for x in sent if not torch.equal(sent[x], expected[x])]
        after = [p.full_tensor() for p in policy.model.parameters()]
        assert all(map(torch.equal, before, after))
    return apart


def test_a_sharded_model_sends_the_weights_of_an_unsharded_one(ranks):
    """Check the merged weights of adapters, which peft computes wrongly from shards of DoRA."""
    for [apart] in ranks(2, [send_adapters]):
        assert apart == []


def pass_unevenly() -> Any:
    """Train a sharded model after a rollout in which the forward passes of the ranks differ.

    Returns:
        Two bools. The first is True if the layers are sharded again after the forward pass of the
        training step. The second is True if all parameters have gradients.
    """
    fields = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3,
              "num_attention_heads": 2}  # fmt: skip
    config = ModelConfig(config={"model_type": "llama", **fields}, tokenizer="symbols",
                         device="cpu")  # fmt: skip
    policy = load_policy(config, build_symbol_tokenizer(list("0123456789")))
    train_ranks.shard_all([policy], policy.device, None)
    with train_ranks.unsharded(policy.lm), policy.generation():
        passing = policy.lm.base_model if train_ranks.is_main() else policy.lm
        passing(input_ids=torch.tensor([[1, 2, 3]]))
    logps = policy.logps(pack_groups([([1, 2, 3], [[4, 5]])]))
    dealt = all(hasattr(p, "full_tensor") for p in policy.lm.base_model.layers.parameters())
    logps.sum().backward()
    return [dealt, all(p.grad is not None for p in policy.trainable())]


def test_a_rollout_leaves_no_order_behind(ranks):
    """Check that a sharded model can train after ranks made different forward passes in a rollout.

    Otherwise FSDP2 would prefetch parameters in a different order on each rank, and deadlock.
    """
    assert ranks(2, [pass_unevenly], timeout=60) == [[[True, True]]] * 2
