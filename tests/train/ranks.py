"""Test jobs that run on several ranks (processes of torch.distributed) with the gloo backend.

A server process imports all modules once and then forks the ranks, because the imports are slow. A
test sends jobs to the server. A job is the list [function, argument, …], where the function is a
name in this module or "module:name". All ranks run every job.
"""

import copy
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pytest import MonkeyPatch
from safetensors.torch import load_file

from grpo_fast.attention import pack_groups
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.errors import Stopped
from grpo_fast.rollout import engine
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.train import loop
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import distributed, sharding
from grpo_fast.train.report import report, trackers
from grpo_fast.train.runs import checkpoint
from grpo_fast.train.update import gradients, optimizer
from tests.command_line import ROOT
from tests.train.resuming import TINY, Leave
from tests.train.tiny_runs import is_timing

SMALL = [*TINY, "data.n_test=3", "rollout.prompts_per_step=3", "optim.max_grad_norm=0.05",
         "checkpoint.keep=9"]  # fmt: skip
PPO = ["advantages=gae", "inner_iterations=2"]
KL = ["loss.beta=0.1", "reference.kind=frozen"]
SUMS = f"data={{task: jsonl, n_test: 3, path: {ROOT / 'tests' / 'train' / 'sums.jsonl'}}}"
AHEAD = ["rollout.ahead=1", "rollout.correct_sampling=true", "rollout.top_p=0.8"]
CASES: dict[str, list[str]] = {
    "few": ["rollout.prompts_per_step=1", "advantages=opo", "tokens_per_microbatch=60"],
    "mu": ["inner_iterations=2", "minibatches=2", "shuffle=completions", *KL,
           "reference.kind=synced", "reference.sync_every=1", "kl.target=0.01"],
    "lora": ["model.lora={r: 2}", *KL, "inner_iterations=2"],
    "dynamic": ["rollout.dynamic={rounds: 2}", "rollout.group_size=2", "data.digits=3",
                "rollout.max_new_tokens=4", "advantages=baseline", *AHEAD],
    "apart": [*AHEAD, "inner_iterations=2"],
    "local": ["loss.aggregation=token_mean_local", "tokens_per_microbatch=1",
              "rollout.mask_truncated=true"],
    "ppo": [*PPO, "critic={kind: model, coef: 0.5}", "minibatches=2", "shuffle=groups"],
    "ppo-shared": [*PPO, "critic={kind: shared}", *KL, "kl.into=reward"],
    "per-token": [*PPO, "critic={bootstrap: false}", "rewards=[{name: "
                  "'tests.train.ranks:of_each_token', label: own, in_process: true}]"],
    "warm": ["warm_start={steps: 2, batch_size: 4}", SUMS, *KL,
             "rewards=[{name: exact_match}]", "rollout.max_new_tokens=4"],
    "exact": [*KL, "loss.kl_estimator=exact", "inner_iterations=2", "minibatches=2",
              "shuffle=completions", "log.grad_variance=true"],
    "distill": ["reference.kind=frozen", "distill={kind: jsd, beta: 0.3, task: 0.5}",
                "inner_iterations=2", "minibatches=2", "shuffle=completions"],
    "sampled": ["eval.samples=2", "eval.temperature=1.0", "eval.k=[1, 2]",
                "model.gradient_checkpointing=true"],
}  # fmt: skip


def of_each_token(completion_ids: list[list[int]]) -> list[list[float]]:
    """Compute a reward for every token from the token's id and its position.

    Returns:
        One list of rewards per completion.
    """
    return [[float(i % 3) / (place + 1) for place, i in enumerate(ids)] for ids in completion_ids]


class Apart(TransformersEngine):
    """Engine that samples from an unsharded copy of the weights, like an engine on its own device.

    Sampling needs no collective calls, so a run may sample in a thread during the training.
    """

    is_apart = True

    def update(self, policy: Any, version: int) -> None:
        super().update(copy.deepcopy(policy), version)
        self.policy.lm.base_model._forward_pre_hooks.clear()  # only the trainer handles signals


# -------------------------------------------------------------------------- Jobs that all ranks run
def train(case: str, kind: str | None, folder: str, *words: str) -> dict[str, Any]:
    """Train with the settings `CASES[case]`, and return how the training ended.

    Args:
        case: Key of `CASES`.
        kind: The setting `distributed` ("ddp", "fsdp2" or "hsdp"). None trains without ranks.
        folder: The output folder.
        *words: Further settings.

    Returns:
        A dictionary. After a signal it has the exit `code`. After an error it has the `error`'s
        class name and its `text`. Otherwise it has the number of `skipped` steps and the number of
        `tokens` per micro-batch.
    """
    given = [] if kind is None else [f"distributed={kind}"]
    if kind == "hsdp":
        given.append("distributed_replicas=2")
    config = load_recipe("sort", [*SMALL, *CASES[case], *given, *words, f"output_dir={folder}"])
    own = {"transformers": f"{__name__}:Apart"} if (case, kind) == ("apart", "ddp") else {}
    try:
        with patch.dict(engine.BUILDERS, own):
            summary = loop.train(config)
    except Stopped as stopped:
        return {"code": stopped.code}
    except (Exception, KeyboardInterrupt) as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"skipped": summary["skipped_steps"], "tokens": summary["tokens_per_microbatch"]}


def train_until(case: str, kind: str, folder: str, rank: int, passes: int, *words: str) -> Any:
    """Train a case, and send a signal to one rank just before its `passes`-th forward pass.

    Returns:
        The result of `train`. It also contains the number of forward passes, as `seen`.
    """
    with MonkeyPatch.context() as patched:
        leave = Leave(patched, passes if distributed.rank() == rank else None)
        return {**train(case, kind, folder, *words), "seen": leave.passes}


def train_with(fault: str, case: str, kind: str | None, folder: str, *words: str) -> Any:
    """Train a case with a simulated fault, and return the result of `train`.

    Args:
        fault: "stale" makes the engines ignore new weights. "disk" makes every write of a
            checkpoint fail. "memory" and "nan" make the fourth
            call of the loss on the last rank raise a MemoryError or return NaN. "memories" and
            "nans" do this with all calls on the last rank. "log" makes rank 0 fail to log step 2,
            and "finish" makes it fail to finish the logs.
        case: Key of `CASES`.
        kind: The setting `distributed`.
        folder: The output folder.
        *words: Further settings.
    """
    calls, own = 0, gradients.packed_loss
    is_here = distributed.rank() == distributed.size() - 1

    def failing(policy: Any, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if is_here and (fault == "memories" or (fault == "memory" and calls == 4)):
            raise MemoryError("no room")
        loss, hidden, output = own(policy, *rest)
        if is_here and (fault == "nans" or (fault == "nan" and calls == 4)):
            loss = loss * float("nan")
        return loss, hidden, output

    if fault in ("log", "finish"):
        write = getattr(report.RunReport, fault)

        def broken(self: Any, *rest: Any) -> None:
            if distributed.is_main() and (fault == "finish" or rest[0] == 2):
                raise TypeError("a tracker's error")
            write(self, *rest)

        with patch.object(report.RunReport, fault, broken):
            return train(case, kind, folder, *words)
    if fault == "stale":
        with patch.object(TransformersEngine, "update", lambda *_, **__: None):
            return train(case, kind, folder, *words)
    if fault == "disk":
        full = OSError(28, "No space left on device")
        with patch.object(checkpoint, "save_file", side_effect=full):
            return train(case, kind, folder, *words)
    with patch.object(gradients, "packed_loss", failing):
        return train(case, kind, folder, *words)


def raise_together(*kinds: str | None) -> Any:
    """Raise one error per rank in `together`, and return the error that all ranks then raise.

    Args:
        kinds: For each rank the class name of its error, or None for no error.

    Returns:
        The class name and the message of the error.
    """
    said = kinds[distributed.rank()]
    kinds_by_name = {kind.__name__: kind for kind in distributed.SHARED}
    error: BaseException | None = None
    try:
        with distributed.together():
            if said == "Stopped":
                raise Stopped(signal.SIGINT)
            if said is not None:
                raise kinds_by_name.get(said, KeyError)(f"of {distributed.rank()}")
    except (Exception, Stopped) as found:
        error = found
    return [type(error).__name__, str(getattr(error, "number", error))]


def track() -> Any:
    """Start and finish a metrics tracker on rank 0, and return the rows that the tracker received.

    The ranks then gather the rows, which fails if finishing the tracker destroyed the process
    group.
    """
    from tests.train.test_trackers import Fake

    if distributed.is_main():
        mine = trackers.start_trackers([Fake("run")], ".", {})  # type: ignore[list-item]
        for tracker in mine:
            tracker.log({"reward": 0.5}, step=1)
            tracker.finish()
    return distributed.gather([[each.rows, each.finished] for each in Fake.made])[0]


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

    step = optimizer.Optimizer.step
    with patch.object(optimizer.Optimizer, "step", looking):
        return {**train(case, kind, folder, "steps=1"), **found}


def load_shards(*folders: str) -> Any:
    """Load each model once sharded and once unsharded, and return the names of tensors that differ.

    Only rank 0 reads the files of the sharded model and sends the weights to the other ranks.
    """
    apart = []
    for folder in folders:
        for lora in (None, {"r": 2}):
            config = ModelConfig(path=folder, dtype="float32", device="cpu", lora=lora)
            torch.manual_seed(3)
            plain = load_policy(config)
            torch.manual_seed(3)
            policy = load_policy(config, empty=not distributed.is_main())
            assert policy.is_empty != distributed.is_main()
            sharding.shard_all([policy], policy.device, None)
            for kind in ("named_parameters", "named_buffers"):
                ours, theirs = (dict(getattr(x.model, kind)()) for x in (policy, plain))
                apart += [f"{folder} {x}" for x in ours.keys() ^ theirs.keys()]
                apart += [
                    f"{folder} {x}" for x, tensor in ours.items()
                    if not torch.equal(distributed.full_tensor(tensor).detach(), theirs[x])
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


def sharded_policy(fields: dict[str, Any], *, empty: bool) -> Policy:
    """Build and shard a Llama model with random weights.

    `fields` are the fields of the model's configuration. If `empty` is True, the model is on the
    meta device until it is sharded.
    """
    config = ModelConfig(config={"model_type": "llama", **fields}, tokenizer="symbols",
                         device="cpu")  # fmt: skip
    policy = load_policy(config, build_symbol_tokenizer(list("0123456789")), empty=empty)
    sharding.shard_all([policy], policy.device, None)
    return policy


def load_other(size: int) -> str:
    """Shard a model that is wider on rank 1 by `size`. Return the error message, or ""."""
    fields = {"hidden_size": 16 + size * distributed.rank(), "intermediate_size": 16,
              "num_hidden_layers": 1, "num_attention_heads": 2,
              "tie_word_embeddings": False}  # fmt: skip
    try:
        sharded_policy(fields, empty=not distributed.is_main())
    except ValueError as error:
        return str(error)
    return ""


def load_large(megabytes: int) -> Any:
    """Return how much the memory of this rank grows while a model is loaded and sharded.

    Returns:
        A dictionary with the growth (`grown`) and the size of the model (`size`), in MiB.
    """
    import resource

    fields = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
              "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    peaks = []
    # Load a small model first, so that the measured growth excludes the memory of imports.
    for layers in (1, round(megabytes / 8.5)):
        policy = sharded_policy({**fields, "num_hidden_layers": layers},
                                empty=not distributed.is_main())  # fmt: skip
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    size = sum(p.numel() * p.element_size() for p in policy.lm.parameters()) / 2**20
    return {"grown": peaks[1] - peaks[0], "size": size}


def pass_unevenly() -> Any:
    """Train a sharded model after a rollout in which the forward passes of the ranks differ.

    Returns:
        Two bools. The first is True if the layers are sharded again after the forward pass of the
        training step. The second is True if all parameters have gradients.
    """
    fields = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3,
              "num_attention_heads": 2}  # fmt: skip
    policy = sharded_policy(fields, empty=False)
    with policy.whole(), policy.generation():
        passing = policy.lm.base_model if distributed.is_main() else policy.lm
        passing(input_ids=torch.tensor([[1, 2, 3]]))
    logps = policy.logps(pack_groups([([1, 2, 3], [[4, 5]])]))
    dealt = all(hasattr(p, "full_tensor") for p in policy.lm.base_model.layers.parameters())
    logps.sum().backward()
    return [dealt, all(p.grad is not None for p in policy.trainable())]


def train_apart(kind: str, folder: str, *words_of_ranks: list[str]) -> Any:
    """Train with different settings on every rank, and return the result of `train`.

    The word `cd=FOLDER` changes the working folder of a rank.
    """
    words = list(words_of_ranks[distributed.rank()])
    for word in [word for word in words if word.startswith("cd=")]:
        words.remove(word)
        os.chdir(word.removeprefix("cd="))
    return train("mu", kind, folder, "steps=1", *words)


def ended(folder: str, rank: int) -> Any:
    """Train on all ranks, but kill the process of `rank` in its first loss computation.

    Returns:
        On the other ranks, the result of `train` and the `seconds` until the training ended.
    """
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": os.environ["ANOTHER_PORT"]}
    torch.distributed.destroy_process_group()
    if int(os.environ["RANK"]) == rank:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        gradients.packed_loss = die
    began = time.monotonic()
    return {**train("mu", "ddp", folder), "seconds": time.monotonic() - began}


# ---------------------------------------------------------------- The server process and its client
def free_port() -> str:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


def child(rank: int, ranks: int, ports: tuple[str, str], jobs: list[Any], file: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": ports[0], "ANOTHER_PORT": ports[1]}  # fmt: skip
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    found = []
    try:
        for name, *arguments in jobs:
            module, _, function = name.rpartition(":")
            owner = vars(importlib.import_module(module)) if module else globals()
            found.append(owner[function](*arguments))
    except BaseException:
        found.append({"error": "unexpected", "text": traceback.format_exc()})
    file.write_text(json.dumps(found), encoding="utf-8")


def serve(folder: Path) -> None:
    """Run the jobs that arrive on stdin, and write their results to the pipe `ANSWERS`.

    A request is a JSON line [number of ranks, [job, …]]. The loop ends when stdin is closed.
    """
    report.plot_runs = lambda *_: None  # type: ignore[assignment]
    import_all(folder)
    for number, line in enumerate(sys.stdin):
        ranks, jobs = json.loads(line)
        ports, children = (free_port(), free_port()), []
        files = [folder / f"{number}.{rank}.json" for rank in range(ranks)]
        for rank, file in enumerate(files):
            children.append(os.fork())
            if children[-1] == 0:
                try:
                    child(rank, ranks, ports, jobs, file)
                finally:
                    os._exit(0)
        for pid in children:
            os.waitpid(pid, 0)
        read = [json.loads(f.read_text()) if f.is_file() else [] for f in files]
        print(json.dumps(read), file=ANSWERS, flush=True)


def import_all(folder: Path) -> None:
    """Import all modules that a run needs, by training two tiny runs.

    The forked processes then need not import them. The imports take longer than a tiny run.
    """
    import peft  # noqa: F401
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    torch.set_num_threads(1)
    for case in ("mu", "ppo"):
        train(case, None, str(folder / case), "steps=1", "checkpoint.every=1")


class Ranks:
    """Client of the server process that forks the ranks. Call the client to run jobs on them."""

    def __init__(self, folder: Path) -> None:
        self.log = (folder / "log").open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.train.ranks", str(folder)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def __call__(self, ranks: int, *jobs: list[Any], timeout: float = 240) -> list[list[Any]]:
        """Run jobs on the given number of ranks, and return their results.

        Returns:
            One list per rank, with the results of its jobs. The list of a rank that died is empty.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        late = threading.Timer(timeout, self.kill)
        late.start()
        try:
            print(json.dumps([ranks, jobs]), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        finally:
            late.cancel()
        assert answer, f"no answer within {timeout} s: {Path(self.log.name).read_text()[-2000:]}"
        found = json.loads(answer)
        ends = [x for each in found for x in each if isinstance(x, dict)]
        unexpected = [x["text"] for x in ends if x.get("error") == "unexpected"]
        assert not unexpected, unexpected[0]
        return found

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


# ------------------------------------------------------------------------------- Comparison of runs
def numbers(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for all results of a run that must not depend on the number of ranks.

    The results are the logged metrics except timings, and the saved tensors.
    """
    rows = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for number, row in enumerate(rows):
        for name, value in json.loads(row).items():
            if not is_timing(name):
                yield f"{number}/{name}", torch.tensor(float(value))
    for file in sorted(folder.glob("*/*.safetensors")):
        for name, value in load_file(file).items():
            yield f"{file.parent.name}/{file.name}/{name}", value


def differences(folder: Path, expected: Path, tolerance: float = 1e-5) -> list[str]:
    """Return a description of each value that differs between the folders of two runs.

    The tolerance is relative for values above 1 and absolute for smaller values. A tolerance of 0
    requires bitwise equality.
    """
    ours, theirs = dict(numbers(folder)), dict(numbers(expected))
    apart = [f"{name} is missing" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        a, b = ours[name].double(), theirs[name].double()
        if a.shape != b.shape or not bool(
            ((a - b).abs() <= tolerance * b.abs().clamp(min=1)).all()
        ):
            apart.append(f"{name}: {a.flatten()[:3].tolist()} {b.flatten()[:3].tolist()}")
    return apart


if __name__ == "__main__":
    # Redirect stdout of the runs to the log file, so that the pipe to the client contains only
    # the results of the jobs.
    ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Path(sys.argv[1]))
