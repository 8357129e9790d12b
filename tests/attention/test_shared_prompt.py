"""Shared prompts against one completion at a time: logits and every parameter's gradient in fp64,
family by family.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from grpo_fast import attention
from grpo_fast.attention import Share, pack_groups, plan_packs, register
from grpo_fast.train.models.memory_options import enable_checkpointing
from tests.tiny import FAMILIES, tiny_model

# Ragged completions from one token, several groups in a row, groups with nothing to share.
GROUPS = ((9, (5, 1, 7, 2)), (3, (1, 1)), (12, (4,)), (1, (3, 2)), (20, (6, 6, 14)))
MODELS = {
    **FAMILIES,
    "gemma3_text": {  # both layer types with their own RoPE, q and k norms
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "smollm3": {
        "no_rope_layers": [1, 0],
        "use_sliding_window": False,
    },  # every other layer without RoPE
    "phi3": {},  # fused projections
    # latent attention: values shorter than keys; one dense layer, one dropless mixture of experts
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "experts_implementation": "eager",
    },
    "olmo2": {},  # norms behind the sublayers
    "qwen3_moe": {  # dropless: a token's experts depend on that token alone
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 16,
        "experts_implementation": "eager",  # torch's grouped product has no fp64
    },
}


@pytest.fixture
def everything_in_fp64(monkeypatch):
    """transformers takes norms, RoPE and softmax in fp32 whatever the weights; in fp64 equality can
    be seen.
    """
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def random_groups(sizes=GROUPS, vocab_size=61):
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(2, vocab_size, (n,), generator=generator)

    return [(ids(prompt), [ids(n) for n in completions]) for prompt, completions in sizes]


def one_by_one(model, groups):
    """(R, V) logits that predict the completion tokens, from a forward pass for each completion."""
    model.set_attn_implementation("eager")
    logits = []
    for prompt, completions in groups:
        for ids in completions:
            sequence = torch.cat([prompt, ids[:-1]])
            logits.append(
                model(input_ids=sequence[None], use_cache=False).logits[0, len(prompt) - 1 :]
            )
    return torch.cat(logits)


def packed(model, groups, *, shared=True):
    model.set_attn_implementation(register())
    pack = pack_groups(groups, shared=shared)
    return model(**pack.model_inputs).logits[0].index_select(0, pack.predicting)


def gradients(model, logits, weight=None):
    if weight is None:
        weight = torch.randn(
            logits.shape, generator=torch.Generator().manual_seed(2), dtype=logits.dtype
        )
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return dict(
        zip(
            parameters,
            torch.autograd.grad((logits * weight).sum(), list(parameters.values())),
            strict=True,
        )
    )


def assert_close(got, expected, bar=1e-12):
    """Relative to the largest entry, so that one bar holds for logits and for gradients of any
    size.
    """
    for name, value in expected.items():
        error = float((got[name] - value).detach().abs().max())
        assert error <= bar * max(1.0, float(value.detach().abs().max())), (name, error)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "packed"])
@pytest.mark.parametrize("family", MODELS)
def test_equals_one_by_one(everything_in_fp64, family, shared):
    model, groups = tiny_model(family, **MODELS[family]).double(), random_groups()
    expected, got = one_by_one(model, groups), packed(model, groups, shared=shared)
    assert expected.dtype == got.dtype == torch.float64
    assert_close({"logits": got}, {"logits": expected})
    assert_close(gradients(model, got), gradients(model, expected))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "packed"])
def test_groups_split_over_packs(everything_in_fp64, family, shared):
    """A budget below the largest group: the logits, and the sum of the packs' gradients, are those
    of one pack.
    """
    model, groups = tiny_model(family).double(), random_groups()
    whole = pack_groups(groups)
    expected = packed(model, groups)
    weight = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(2), dtype=expected.dtype
    )
    expected_gradients = gradients(model, expected, weight)
    plan = plan_packs([(len(p), [len(c) for c in cs]) for p, cs in groups], 30, shared=shared)
    assert len(plan) > 2
    if shared:
        assert any(
            share == Share(4, part)
            for shares in plan
            for share in shares
            for part in ((0, 1), (0,), (2,))
        )
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for shares in plan:
        got = packed(model, [share.of(groups) for share in shares], shared=shared)
        completions = [
            list(whole.split_groups(torch.arange(len(expected)))[s.group])[i]
            for s in shares
            for i in s.completions
        ]
        rows = torch.cat(completions)
        assert_close({"logits": got}, {"logits": expected[rows]})
        for name, gradient in gradients(model, got, weight[rows]).items():
            total[name] += gradient
    assert_close(total, expected_gradients)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradient_checkpointing_changes_no_bit(family):
    model, groups = tiny_model(family).train(), random_groups()
    plain = gradients(model, packed(model, groups))
    enable_checkpointing(model)
    checkpointed = gradients(model, packed(model, groups))
    assert all(torch.equal(gradient, checkpointed[name]) for name, gradient in plain.items())


def test_lora(everything_in_fp64):
    """Only adapters train: the trunk is frozen, so some of q, k and v ask for no gradient."""
    import peft

    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    model, groups = peft.get_peft_model(tiny_model("llama").double(), config), random_groups()
    expected, got = one_by_one(model, groups), packed(model, groups)
    assert_close(gradients(model, got), gradients(model, expected))


def test_fp32_and_autocast_stay_within_rounding():
    model, groups = tiny_model("gemma2"), random_groups()
    expected = one_by_one(model, groups)
    torch.testing.assert_close(packed(model, groups), expected, rtol=0, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        by_itself, got = one_by_one(model, groups), packed(model, groups)
    ours, theirs = ((x.float() - expected).norm() for x in (got, by_itself))
    assert ours <= 1.5 * theirs


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "granite"])
def test_the_readme_runs_as_it_stands(family):
    """The dozen lines for other trainers, and what they promise: a plain head, a softcap and a
    scale.
    """
    text = (Path(attention.__file__).parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 3 and len([line for line in blocks[0].splitlines() if line.strip()]) <= 15
    model, groups = tiny_model(family), random_groups()
    advantages = [torch.arange(len(completions)) - 1.0 for _, completions in groups]
    names = {"model": model, "groups": groups, "advantages": advantages}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    targets = torch.cat([c for _, cs in groups for c in cs])
    logps = one_by_one(model, groups).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(names["logps"], logps, rtol=0, atol=2e-5)
    weight = torch.cat(advantages).repeat_interleave(
        torch.tensor([len(c) for _, cs in groups for c in cs])
    )
    model.zero_grad()
    (-weight * logps).sum().backward()
    assert_close(got, {name: p.grad for name, p in model.named_parameters()}, bar=1e-5)
    assert names["pack"].layout.total <= 64
