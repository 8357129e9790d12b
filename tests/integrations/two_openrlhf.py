"""OpenRLHF's loss and its normalisers over two ranks: DDP stands where DeepSpeed would."""

import importlib.util
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.trainers import packages
from grpo_fast.integrations.openrlhf import PolicyLoss
from tests import grpo_reference
from tests.integrations.two_trl import Result, outcome
from tests.tiny import tiny_model

ACCUMULATED, STEPS = 2, 2
# By tokens and by completions; a trailing step of one micro-batch.
OPTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"dual_clip": 3.0},
    "samples": {"token_level_loss": False},
    "gspo": {"policy_loss_type": "gspo", "clip_eps_low": 0.01, "clip_eps_high": 0.01},
}
NAMES = ("loss", "clip_ratio", "ppo_kl")


def normalisers() -> Any:
    """`openrlhf.utils.loss_utils` of the installed wheel, without its package's __init__."""
    packages.require("openrlhf")
    root = importlib.util.find_spec("openrlhf").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("loss_utils", f"{root}/utils/loss_utils.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def micro_batches() -> list[dict[str, Tensor]]:
    rank, made = distributed.get_rank(), []
    for index in range(ACCUMULATED * STEPS - 1):
        batch = grpo_reference.rows(4, seed=10 * index + rank)
        batch["labels"][:, 14 - 4 * rank :] = -100
        random = torch.Generator().manual_seed(index)
        shape = (4, 13)
        batch["mask"] = batch["labels"][:, 1:] != -100
        batch["advantages"] = torch.randn(4, 1, generator=random).expand(shape)
        batch["old"] = -4.2 + 0.3 * torch.randn(shape, generator=random)
        made.append(batch)
    return made


def train(loss_fn: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """As `ActorPPOTrainer.ppo_train` does: DeepSpeed divides each backward by the accumulation."""
    model = tiny_model("qwen2", num_hidden_layers=1)
    wrapped, logs = DistributedDataParallel(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    windows = normalisers().iter_grad_accum_global_norm(
        micro_batches(), types.SimpleNamespace(), ACCUMULATED, lambda batch: batch["mask"]
    )
    for index, (batch, counts) in enumerate(windows):
        logps, _, mask = grpo_reference.token_logps(wrapped, batch)
        result = loss_fn(logps, batch["old"], batch["advantages"], action_mask=mask, **counts)
        (result[0] / ACCUMULATED).backward()
        values = (float(x) for x in result[:3])
        logs.append(dict(zip(NAMES, values, strict=True)))
        if index % ACCUMULATED:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    return logs, {name: p.detach() for name, p in model.named_parameters()}


def run(name: str) -> Result:
    theirs = packages.load_openrlhf_loss().PolicyLoss(**OPTIONS[name])
    (logs, expected), (ours, found) = train(theirs), train(PolicyLoss.like(theirs))
    tokens = int(sum(batch["mask"].sum() for batch in micro_batches()))
    wrapped, processes = "DistributedDataParallel", distributed.get_world_size()
    return outcome(wrapped, processes, [logs, ours], expected, found, tokens=tokens)


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Result]]]:
    for name in OPTIONS:
        yield f"openrlhf-{name}", partial(run, name)
