"""Test the comparisons of a faster computation with the model's own computation.

The tests check the limits that a comparison reaches, its random weights, and the errors that it
finds.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from grpo_fast.attention import agree
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout.own import engine as hf
from grpo_fast.train.policy import Policy, self_check
from tests.attention.families import family_model
from tests.tiny import tiny_policy

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 96
}  # fmt: skip
NESTED = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({"max_position_embeddings": 131072, "hidden_size": 64, "vocab_size": 999}, [131072]),
        ({"sliding_window": 4096, "max_window_layers": 28}, [28, 4096]),
        ({"sliding_window": None, "attention_chunk_size": 8192, "floor_scale": 8192.0}, [8192]),
        ({"rope_parameters": YARN}, [96]),
        ({"rope_parameters": NESTED, "max_seq_len": 2048}, [96, 2048]),
        ({"layers": [{"sliding_window": 7}, {"sliding_window": 9}]}, [7, 9]),
        ({"max_position_embeddings": 10**30}, []),  # no limit
        ({"max_position_embeddings": -1, "sliding_window": 0, "use_sliding_window": True}, []),
        ({"max_position_embeddings": "long", "window": float("inf")}, []),
    ],
    ids=str,
)
def test_limits_of(fields, limits):
    assert agree.limits_of(SimpleNamespace(**fields)) == limits


@pytest.mark.parametrize("family", ["llama", "ministral3", "gpt2", "gemma3_text", "phi3"])
def test_every_limit_is_passed_in_a_prompt_and_in_a_completion(family):
    model = family_model(family, num_hidden_layers=1)
    starts = agree.starts_of(model, 256)
    end = 256 if family == "gpt2" else 1 << 30
    for limit in agree.limits_of(model.config):
        last = (agree.PROMPT, agree.LENGTH)
        passing = [[start < limit < start + n - 1 for start in starts] for n in last]
        assert all(map(any, passing)) or limit + 3 > end, limit
        after = [s for s in starts if s < limit and s + agree.PROMPT >= limit and s + 9 > limit]
        assert after or limit + 3 > end
    assert max(starts) + agree.LENGTH <= end and 0 in starts
    if family != "gpt2":
        assert max(starts) >= 1 << 17


@pytest.mark.parametrize(
    ("family", "bound", "most"),
    [("gpt2", 256, 256), ("opt", 256, 256), ("ctrl", 256, 256), ("gpt_neo", 256, 256),
     # In Whisper's decoder and in MPT, the field with the table's size has an unusual name.
     ("whisper", float("inf"), 448), ("mpt", float("inf"), 256)],
)  # fmt: skip
def test_tables_of_positions_are_not_left(family, bound, most):
    """Check that a comparison never indexes past the position table, even under an unusual name."""
    starts = agree.starts_of(family_model(family), bound)
    assert starts and max(starts) + agree.LENGTH <= most


def test_random_weights_are_put_back_after_an_error():
    model = family_model("qwen2", num_hidden_layers=3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    places = [p.data_ptr() for p in model.parameters()]
    state = torch.get_rng_state()
    with pytest.raises(KeyError), agree.random_weights(model) as are_random:
        assert are_random
        layers = [dict(layer.named_parameters()) for layer in model.model.layers]
        for name, p in layers[0].items():
            # All layers must share the memory of one layer, so that memory does not grow with
            # depth.
            assert layers[2][name].data_ptr() == p.data_ptr()
            assert not torch.equal(p, before[f"model.layers.0.{name}"])
            assert p.isfinite().all() and p.std() > 0.01
        assert not torch.equal(*[layers[0][f"self_attn.{n}_proj.weight"] for n in "kv"])
        raise KeyError
    assert [p.data_ptr() for p in model.parameters()] == places
    assert torch.equal(torch.get_rng_state(), state)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name


@pytest.mark.parametrize("how", ["bfloat16", "meta", "subclass", "empty"])
def test_other_weights_stay(how):
    model = nn.Linear(8, 8)
    if how == "bfloat16":
        model.bfloat16()
    elif how == "meta":
        model.to("meta")
    elif how == "empty":
        model.bias = nn.Parameter(torch.empty(0))
    else:
        model.weight = type("Sharded", (nn.Parameter,), {})(model.weight.data)
    before = model.weight.data
    with agree.random_weights(model) as are_random:
        assert not are_random and model.weight.data_ptr() == before.data_ptr()


def changed_attention(monkeypatch: Any, scale: Any) -> None:
    """Patch Llama's attention so that it first multiplies its input by `scale`.

    `scale` is a function of the attention module, the position ids and the number of tokens.
    """
    attend = modeling_llama.LlamaAttention.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        factor = scale(self, kwargs["position_ids"], hidden_states.shape[1])
        return attend(self, hidden_states * factor, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)


def by_length(module: Any, positions: Any, tokens: int) -> Any:
    """Return a scale that depends on a token's index in the row, like the scale of Llama 4.

    In a packed row this is an error, because the scale should depend on `position_ids`.
    """
    places = torch.arange(tokens)
    return 1 + 0.1 * (places // module.config.floor_scale).log1p()[None, :, None]


def by_largest(module: Any, positions: Any, tokens: int) -> Any:
    """Return one scale for all tokens, which depends on the largest position, as in LongRoPE.

    In a packed row this is an error, because one long sequence changes all other sequences.
    """
    return 1.0 + 0.5 * float(positions.max() >= module.config.original_max_position_embeddings)


def by_position(module: Any, positions: Any, tokens: int) -> Any:
    limit = module.config.original_max_position_embeddings
    return 1 + 0.5 * (positions >= limit)[..., None]


@pytest.mark.parametrize("limit", [10, 50, 8192, 100_000])
@pytest.mark.parametrize("weights", ["random", "default", "zero"])
@pytest.mark.parametrize("scale", [by_length, by_largest])
def test_a_rule_that_packed_rows_break_is_found(scale, weights, limit, monkeypatch):
    changed_attention(monkeypatch, scale)
    policy = tiny_policy(floor_scale=limit, original_max_position_embeddings=limit)
    std = {"default": 0.02, "zero": 0.0}.get(weights)
    for parameter in policy.lm.parameters() if std is not None else ():
        nn.init.normal_(parameter, std=std)
    assert self_check(policy) <= 1e-4
    assert "differs from its own logits" in policy.unshared
    with policy.generation():
        assert "differs by" in hf.difference_of(policy, hf.LOOP)


@pytest.mark.parametrize("limit", [10, 8192])
def test_a_rule_that_follows_positions_is_right(limit, monkeypatch):
    changed_attention(monkeypatch, by_position)
    policy = tiny_policy(original_max_position_embeddings=limit)
    assert self_check(policy) < 1e-4
    with policy.generation():
        assert hf.difference_of(policy, hf.LOOP) is None


@pytest.mark.parametrize("std", [0.0, 0.002])
@pytest.mark.parametrize("family", ["falcon", "gpt_neo", "mpt", "openai-gpt"])
def test_small_weights_do_not_hide_a_family_that_cannot_be_packed(family, std):
    model = family_model(family)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    policy = Policy(model, build_symbol_tokenizer(["0", "1"]))
    self_check(policy)
    assert "packed attention" in policy.unshared


def test_random_weights_in_half_precision_do_not_refuse_a_family():
    for dtype in (torch.bfloat16, torch.float16):
        policy = tiny_policy("qwen3")
        policy.lm.to(dtype)
        assert self_check(policy) < 0.15
    policy = tiny_policy("qwen3")
    policy.autocast = torch.bfloat16
    assert self_check(policy) < 1e-4  # on a CPU, the comparison runs in fp32 despite autocast
    assert policy.autocast == torch.bfloat16


def test_checks_put_modes_weights_and_attention_back():
    policy = tiny_policy("mistral", sliding_window=100)
    before = {name: p.clone() for name, p in policy.lm.named_parameters()}
    config = str(vars(policy.lm.config))
    for training in (True, False):
        policy.lm.train(training)
        self_check(policy)
        assert all(module.training == training for module in policy.lm.modules())
    assert str(vars(policy.lm.config)) == config
    assert all(torch.equal(p, before[name]) for name, p in policy.lm.named_parameters())
