"""Test that the code of docs/distributed.md gives the gradients of one process on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests import rank_server
from tests.tiny import tiny_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
(CODE,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
LENGTHS = [12, 3, 7, 9, 5, 12, 4, 11]  # tokens of each completion, unequal on the two ranks
PROMPT = 3


def micro_batches(rank: int, ranks: int) -> list[tuple[torch.Tensor, ...]]:
    """Return the completions of one rank in two micro-batches."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(61, (len(LENGTHS), PROMPT + max(LENGTHS)), generator=generator)
    columns = torch.arange(ids.shape[1])
    mask = (columns >= PROMPT) & (columns < PROMPT + torch.tensor(LENGTHS)[:, None])
    advantages = torch.randn(len(LENGTHS), generator=generator)
    share = len(LENGTHS) // ranks
    rows = torch.arange(rank * share, (rank + 1) * share)
    return [(ids[part], mask[part], advantages[part]) for part in rows.chunk(2)]


def gradients(kind: str) -> list[list[float]]:
    """Run the code of the page on this rank, and return the full gradient of each parameter."""
    names: dict[str, Any] = {}
    exec(compile(CODE, PAGE.name, "exec"), names)
    module = names["PolicyLoss"](tiny_model("llama"), names["LossConfig"](loss_type="dapo"))
    policy = module
    if kind == "ddp":
        policy = DistributedDataParallel(module)
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in module.lm.model.layers:
            fully_shard(layer, mesh=mesh)
        policy = fully_shard(module, mesh=mesh)
    is_alone = kind == "one process"
    rank, ranks = (0, 1) if is_alone else (torch.distributed.get_rank(), 2)
    names["step"](policy, micro_batches(rank, ranks))
    full = (p.grad.full_tensor() if kind == "fsdp2" else p.grad for p in module.parameters())
    return [gradient.flatten().tolist() for gradient in full]


def test_two_ranks_have_the_gradients_of_one_process(tmp_path):
    with rank_server.Ranks(tmp_path) as server:
        found = server(2, [gradients, "ddp"], [gradients, "fsdp2"])
    expected = gradients("one process")
    for ours in (gradient for rank in found for gradient in rank):
        for pair in zip(ours, expected, strict=True):
            torch.testing.assert_close(*map(torch.tensor, pair), rtol=1e-4, atol=1e-7)
