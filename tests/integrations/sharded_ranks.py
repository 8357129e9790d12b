"""Test cases for `test_sharded_heads.py` that run on several ranks.

Each case computes the loss and the gradients of a tiny model that is sharded over the ranks.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from grpo_fast import LossConfig
from grpo_fast.integrations.causal_lm import policy_loss
from grpo_fast.integrations.trl import FastGRPOTrainer
from grpo_fast.integrations.trl.head import use_fast_head
from tests.integrations import trl_cases

ROWS, PROMPT, COMPLETION = 4, 5, 6  # a rank's rows, and tokens of each prompt and completion
PACKED = {"forward": "packed", "loss": "single pass"}
Gradients = dict[str, Tensor]
Batch = dict[str, Tensor]
Work = tuple[Any, Any, Tensor]  # (model, wrapped model, loss)


def shard(lm: Any, mesh: DeviceMesh, *groups: Any, kept: bool = False, **options: Any) -> Any:
    """Apply FSDP2 to each layer, to each group, and to the rest of the model, and return the model.

    A group is a module or a list of modules. If `kept`, the weights of the groups stay unsharded
    after the forward pass.
    """
    root = options.pop("root", None)
    for layer in lm.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    for group in groups:
        fully_shard(group, mesh=mesh, reshard_after_forward=not kept, **options)
    return fully_shard(lm, mesh=mesh, reshard_after_forward=root, **options)


def replicated(lm: Any, mesh: DeviceMesh) -> Any:
    """Shard the model over two ranks, and replicate the shards on two other ranks (HSDP)."""
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
# Map from each loss to the wrappers (keys of WRAPS) that are tested with it. "dapo" is computed in
# a single pass. TRL computes "vespo" from our logps. "empty" is "dapo" where the last rank has no
# scored tokens.
COMPUTED = {
    "dapo": list(WRAPS),
    "vespo": ["ddp", "head", "head_kept", "norm_and_head", "tied_group"],
    "empty": ["ddp", "head", "norm_and_head_kept"],
    "fused": ["ddp", "layers_root_resharded", "head", "head_kept", "norm_and_head"],
    "policy_loss": ["ddp", "root", "layers_root_resharded"],
}


def names(world: int) -> list[str]:
    """Return the names of all test cases that can run on `world` ranks."""
    cases = [f"{what}-{wrap}" for what, wraps in COMPUTED.items() for wrap in wraps]
    return [case for case in cases if world == 4 or "replicated" not in case]


def rows(world: int, rank: int | None, empty: bool = False) -> Batch:
    """Return the micro-batch of a rank, or of all ranks as one batch if `rank` is None.

    If `empty`, the last rank has no scored token. "share" is the number of scored tokens of all
    ranks, divided by the number of ranks.
    """
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
    share = mask.sum() / (1 if rank is None else world)
    return batch | {"num_items_in_batch": mask.sum(), "share": share}


def trainer_loss(what: str, wrap: Callable, folder: Path, batch: Batch) -> Work:
    """Compute the loss of `FastGRPOTrainer`, and return (model, wrapped model, loss)."""
    loss_type = "vespo" if what == "vespo" else "dapo"
    trainer = trl_cases.trainer(FastGRPOTrainer, str(folder), folder, loss_type=loss_type)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    model = wrap(trainer.model)
    loss = trainer._compute_loss(model, batch)
    assert trainer.fast_path["forward"] == "packed", trainer.fast_path
    return trainer.model, model, loss


def model_loss(what: str, wrap: Callable, folder: Path, batch: Batch) -> Work:
    """Compute a loss without a trainer, with TRL's fused head or with `policy_loss`.

    Return (model, wrapped model, loss).
    """
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    counts = torch.cat([torch.zeros_like(batch["prompt_ids"]), batch["completion_mask"]], 1)
    inputs = {"input_ids": ids, "labels": ids.masked_fill(counts == 0, -100)}
    share = {"num_items_in_batch": batch["share"]}
    if what == "fused":
        add_fused_lm_head(lm)
        use_fast_head(lm)
    model = wrap(lm)
    if what == "fused":
        return lm, model, model(**inputs, fused_lm_head=True, **share).loss
    config = LossConfig(loss_type="reinforce", aggregation="token_mean_global")
    return lm, model, policy_loss(model, inputs, batch["advantages"], config, **share).loss


def compute(
    case: str, world: int, folder: Path, rank: int | None = None, mesh: DeviceMesh | None = None
) -> tuple[float, Gradients]:
    """Compute the loss of this rank, and the gradients of all parameters, reduced over the ranks.

    If `rank` is None, this process computes the loss and the gradients of the rows of all ranks.
    """
    what, wrap = case.split("-")
    path = folder / ("tied" if wrap.startswith("tied") else "untied")
    work = model_loss if what in ("fused", "policy_loss") else trainer_loss
    apply = (lambda lm: lm) if mesh is None else (lambda lm: WRAPS[wrap](lm, mesh))
    lm, wrapped, loss = work(what, apply, path, rows(world, rank, what == "empty"))
    loss.backward()
    del wrapped  # only now, because DDP's hooks reduce the gradients during the backward pass
    found = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
    return loss.item(), {name: whole(gradient) for name, gradient in found.items()}


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


# transformers' Trainer accepts sharded models since version 5.23.
TRAINS_SHARDED = Version(transformers.__version__) >= Version("5.23")
Result = dict[str, Any]


def compared(loss: float, found: Gradients, expected: float, wanted: Gradients) -> Result:
    """Compare this rank's loss and gradients with the expected loss and gradients.

    Returns:
        Dictionary with the mean loss of all ranks, the expected loss, the relative error of each
        gradient, and the names of missing gradients.
    """
    total = torch.tensor(loss, dtype=torch.float64)
    distributed.all_reduce(total)
    pairs = {name: (found[name], x) for name, x in wanted.items() if name in found}
    return {
        "loss": total.item() / distributed.get_world_size(),
        "expected": expected,
        "off": {n: float((a - b).norm() / b.norm().clamp(min=1e-9)) for n, (a, b) in pairs.items()},
        "missing": sorted(set(wanted) - set(found)),
    }


def whole_runs(world: int, rank: int, folder: Path) -> Iterator[tuple[str, Result]]:
    """Train a model that `from_pretrained` has sharded, and yield its comparison with a DDP run.

    transformers shards the norm and the LM head as one group. FSDP2 then changes the class of the
    head. The trainer must still recognise the head as a linear layer.
    """
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
            is_sharded = trainer.fast_path["rollouts"] == "TRL's: fsdp: the model is sharded"
            assert is_sharded == (config is not None)
            weights = {n: whole(p.detach()) for n, p in trainer.model.named_parameters()}
            ends.append((trainer.state.log_history[-1]["train_loss"], weights))
        yield f"train-{name}", compared(*ends[1], *ends[0])


def references(worlds: list[int], folder: str) -> None:
    """Save tiny models, and the expected loss and gradients of every case.

    One process computes the expected results from the rows of all ranks.
    """
    for name, tied in (("tied", True), ("untied", False)):
        trl_cases.folder(Path(folder, name), tie_word_embeddings=tied)
    cases = [(case, world) for world in worlds for case in names(world)]
    found = {case: compute(*case, Path(folder)) for case in cases}
    torch.save(found, Path(folder, "references.pt"))


def results_of(folder: str) -> dict[str, Result]:
    """Run every case on the current process group, and return the results of this rank."""
    world, rank, place = distributed.get_world_size(), distributed.get_rank(), Path(folder)
    os.environ["LOCAL_RANK"] = str(rank)  # accelerate reads it; torchrun would set it
    mesh = init_device_mesh("cpu", (world,))
    expected = torch.load(place / "references.pt")
    results: dict[str, Result] = {}
    for case in names(world):
        found = compute(case, world, place, rank, mesh)
        results[case] = compared(*found, *expected[case, world])
    if world == 2 and TRAINS_SHARDED:
        results.update(whole_runs(world, rank, place))
    return results
