"""Ranks of a gloo world that train with sharded heads, compared with one process on all rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from grpo_fast import LossConfig, TeacherHead, linear_divergence, linear_grpo_loss, linear_logps
from grpo_fast.integrations.trl import FastGRPOTrainer
from tests.integrations import trl_cases
from tests.integrations.sharded_models import PACKED, Gradients, compute, names, whole

# The Trainer of transformers takes a model that transformers sharded.
TRAINS_SHARDED = Version(transformers.__version__) >= Version("5.23")
VOCABULARY, WIDTH, TOKENS = 61, 12, 7  # uneven shards of rows, even ones of columns
PLACEMENTS = {
    "rows": (Shard(0), Shard(0)),
    "columns": (Shard(1), Replicate()),
    "copies": (Replicate(), None),
}
FUNCTIONS = "linear_logps", "linear_grpo_loss", "linear_divergence"
PUBLIC = [f"{name}-{k}" for name in FUNCTIONS for k in PLACEMENTS]
Result = dict[str, Any]


def compared(loss: float, found: Gradients, expected: float, wanted: Gradients) -> Result:
    """The loss averaged over ranks beside the expected one, and how far each gradient is off."""
    total = torch.tensor(loss, dtype=torch.float64)
    distributed.all_reduce(total)
    pairs = {name: (found[name], x) for name, x in wanted.items() if name in found}
    return {
        "loss": total.item() / distributed.get_world_size(),
        "expected": expected,
        "off": {n: float((a - b).norm() / b.norm().clamp(min=1e-9)) for n, (a, b) in pairs.items()},
        "missing": sorted(set(wanted) - set(found)),
    }


def public_functions(world: int, rank: int, mesh: DeviceMesh) -> Iterator[tuple[str, Result]]:
    """The public functions on DTensors; plain torch on the rows of all ranks."""
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(world, TOKENS, WIDTH, generator=random)
    weight = torch.randn(VOCABULARY, WIDTH, generator=random)
    bias = torch.randn(VOCABULARY, generator=random)
    targets = torch.randint(0, VOCABULARY, (world, TOKENS), generator=random)
    advantages = torch.randn(world, TOKENS, generator=random)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    other = [torch.randn(*x.shape, generator=random) for x in leaves]
    lp, lq = ((h @ w.T + b).log_softmax(-1) for h, w, b in (leaves, other))
    policy = -(advantages * lp.gather(-1, targets[..., None])[..., 0]).sum() / world
    divergence = (lp.exp() * (lp - lq)).sum() / world
    for case in PUBLIC:
        name, kind = case.split("-")
        expected = divergence if name == "linear_divergence" else policy
        d_hidden, *d_head = torch.autograd.grad(expected, leaves, retain_graph=True)
        wanted = dict(zip(("hidden", "weight", "bias"), (d_hidden[rank], *d_head), strict=True))
        h = hidden[rank].clone().requires_grad_()
        (w, b), frozen = (
            [
                nn.Parameter(x.clone() if how is None else distribute_tensor(x, mesh, [how]))
                for x, how in zip(head, PLACEMENTS[kind], strict=True)
            ]
            for head in ((weight, bias), other[1:])
        )
        if name == "linear_divergence":
            teacher = TeacherHead(other[0][rank], *(x.requires_grad_(False) for x in frozen))
            ones = torch.ones(TOKENS)
            loss = linear_divergence(h, w, teacher, "reverse_kl", bias=b, weights=ones).loss
        else:
            loss = head_loss(name, h, w, b, targets[rank], advantages[rank])
        loss.backward()
        if PLACEMENTS[kind][1] is None:  # who passes a plain tensor reduces its gradient
            distributed.all_reduce(b.grad)
            b.grad /= world
        found = {"hidden": h.grad / world, "weight": whole(w.grad), "bias": whole(b.grad)}
        result = compared(loss.item(), found, expected.item(), wanted)
        placed = [getattr(x.grad, "placements", 0) == getattr(x, "placements", 0) for x in (w, b)]
        yield case, {**result, "placed": all(placed)}


def head_loss(name: str, h: Tensor, w: Tensor, b: Tensor, ids: Tensor, advantages: Tensor) -> Any:
    if name == "linear_logps":
        return -(advantages * linear_logps(h, w, ids, bias=b)).sum()
    config, everything = LossConfig(loss_type="reinforce"), torch.tensor([0, TOKENS])
    options = {"bias": b, "cu_seqlens": everything, "num_items_in_batch": 1.0}
    return linear_grpo_loss(h, w, ids, advantages, config, **options).loss


def whole_runs(world: int, rank: int, folder: Path) -> Iterator[tuple[str, Result]]:
    """`trainer.train()`: the model as transformers shards it, beside one under DDP."""
    from transformers.distributed import DistributedConfig

    for name in ("untied", "tied"):
        ends = []
        for config in (None, DistributedConfig(fsdp_size=world)):
            trainer = trl_cases.trainer(
                FastGRPOTrainer, str(folder / name), folder, num_iterations=2, beta=0.02,
                max_steps=3, loading={"distributed_config": config},
                completions=trl_cases.Injected(200, seed=rank),
            )  # fmt: skip
            trainer.train()
            assert trainer.fast_path.items() >= PACKED.items(), trainer.fast_path
            weights = {n: whole(p.detach()) for n, p in trainer.model.named_parameters()}
            ends.append((trainer.state.log_history[-1]["train_loss"], weights))
        yield f"train-{name}", compared(*ends[1], *ends[0])


# -------------------------------------------------------------------------------------- jobs
def references(worlds: list[int], folder: str) -> None:
    """Models on disk, and what one process computes of every world's rows."""
    for name, tied in (("tied", True), ("untied", False)):
        trl_cases.folder(Path(folder, name), tie_word_embeddings=tied)
    cases = [(case, world) for world in worlds for case in names(world)]
    found = {case: compute(*case, Path(folder)) for case in cases}
    torch.save(found, Path(folder, "references.pt"))


def results_of(folder: str) -> dict[str, Result]:
    """Every case of this world, on each of its ranks."""
    world, rank, place = distributed.get_world_size(), distributed.get_rank(), Path(folder)
    os.environ["LOCAL_RANK"] = str(rank)  # accelerate looks for it, as torchrun would set it
    mesh = init_device_mesh("cpu", (world,))
    expected = torch.load(place / "references.pt")
    results: dict[str, Result] = {}
    for case in names(world):
        found = compute(case, world, place, rank, mesh)
        results[case] = compared(*found, *expected[case, world])
    results.update(public_functions(world, rank, mesh))
    if world == 2 and TRAINS_SHARDED:
        results.update(whole_runs(world, rank, place))
    return results
