"""Test shared prompts against one forward pass per completion: LoRA, bf16 and the README.

The logps of all completions and the gradients of all parameters must be equal. test_trees.py tests
all families in fp64.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from grpo_fast import LossConfig, attention, grpo_loss
from grpo_fast.attention import pack_groups, register
from tests.tiny import tiny_model

# Each entry is a group: the length of a prompt, and the lengths of its completions. The shortest
# length is one token. A group with a single completion has nothing to share.
GROUPS = ((9, (5, 1, 7, 2)), (3, (1, 1)), (12, (4,)), (1, (3, 2)), (20, (6, 6, 14)))


@pytest.fixture
def everything_in_fp64(monkeypatch):
    """Make transformers compute norms, RoPE and softmax in fp64 instead of fp32.

    Otherwise the results could not be equal up to fp64 rounding.
    """
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def random_groups():
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(2, 61, (n,), generator=generator).tolist()

    return [(ids(prompt), [ids(n) for n in completions]) for prompt, completions in GROUPS]


def samples_of(groups):
    """Return the completions of all groups as samples (ids, trained) for `pack_tree`."""
    return [(p + c, [0] * len(p) + [1] * len(c)) for p, completions in groups for c in completions]


def by_sample(model, samples):
    """Return the logps (R,) of the trained tokens from a separate forward pass for each sample."""
    model.set_attn_implementation("eager")
    logps = []
    for ids, trained in samples:
        ids, at = torch.tensor(ids), torch.tensor(trained).nonzero()[:, 0]
        if len(at):
            logits = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            logps.append(logits[at - 1].gather(1, ids[at][:, None])[:, 0])
    return torch.cat(logps)


def by_pack(model, pack):
    """Return the logps (R,) of the trained tokens from one packed row."""
    model.set_attn_implementation(register())
    logits = model(**pack.model_inputs).logits[0].log_softmax(-1)
    return logits[pack.predicting].gather(1, pack.target_ids[:, None])[:, 0]


def gradients(model, loss):
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, [*trained.values()], materialize_grads=True)
    return dict(zip(trained, found, strict=True))


def assert_close(got, expected, bar=1e-12):
    """Check that differences are small relative to the largest entry of each tensor.

    The tolerance is `bar` times the largest entry, or `bar` if this entry is below 1.
    """
    for name, value in expected.items():
        error = float((got[name] - value).detach().abs().max())
        assert error <= bar * max(1.0, float(value.detach().abs().max())), (name, error)


def test_lora(everything_in_fp64):
    """Check that shared prompts give the right gradients of a LoRA adapter.

    The adapter is only in q_proj, so k and v of the first layer do not require grad.
    """
    import peft

    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    model, groups = peft.get_peft_model(tiny_model("llama").double(), config), random_groups()
    expected, got = by_sample(model, samples_of(groups)), by_pack(model, pack_groups(groups))
    assert_close(gradients(model, got.sum()), gradients(model, expected.sum()))


def test_fp32_and_autocast_stay_within_rounding():
    model, groups = tiny_model("gemma2"), random_groups()
    samples, pack = samples_of(groups), pack_groups(groups)
    expected = by_sample(model, samples)
    torch.testing.assert_close(by_pack(model, pack), expected, rtol=0, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        by_itself, got = by_sample(model, samples), by_pack(model, pack)
    ours, theirs = ((x.float() - expected).norm() for x in (got, by_itself))
    assert ours <= 1.5 * theirs


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "granite"])
def test_the_readme_runs_as_it_stands(family):
    """Check that the README's example gives the right logps and gradients.

    The three families cover a plain head, a head with a softcap, and a head with a logit scale.
    """
    text = (Path(attention.__file__).parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 3 and len([line for line in blocks[0].splitlines() if line.strip()]) <= 15
    model, groups = tiny_model(family), random_groups()
    advantages = torch.cat([torch.arange(len(completions)) - 1.0 for _, completions in groups])
    names = {"model": model, "groups": groups, "advantages": advantages}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    logps = by_sample(model, samples_of(groups))
    found = torch.cat([of_one for of_group in names["logps"] for of_one in of_group])
    torch.testing.assert_close(found, logps.detach(), rtol=0, atol=2e-5)
    lengths = torch.tensor([0] + [len(c) for _, cs in groups for c in cs])
    cu_seqlens = lengths.cumsum(0).int()
    loss = grpo_loss(logps, advantages, LossConfig(), cu_seqlens=cu_seqlens).loss
    assert_close(got, gradients(model, loss), bar=1e-5)
    assert names["pack"].layout.total <= 64
