"""Tests of models that are sharded over several ranks: loading, memory, and forward passes."""

import resource
from typing import Any
from unittest.mock import patch

import torch

from grpo_fast.attention import pack_groups
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.train import optimizer
from grpo_fast.train import ranks as train_ranks
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.policy import Policy
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
            policy = load_policy(config, empty=not train_ranks.is_main())
            assert policy.is_empty != train_ranks.is_main()
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


def test_what_rank_0_reads_is_what_all_have(ranks, tmp_path):
    """Check that a sharded model has the same weights, buffers and adapters as an unsharded model.

    Only rank 0 reads the files of the sharded model. Tied weights must stay tied.
    """
    folders = [str(tiny_folder(tmp_path / family, family)) for family in FAMILIES]
    for [apart] in ranks(2, [load_shards, *folders]):
        assert apart == []


def sharded_policy(fields: dict[str, Any], *, empty: bool) -> Policy:
    """Build and shard a Llama model with random weights.

    `fields` are the fields of the model's configuration. If `empty` is True, the model is on the
    meta device until it is sharded.
    """
    config = ModelConfig(config={"model_type": "llama", **fields}, tokenizer="symbols",
                         device="cpu")  # fmt: skip
    policy = load_policy(config, build_symbol_tokenizer(list("0123456789")), empty=empty)
    train_ranks.shard_all([policy], policy.device, None)
    return policy


def load_other(size: int) -> str:
    """Shard a model that is wider on rank 1 by `size`. Return the error message, or ""."""
    fields = {"hidden_size": 16 + size * train_ranks.rank(), "intermediate_size": 16,
              "num_hidden_layers": 1, "num_attention_heads": 2,
              "tie_word_embeddings": False}  # fmt: skip
    try:
        sharded_policy(fields, empty=not train_ranks.is_main())
    except (ValueError, RuntimeError) as error:  # rank 0 loses the connection
        return str(error)
    return ""


def test_a_model_that_differs_between_ranks_is_refused(ranks):
    _, [found] = ranks(2, [load_other, 16])
    assert "model: expected the parameters of rank 0's model" in found


def load_large(megabytes: int) -> Any:
    """Return how much the memory of this rank grows while a model is loaded and sharded.

    Returns:
        A dictionary with the growth (`grown`) and the size of the model (`size`), in MiB.
    """
    fields = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
              "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    peaks = []
    # Load a small model first, so that the measured growth excludes the memory of imports.
    for layers in (1, round(megabytes / 8.5)):
        policy = sharded_policy({**fields, "num_hidden_layers": layers},
                                empty=not train_ranks.is_main())  # fmt: skip
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    size = sum(p.numel() * p.element_size() for p in policy.lm.parameters()) / 2**20
    return {"grown": peaks[1] - peaks[0], "size": size}


def test_only_rank_0_has_room_for_the_whole_model(ranks):
    found = [x[0] for x in ranks(4, [load_large, 200])]
    assert all(180 < x["size"] < 240 for x in found)
    assert found[0]["grown"] > 180, found
    assert all(x["grown"] < 0.45 * found[0]["grown"] for x in found[1:]), found


def pass_unevenly() -> Any:
    """Train a sharded model after a rollout in which the forward passes of the ranks differ.

    Returns:
        Two bools. The first is True if the layers are sharded again after the forward pass of the
        training step. The second is True if all parameters have gradients.
    """
    fields = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3,
              "num_attention_heads": 2}  # fmt: skip
    policy = sharded_policy(fields, empty=False)
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
