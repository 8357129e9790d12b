"""Whole layers in C++ while sampling: the same tokens, and only for models that have the form."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_fast.kernels.cpu import decode as cpp
from grpo_fast.kernels.cpu import gemm, loader
from grpo_fast.rollout import Sampling, generate
from grpo_fast.rollout.own import decode, decoder
from grpo_fast.rollout.own import engine as hf
from grpo_fast.train.models.policy import Policy
from tests.tiny import tiny_policy

PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [12], [20, 21, 22, 23]]  # 9 tokens: beyond a window of 6


@pytest.fixture(autouse=True)
def kernels() -> None:
    if reason := loader.unavailable("decoder") or gemm.unavailable(torch.float32):
        pytest.skip(f"C++ kernels: {reason}")


def policy_of(family: str = "llama", **changes: Any) -> Policy:
    """With random biases and norms, which start as zeros and ones."""
    policy = tiny_policy(family, vocab_size=61, **changes)
    for parameter in policy.lm.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    hf._unsuited[policy.lm] = None  # sampled by our loop
    return policy


def sampled(policy: Policy, group_size: int = 4, length: int = 12) -> Any:
    sampling = Sampling(max_new_tokens=length)
    return generate(policy, PROMPTS, sampling, group_size=group_size, seed=1)


@pytest.fixture
def steps(spied: Any) -> Callable[[], list[Any]]:
    """What each call of `decode` found: a decoder, or None."""
    calls = spied(decode, "decoder_of")
    return lambda: [call.result for call in calls]


YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"rope_parameters": YARN}), ("qwen2", {}), ("qwen3", {}), ("mistral", {}),
    ],
)  # fmt: skip
def test_the_tokens_are_those_of_the_modules(family, changes, steps, monkeypatch):
    """Also when completions end and leave, and when the room for them grows."""
    monkeypatch.setattr("grpo_fast.rollout.own.cache.GROWTH", 3)
    policy = policy_of(family, **changes)
    if "tie_word_embeddings" in changes:
        bias = torch.linspace(-2.0, 2.0, policy.lm.lm_head.out_features)
        policy.lm.lm_head.bias = torch.nn.Parameter(bias)
    policy.eos_ids = frozenset(range(1, 8))
    ours = sampled(policy, 5, 40)
    assert isinstance(steps()[-1], decoder.Decoder)
    monkeypatch.setattr(decode, "decoder_of", lambda *_: None)
    theirs = sampled(policy, 5, 40)
    assert ours.completion_ids == theirs.completion_ids
    lengths = [len(ids) for ids in ours.completion_ids]
    assert min(lengths) < 8 and max(lengths) > cpp.TILE
    for a, b in zip(ours.sampling_logps, theirs.sampling_logps, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=0, atol=2e-5)


def test_the_bits_of_a_row_depend_on_no_other_row_and_no_thread():
    rows, threads, tokens = 45, torch.get_num_threads(), torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=tokens)

    hidden, inner, depth = 40, 60, 8
    layer = cpp.LayerWeights(
        normal(hidden), cpp.pack(normal(4 * depth, hidden)), None, None, None,
        cpp.pack(normal(hidden, 2 * depth)), normal(hidden), cpp.pack(normal(2 * inner, hidden)),
        cpp.pack(normal(hidden, inner)), heads=2, inner=inner, eps=1e-6,
    )  # fmt: skip
    x, cos, sin = normal(rows, hidden), normal(rows, depth), normal(rows, depth)
    prompts = cpp.tiles_of(normal(1, 1, 21, depth), normal(1, 1, 21, depth))

    def run(chosen: slice) -> torch.Tensor:
        out, n = x[chosen].clone(), len(x[chosen])
        own = cpp.with_room((), prompts, n, 1)
        numbers = torch.tensor([21]), torch.tensor([n])
        angles = cos[chosen].contiguous(), sin[chosen].contiguous()
        cpp.decode_layer_(out, layer, *angles, prompts, own, *numbers, 0, 0.3, None)
        return out

    try:
        torch.set_num_threads(1)
        alone = torch.cat([run(slice(i, i + 1)) for i in range(rows)])
        torch.set_num_threads(2)
        assert torch.equal(run(slice(None)), alone) and not torch.equal(alone, x)
        assert torch.equal(run(slice(3, 8)), alone[3:8])
    finally:
        torch.set_num_threads(threads)


def test_weights_are_packed_anew_for_every_rollout(steps):
    policy = policy_of()
    first = sampled(policy)
    with torch.no_grad():
        policy.lm.model.layers[0].mlp.down_proj.weight.neg_()
    assert sampled(policy).completion_ids != first.completion_ids
    found = steps()
    assert all(found) and len(found) == 2 and found[1] is not found[0]


def unwanted(*_: Any) -> None:
    pytest.fail("a decoder is packed")


def hooked(policy: Policy) -> None:
    policy.lm.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def hooked_before(policy: Policy) -> None:
    policy.lm.model.layers[0].register_forward_pre_hook(lambda *_: None)


def replaced(policy: Policy) -> None:
    mlp = policy.lm.model.layers[1].mlp
    mlp.forward = functools.partial(torch.mul, 2.0)


def in_float64(policy: Policy) -> None:
    policy.lm.double()


@pytest.mark.parametrize("change", [hooked, hooked_before, replaced, in_float64])
def test_a_model_that_somebody_changed_computes_by_its_modules(change, steps):
    policy = policy_of()
    sampled(policy)
    change(policy)
    sampled(policy)
    first, second = steps()
    assert isinstance(first, decoder.Decoder) and second is None


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gemma2", {}), ("cohere", {}), ("llama", {"hidden_act": "gelu"}),
     ("llama", {"hidden_act": "relu"})],
)  # fmt: skip
def test_layers_of_other_parts_are_not_packed(family, changes, steps, monkeypatch):
    monkeypatch.setattr(decoder, "Decoder", unwanted)
    sampled(policy_of(family, **changes))
    assert steps() == [None]


def test_a_formula_that_is_not_llamas_is_found_by_a_token_and_once(steps, monkeypatch):
    """Granite has Llama's parameters, and multiplies what a layer adds."""
    policy = policy_of("granite")
    ours = sampled(policy)
    monkeypatch.setattr(decoder, "Decoder", unwanted)
    again = sampled(policy)
    assert steps() == [None, None] and ours.completion_ids == again.completion_ids


def test_the_operator_refuses_what_does_not_fit():
    weight, bias = torch.ones(32, 16), torch.ones(5)
    x, angles, norm = torch.ones(2, 16), torch.ones(2, 8), torch.ones(16)
    tiles = cpp.tiles_of(*(torch.ones(1, 1, 3, 8) for _ in "kv"))
    own = cpp.with_room((), tiles, 2, 4)
    layer = cpp.LayerWeights(
        norm, cpp.pack(weight), None, None, None, cpp.pack(torch.ones(16, 16)), norm,
        cpp.pack(torch.ones(24, 16)), cpp.pack(torch.ones(16, 12)), heads=2, inner=12, eps=1e-6,
    )  # fmt: skip

    def run(layer: cpp.LayerWeights, count: int = 2) -> None:
        numbers = torch.tensor([3]), torch.tensor([count])
        cpp.decode_layer_(x, layer, angles, angles, tiles, own, *numbers, 0, 1.0, None)

    run(layer)
    for name, wrong in (
        ("down", layer._replace(down=cpp.pack(torch.ones(200, 16)))),
        ("bias", layer._replace(bias=bias)),
        ("norm", layer._replace(norm=bias)),
        ("heads", layer._replace(heads=0)),
        ("inner", layer._replace(inner=0)),
    ):
        with pytest.raises((RuntimeError, ValueError), match=name):
            run(wrong)
    with pytest.raises((RuntimeError, ValueError), match="counts"):
        run(layer, count=3)
    with pytest.raises((RuntimeError, ValueError), match="weight"):
        cpp.pack(torch.ones(2, 2, dtype=torch.float64))
