"""Tests of models that are sharded over several ranks: loading, memory, and forward passes."""

from typing import Any
from unittest.mock import patch

import torch

from grpo_fast.attention import pack_groups
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.train import optimizer
from grpo_fast.train import ranks as train_ranks
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.models.loading import load_policy
from tests.tiny import FAMILIES, tiny_folder
from tests.train.rank_runs import train


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
