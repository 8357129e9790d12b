"""Helpers that train recipes with tiny models, in one process or on ranks, and compare the results.

They also interrupt a run at a chosen point and resume it.
"""

import functools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from safetensors.torch import load_file

from grpo_fast import rollout
from grpo_fast.errors import Stopped
from grpo_fast.train import loop, ranks
from grpo_fast.train.config import load_recipe
from grpo_fast.train.policy import Policy
from grpo_fast.train.ranks import Stopping
from grpo_fast.train.report import report
from grpo_fast.train.report.page import read_parquet
from grpo_fast.train.report.report import RunReport
from tests.command_line import ROOT
from tests.data.test_data import write_lines

TINY_SORT = ["model.config.hidden_size=32", "model.config.intermediate_size=64", "data.n_test=16",
             "model.config.num_hidden_layers=2", "rollout.prompts_per_step=4",
             "rollout.group_size=4", "log.progress=false", "log.save_model=false",
             "steps=3"]  # fmt: skip


def is_timing(name):
    """Return True for the names of timing metrics, which differ even between identical runs."""
    return name == "step_time" or name.startswith("perf/") or name.endswith("_time")


def questions(folder: Path, train: int = 30, test: int = 10) -> str:
    """Write a small data set in the format of GSM8K, and return its folder.

    `train` and `test` are the numbers of questions in each split.
    """
    folder.mkdir(exist_ok=True)
    lines = [
        {"question": f"Tom has {i} apples, then {i + 1} more. Sum?",
         "answer": f"{i} + {i + 1}\n#### {2 * i + 1}"} for i in range(train + test)
    ]  # fmt: skip
    for name, part in (("train", lines[:train]), ("test", lines[train:])):
        if part:
            write_lines(folder / f"{name}.jsonl", *part)
    return str(folder)


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return all rows of the file metrics.jsonl in the folder of a run, including timings."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(folder: Path) -> list[dict[str, Any]]:
    """Return all logged rows of a run without timings."""
    return [{k: v for k, v in row.items() if not is_timing(k)} for row in logged(folder)]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Return the logged metrics of all training steps of a run, without timings."""
    return [row for row in untimed(folder) if "loss" in row]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all saved tensors of a run. A name has the folder and the file of the tensor."""
    return {
        f"{file.parent.name}/{file.name}/{name}": tensor
        for file in sorted(folder.glob("*/*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def train_recipe(
    folder: Path, recipe: str, *overrides: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train a recipe, and return the summary of the run and one row of metrics per step."""
    config = load_recipe(recipe, [*overrides, f"output_dir={folder}"])
    summary, rows = loop.train(config), steps_of(folder)
    assert len(rows) == config.steps
    return summary, rows


def sort(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    return train_recipe(folder, "sort", *TINY_SORT, *overrides)[1]


TINY = ["model.config.hidden_size=16", "model.config.intermediate_size=32", "data.n_test=4",
        "model.config.num_hidden_layers=1", "model.config.num_attention_heads=2",
        "model.config.num_key_value_heads=2", "rollout.prompts_per_step=2", "rollout.group_size=4",
        "rollout.max_new_tokens=6", "log.progress=false", "steps=3", "eval.every=2",
        "log.completions_every=1", "tokens_per_microbatch=30"]  # fmt: skip


def opened(folder: Path, config: Any, **options: Any) -> RunReport:
    """Create the folder of a new run, and return the `RunReport` that writes the run's logs."""
    config = config.model_copy(update={"output_dir": str(folder)})
    report = RunReport(config, **options)
    folder.mkdir(parents=True, exist_ok=True)
    report.begin()
    return report


def config_of(folder: Path, *overrides: str, recipe: str = "sort") -> Any:
    words = [*(TINY if recipe == "sort" else []), *overrides, f"output_dir={folder}"]
    return load_recipe(recipe, words)


def run(folder: Path, *overrides: str, recipe: str = "sort") -> dict[str, Any]:
    """Start or resume a training run in `folder`, and return its results (see `result`)."""
    loop.train(config_of(folder, *overrides, recipe=recipe))
    return result(folder)


def result(folder: Path) -> dict[str, Any]:
    """Read all results of a run that must be the same if the run is interrupted and resumed.

    The results are the metrics except timings, the prompts, the completions, parts of the summary,
    and the bytes of every saved tensor.
    """
    found: dict[str, Any] = {
        "metrics": untimed(folder),
        "prompts": {
            path.name: [row["prompt"] for row in read_parquet(path)]
            for path in sorted((folder / "completions").glob("*"))
        },
    }
    if (folder / "completions.html").exists():
        page = (folder / "completions.html").read_text(encoding="utf-8")
        found["page"] = page.replace(folder.name, "NAME")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    found["summary"] = {key: summary[key] for key in ("before", "after", "steps", "num_tokens")}
    return found | {name: x.numpy().tobytes() for name, x in tensors_of(folder).items()}


class Leave:
    """Patch that sends SIGTERM to a run at the `at`-th of certain calls.

    The calls are forward passes of training, rollouts, and the ends of steps. The attribute
    `passes` counts them. Early calls, which a warm start makes before the run can save a
    checkpoint, do not count. If `before` is True, only the early calls count.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, at: int | None, *, before: bool = False
    ) -> None:
        self.passes = 0
        self.stopping: Stopping | None = None
        patched = self

        class Recorded(Stopping):
            def __init__(self) -> None:
                super().__init__()
                patched.stopping = self

        monkeypatch.setattr("grpo_fast.train.ranks.Stopping", Recorded)
        for owner, name in (
            (Policy, "hidden"),
            (rollout, "generate"),
            (Stopping, "raise_together"),
        ):
            monkeypatch.setattr(owner, name, self.counted(getattr(owner, name), at, before))

    def counted(self, own: Any, at: int | None, before: bool) -> Any:
        @functools.wraps(own)
        def call(*arguments: Any, **options: Any) -> Any:
            # A call is early if the loop has not yet replaced `may_stop`.
            stopping = self.stopping
            if stopping and (stopping.may_stop.__module__ == loop.__name__) != before:
                self.passes += 1
                if self.passes == at:
                    stopping.receive(signal.SIGTERM)
            return own(*arguments, **options)

        return call


SMALL = [*TINY, "data.n_test=3", "rollout.prompts_per_step=3", "optim.max_grad_norm=0.05",
         "checkpoint.keep=9"]  # fmt: skip
PPO = ["advantages=gae", "inner_iterations=2"]
KL = ["loss.beta=0.1", "reference.kind=frozen"]
SUMS = f"data={{task: jsonl, n_test: 3, path: {ROOT / 'tests' / 'train' / 'sums.jsonl'}}}"
CORRECTED = ["rollout.correct_sampling=true", "rollout.top_p=0.8"]
CASES: dict[str, list[str]] = {
    "few": ["rollout.prompts_per_step=1", "advantages=opo", "tokens_per_microbatch=60"],
    "mu": ["inner_iterations=2", "minibatches=2", "shuffle=completions", *KL,
           "reference.kind=synced", "reference.sync_every=1"],
    "lora": ["model.lora={r: 2}", *KL, "inner_iterations=2", "max_approx_kl=0.0001"],
    "dynamic": ["rollout.dynamic={rounds: 2}", "rollout.group_size=2", "data.digits=3",
                "rollout.max_new_tokens=4", "advantages=baseline", *CORRECTED],
    "local": ["loss.aggregation=token_mean_local", "tokens_per_microbatch=1",
              "rollout.mask_truncated=true"],
    "ppo": [*PPO, "critic={kind: model, coef: 0.5}", "minibatches=2"],
    "ppo-shared": [*PPO, "critic={kind: shared, kl_in_reward: true}", *KL],
    "warm": ["warm_start={steps: 2, batch_size: 4}", SUMS, *KL,
             "rewards=[{name: exact_match}]", "rollout.max_new_tokens=4"],
    "exact": [*KL, "loss.kl_estimator=exact", "inner_iterations=2", "minibatches=2",
              "shuffle=completions"],
    "divergence": [*KL, "loss.kl_estimator=exact_reference_first", "inner_iterations=2",
                   "minibatches=2", "shuffle=completions"],
    "hybrid": ["model.config={model_type: qwen3_5_text, hidden_size: 16, intermediate_size: 16, "
               "num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 8, "
               "layer_types: [linear_attention, full_attention], linear_num_key_heads: 2, "
               "linear_num_value_heads: 2, linear_key_head_dim: 8, linear_value_head_dim: 8}",
               *KL, "inner_iterations=2", "model.gradient_checkpointing=true"],
    "alone": ["model.config={model_type: bloom, hidden_size: 16, n_layer: 1, n_head: 2}", *KL],
    "sampled": ["eval.samples=2", "eval.temperature=1.0",
                "model.gradient_checkpointing=true"],
}  # fmt: skip


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
    try:
        summary = loop.train(config)
    except Stopped as stopped:
        return {"code": stopped.code}
    except (Exception, KeyboardInterrupt) as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"skipped": summary["skipped_steps"], "tokens": summary["tokens_per_microbatch"]}


def numbers(folder: Path) -> dict[str, torch.Tensor]:
    """Return all results of a run that must not depend on the number of ranks.

    The results are the logged metrics except timings, and the saved tensors.
    """
    metrics = {
        f"{number}/{name}": torch.tensor(float(value))
        for number, row in enumerate(untimed(folder))
        for name, value in row.items()
    }
    return metrics | tensors_of(folder)


def differences(folder: Path, expected: Path, tolerance: float = 1e-5) -> list[str]:
    """Return a description of each value that differs between the folders of two runs.

    The tolerance is relative for values above 1 and absolute for smaller values. A tolerance of 0
    requires bitwise equality.
    """
    ours, theirs = numbers(folder), numbers(expected)
    apart = [f"{name} is missing" for name in ours.keys() ^ theirs.keys()]
    for name in ours.keys() & theirs.keys():
        a, b = ours[name].double(), theirs[name].double()
        limit = tolerance * b.abs().clamp(min=1)
        if a.shape != b.shape or not bool(((a - b).abs() <= limit).all()):
            apart.append(f"{name}: {a.flatten()[:3].tolist()} {b.flatten()[:3].tolist()}")
    return apart


def warm_up(folder: Path) -> None:
    """Import all modules that a run needs, by training two tiny runs, and disable plots."""
    import peft  # noqa: F401
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    report.plot_runs = lambda *_: None  # type: ignore[assignment]
    torch.set_num_threads(1)
    for case in ("mu", "ppo"):
        train(case, None, str(folder / case), "steps=1", "checkpoint.every=1")


def train_until(
    case: str, kind: str | None, folder: str, rank: int, passes: int | None, *words: str
) -> Any:
    """Train a case, and send a signal to one rank just before its `passes`-th forward pass.

    With None, no signal is sent.

    Returns:
        The result of `train`. It also contains the number of forward passes, as `seen`.
    """
    with MonkeyPatch.context() as patched:
        leave = Leave(patched, passes if ranks.rank() == rank else None)
        return {**train(case, kind, folder, *words), "seen": leave.passes}
