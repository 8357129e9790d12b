"""Training runs on several ranks: their settings, the job that trains, and comparisons of runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pytest import MonkeyPatch
from safetensors.torch import load_file

from grpo_fast.errors import Stopped
from grpo_fast.train import loop, ranks
from grpo_fast.train.config import load_recipe
from grpo_fast.train.report import report
from tests.command_line import ROOT
from tests.train.resuming import TINY, Leave, is_timing, logged

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


def numbers(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for all results of a run that must not depend on the number of ranks.

    The results are the logged metrics except timings, and the saved tensors.
    """
    for number, row in enumerate(logged(folder)):
        for name, value in row.items():
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
