"""Losses and gradients of tiny models whose heads are sharded in every way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from grpo_fast import LossConfig
from grpo_fast.integrations import trl as fast
from grpo_fast.integrations.causal_lm import policy_loss
from grpo_fast.integrations.trl.head import use_fast_head
from tests.integrations import trl_cases

ROWS, PROMPT, COMPLETION = 4, 5, 6  # of one rank's micro-batch
PACKED = {"forward": "packed", "loss": "single pass"}
Gradients = dict[str, Tensor]
Batch = dict[str, Tensor]
Work = tuple[Any, Any, Tensor]  # model, wrapped model, loss


# ------------------------------------------------------------------------------------- wraps
def shard(lm: Any, mesh: DeviceMesh, *groups: Any, kept: bool = False, **options: Any) -> Any:
    """FSDP2 around each layer, each of `groups` (a module, or a list of them) and the rest."""
    root = options.pop("root", None)
    for layer in lm.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    for group in groups:
        fully_shard(group, mesh=mesh, reshard_after_forward=not kept, **options)
    return fully_shard(lm, mesh=mesh, reshard_after_forward=root, **options)


def replicated(lm: Any, mesh: DeviceMesh) -> Any:
    """Shards over two ranks, copied to the other two."""
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return shard(lm, two, lm.lm_head)


def pair(lm: Any) -> list[nn.Module]:
    return [lm.model.norm, lm.lm_head]


def ties(lm: Any) -> list[nn.Module]:
    return [lm.model.embed_tokens, lm.lm_head]


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WRAPS: dict[str, Callable[[Any, DeviceMesh], Any]] = {
    "ddp": lambda lm, mesh: nn.parallel.DistributedDataParallel(lm),
    "root": lambda lm, mesh: fully_shard(lm, mesh=mesh),
    "layers": shard,
    "layers_root_resharded": lambda lm, mesh: shard(lm, mesh, root=True),
    "head": lambda lm, mesh: shard(lm, mesh, lm.lm_head),
    "head_kept": lambda lm, mesh: shard(lm, mesh, lm.lm_head, kept=True),
    "head_root_resharded": lambda lm, mesh: shard(lm, mesh, lm.lm_head, root=True),
    "norm_and_head": lambda lm, mesh: shard(lm, mesh, pair(lm)),
    "norm_and_head_kept": lambda lm, mesh: shard(lm, mesh, pair(lm), kept=True),
    "tied_root": shard,
    "tied_group": lambda lm, mesh: shard(lm, mesh, ties(lm)),
    "tied_group_kept": lambda lm, mesh: shard(lm, mesh, ties(lm), kept=True),
    "head_bf16": lambda lm, mesh: shard(lm, mesh, lm.lm_head, mp_policy=BF16),
    "replicated": replicated,
}
# What is computed → its wraps. "dapo" is the single pass, "vespo" TRL's objective on our logps,
# "empty" a single pass whose last rank has no token that counts.
COMPUTED = {
    "dapo": list(WRAPS),
    "vespo": ["ddp", "head", "head_kept", "norm_and_head", "tied_group"],
    "empty": ["ddp", "head", "norm_and_head_kept"],
    "fused": ["layers_root_resharded", "head", "head_kept", "norm_and_head"],
    "policy_loss": ["root", "layers_root_resharded"],
    "distill": ["ddp", "layers", "layers_root_resharded", "head", "head_kept", "norm_and_head"],
}


def names(world: int) -> list[str]:
    """The cases of a world of that many ranks."""
    cases = [f"{what}-{wrap}" for what, wraps in COMPUTED.items() for wrap in wraps]
    return [case for case in cases if world == 4 or "replicated" not in case]


# ------------------------------------------------------------------------------------- work
def rows(world: int, rank: int | None, empty: bool = False) -> Batch:
    """A generation batch, or with a rank its micro-batch."""
    random = torch.Generator().manual_seed(5)
    count = ROWS * world
    mask = torch.ones(count, COMPLETION, dtype=torch.int64)
    mask[1, 3:] = mask[3] = 0
    mask[-1, 2:] = 0
    mask[-ROWS:] *= not empty
    prompts = torch.randint(2, 200, (count // 2, PROMPT), generator=random)
    batch = {
        "prompt_ids": prompts.repeat_interleave(2, 0),
        "completion_ids": torch.randint(2, 200, (count, COMPLETION), generator=random),
        "completion_mask": mask,
        "advantages": torch.randn(count, generator=random),
        "old_per_token_logps": -5 - torch.rand(count, COMPLETION, generator=random),
    }
    mine = slice(None) if rank is None else slice(ROWS * rank, ROWS * (rank + 1))
    batch = {name: value[mine] for name, value in batch.items()}
    batch["prompt_mask"] = torch.ones_like(batch["prompt_ids"])
    return batch | {"num_items_in_batch": mask.sum()}


def trainer_loss(what: str, wrap: Callable, folder: Path, batch: Batch) -> Work:
    """Of `FastGRPOTrainer`."""
    loss_type = "vespo" if what == "vespo" else "dapo"
    trainer = trl_cases.trainer(fast.FastGRPOTrainer, str(folder), folder, loss_type=loss_type)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    model = wrap(trainer.model)
    loss = trainer._compute_loss(model, batch)
    assert trainer.fast_path["forward"] == "packed", trainer.fast_path
    return trainer.model, model, loss


def distillation_loss(what: str, wrap: Callable, folder: Path, batch: Batch) -> Work:
    """Of TRL's DistillationTrainer; the teacher is wrapped as the student is."""
    trainer = trl_cases.distillation((str(folder), str(folder)), folder, beta=0.3)
    for parameter in trainer.teacher_model.parameters():
        parameter.data *= 1.5
    use_fast_head(trainer)
    student, trainer.model.training = trainer.model, True
    model, trainer.teacher_model = wrap(student), wrap(trainer.teacher_model)
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    run, share = trainer._compute_loss, batch["num_items_in_batch"] / ranks
    loss, *_ = trainer._forward_redirection(model, student, run, student, batch, share)
    return student, model, loss


def model_loss(what: str, wrap: Callable, folder: Path, batch: Batch) -> Work:
    """Of TRL's fused head without a trainer, and of `policy_loss`."""
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    counts = torch.cat([torch.zeros_like(batch["prompt_ids"]), batch["completion_mask"]], 1)
    inputs = {"input_ids": ids, "labels": ids.masked_fill(counts == 0, -100)}
    ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    share = {"num_items_in_batch": batch["num_items_in_batch"] / ranks}
    if what == "fused":
        add_fused_lm_head(lm)
        use_fast_head(lm)
        model = wrap(lm)
        return lm, model, model(**inputs, fused_lm_head=True, **share).loss
    config = LossConfig(loss_type="reinforce", aggregation="token_mean_global")
    model = wrap(lm)
    return lm, model, policy_loss(model, inputs, batch["advantages"], config, **share).loss


def compute(
    case: str, world: int, folder: Path, rank: int | None = None, mesh: DeviceMesh | None = None
) -> tuple[float, Gradients]:
    """Loss of this rank and reduced gradients; without a rank those of one process on all rows."""
    what, wrap = case.split("-")
    path = folder / ("tied" if wrap.startswith("tied") else "untied")
    work = model_loss if what in ("fused", "policy_loss") else trainer_loss
    work = distillation_loss if what == "distill" else work
    apply = (lambda lm: lm) if mesh is None else (lambda lm: WRAPS[wrap](lm, mesh))
    lm, wrapped, loss = work(what, apply, path, rows(world, rank, what == "empty"))
    loss.backward()
    del wrapped  # DDP reduces only as long as it lives
    found = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
    return loss.item(), {name: whole(gradient) for name, gradient in found.items()}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()
