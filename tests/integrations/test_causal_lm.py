"""Tests of `causal_lm` against `grpo_reference`, which computes all logits."""

import functools

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.integrations import causal_lm
from tests import grpo_reference
from tests.tiny import FAMILIES, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_policy_loss_of_every_family(family):
    """Check loss, metrics and gradients of families with softcaps, scales and tied heads."""
    model, reference = tiny_model(family), tiny_model(family, seed=1)
    causal_lm.check_head(model)
    batch, advantages = grpo_reference.rows(4), torch.tensor([1.0, -0.5, 0.3, -2.0])
    with torch.no_grad():
        old, _, mask = grpo_reference.token_logps(model, batch)
        ref = grpo_reference.token_logps(reference, batch)[0]
    old = old + 0.3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    found = causal_lm.policy_logps(reference, batch)[mask]
    torch.testing.assert_close(found, ref[mask], rtol=1e-4, atol=1e-5)
    expected, _, metrics = grpo_reference.grpo(model, batch, advantages, old, ref, beta=0.1)
    expected.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    config = LossConfig(loss_type="grpo", beta=0.1, compute_entropy=True)
    out = causal_lm.policy_loss(model, batch, advantages, config, old_logps=old, ref_logps=ref)
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected.detach(), rtol=1e-4, atol=1e-5)
    for name, value in metrics.items():
        torch.testing.assert_close(out.metrics[name], value, rtol=1e-4, atol=1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        atol = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=atol)


def test_a_head_with_an_unknown_rule_is_refused():
    model = tiny_model("llama", num_hidden_layers=1)
    model.register_forward_hook(lambda module, given, out: setattr(out, "logits", 2 * out.logits))
    with pytest.raises(ValueError, match="expected logits from its last hidden states"):
        causal_lm.check_head(model)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="expected torch.nn.Linear .*, got Sequential"):
        causal_lm.head_of(model)


def louder(module, *args, **kwargs):
    return 2 * torch.nn.functional.linear(args[0], module.weight)


CHANGES = {
    "hook": lambda head: head.register_forward_hook(lambda module, given, out: 2 * out),
    "pre-hook": lambda head: head.register_forward_pre_hook(lambda module, given: 2 * given[0]),
    "forward": lambda head: setattr(head, "forward", functools.partial(louder, head)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_heads_logits_is_refused(change):
    model, batch = tiny_model("llama", num_hidden_layers=1), grpo_reference.rows(2)
    CHANGES[change](model.lm_head)
    with pytest.raises(ValueError, match="expected logits from its last hidden states"):
        causal_lm.policy_loss(model, batch, torch.ones(2), LossConfig())
    with pytest.raises(ValueError, match="expected logits from its last hidden states"):
        causal_lm.policy_logps(model, batch)


def test_a_hook_that_only_reads_is_allowed():
    model, batch, seen = tiny_model("llama", num_hidden_layers=1), grpo_reference.rows(2), []
    expected = causal_lm.policy_logps(model, batch)
    model.lm_head.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    assert torch.equal(causal_lm.policy_logps(model, batch), expected) and seen


def test_batches_models_and_configs_that_are_none():
    model, batch = tiny_model("llama", num_hidden_layers=1), grpo_reference.rows(2)
    no_labels = {"input_ids": batch["input_ids"]}
    listed = {**batch, "labels": batch["labels"].tolist()}
    for wrong, said in (
        (no_labels, "labels .* got NoneType"),
        (listed, "labels .* got list"),
        ([batch], "input_ids .* got NoneType"),
        ({**batch, "input_ids": batch["input_ids"][0]}, "input_ids .* got shape"),
    ):
        with pytest.raises(ValueError, match=f"batch: expected a tensor {said}"):
            causal_lm.policy_logps(model, wrong)
    for wrong, name in ((torch.nn.Linear(2, 3), "Linear"), ([model], "list")):
        with pytest.raises(ValueError, match=f"model: expected .* causal LM, got {name}"):
            causal_lm.policy_loss(wrong, batch, torch.ones(2), LossConfig())
    with pytest.raises(ValueError, match="config: expected a LossConfig, got dict"):
        causal_lm.policy_loss(model, batch, torch.ones(2), {})


def test_the_model_inside_wrappers():
    model = tiny_model("qwen2", num_hidden_layers=1)
    wrapper = torch.nn.Module()
    wrapper.module = model
    assert causal_lm.unwrapped(wrapper) is model
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    assert causal_lm.unwrapped(adapted) is model
    batch = grpo_reference.rows(2)
    causal_lm.policy_loss(adapted, batch, torch.tensor([1.0, -1.0]), LossConfig()).loss.backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name)


def test_models_that_fsdp2_shards(one_process):
    """Check that `check_head` leaves an FSDP2 model sharded.

    A model whose head is sharded in a separate group must raise an error. test_sharded_heads.py
    tests the gradients.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh, model = init_device_mesh("cpu", (1,)), tiny_model("llama", num_hidden_layers=1)
    causal_lm.check_head(fully_shard(model, mesh=mesh))
    # `check_head` gathers the parameters and must shard them again. Otherwise an optimizer would
    # update unsharded parameters, which FSDP2 frees, and the updates would be lost.
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model = tiny_model("llama", num_hidden_layers=1)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match="lm_head: expected .* got FSDPLinear .*with FSDP2"):
        causal_lm.policy_loss(model, grpo_reference.rows(2), torch.ones(2), LossConfig())
