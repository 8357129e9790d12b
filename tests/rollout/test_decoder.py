"""Tests of the C++ decoder, which computes full layers of Llama-like models.

The decoder must sample the same tokens as the modules of the model. It must not be used if the
model is different from Llama or if a module has been changed.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_fast.attention import pack_groups
from grpo_fast.kernels.cpu import decode as cpp
from grpo_fast.kernels.cpu import gemm, loader
from grpo_fast.rollout import Sampling, generate
from grpo_fast.rollout.own import decode, decoder
from grpo_fast.rollout.own import engine as hf
from grpo_fast.train.policy import Policy
from tests.tiny import tiny_policy

# The first prompt is longer than the sliding windows of the tiny models (6 tokens).
PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11], [12], [20, 21, 22, 23]]


@pytest.fixture(autouse=True)
def kernels() -> None:
    if reason := loader.unavailable("decoder") or gemm.unavailable(torch.float32):
        pytest.skip(f"C++ kernels: {reason}")


def policy_of(family: str = "llama", **changes: Any) -> Policy:
    """Return a policy whose biases and norm weights are random.

    With the default zeros and ones, a decoder that ignores these weights would pass the tests.
    """
    policy = tiny_policy(family, vocab_size=61, **changes)
    for parameter in policy.lm.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    hf._differences[policy.lm] = {hf.LOOP: None}  # use the decoding loop without a comparison
    return policy


def sampled(policy: Policy, group_size: int = 4, length: int = 12) -> Any:
    sampling = Sampling(max_new_tokens=length)
    return generate(policy, PROMPTS, sampling, group_size=group_size, seed=1)


@pytest.fixture
def steps(spied: Any) -> Callable[[], list[Any]]:
    """Return a function that lists the decoder of each rollout, or None if the modules ran."""
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
    """Check that the C++ decoder samples the same tokens as the model's PyTorch modules.

    Completions end at different times, and the key-value cache must grow.
    """
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


NEEDS_BF16 = pytest.mark.skipif(
    gemm.unavailable(torch.bfloat16) is not None, reason="no bf16 products here"
)


def bf16_policy(family: str = "llama", **changes: Any) -> Policy:
    policy = policy_of(family, hidden_size=64, intermediate_size=96, **changes)
    policy.autocast = torch.bfloat16
    return policy


@NEEDS_BF16
@pytest.mark.parametrize(("family", "share"), [("mistral", 0.2), ("llama", 1.0), ("qwen2", 1.0)])
def test_bf16_rounds_where_training_rounds(family, share, steps):
    """Check that sampling and training compute nearly the same log-probs under autocast to bf16.

    Their difference must be small compared with the rounding error of bf16. It is 0.002 of the
    error for mistral, whose window gives sampling and training the same attention kernel. For the
    other families, training uses torch's FlashAttention. Its last bits differ, and this tiny model
    turns them into half of the error.
    """
    policy = bf16_policy(family)
    found = sampled(policy, 5, 20)
    assert isinstance(steps()[-1], decoder.Decoder) and steps()[-1].dtype == torch.bfloat16
    groups = [(p, found.completion_ids[5 * n : 5 * n + 5]) for n, p in enumerate(PROMPTS)]
    with torch.no_grad():
        trained = policy.logps(pack_groups(groups))
        policy.autocast = None
        exact = policy.logps(pack_groups(groups))
    ours = torch.cat([torch.as_tensor(x) for x in found.sampling_logps])
    noise = (trained - exact).abs().mean()
    assert noise > 1e-4  # bf16 must have a visible error
    assert (ours - trained).abs().mean() < share * noise


@pytest.mark.parametrize("make", [policy_of, pytest.param(bf16_policy, marks=NEEDS_BF16)])
def test_each_rollout_packs_the_weights_of_this_moment(steps, make):
    policy = make()
    policy.eos_ids = frozenset()
    first = sampled(policy)
    with torch.no_grad():
        policy.lm.model.layers[0].mlp.down_proj.weight.neg_()
    assert sampled(policy).completion_ids != first.completion_ids
    before, after = steps()
    assert before and after and after is not before


def decoded(chosen: slice, count: int | None = None, **changes: Any) -> torch.Tensor:
    """Decode some of 45 random rows with one random layer, and return the hidden states.

    Args:
        chosen: The rows.
        count: Number of completions to pass to the operator. None is the number of rows.
        changes: Fields of `LayerWeights` that replace the random ones.
    """
    hidden, inner, depth = 40, 60, 8
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layer = cpp.LayerWeights(
        normal(hidden), cpp.pack(normal(4 * depth, hidden)), None, None, None,
        cpp.pack(normal(hidden, 2 * depth)), normal(hidden), cpp.pack(normal(2 * inner, hidden)),
        cpp.pack(normal(hidden, inner)), heads=2, inner=inner, eps=1e-6,
    )  # fmt: skip
    x, cos, sin = (normal(45, width)[chosen].contiguous() for width in (hidden, depth, depth))
    prompts = cpp.tiles_of(normal(1, 1, 21, depth), normal(1, 1, 21, depth))
    completions = cpp.grow_tiles((), prompts, len(x), 1)
    numbers = torch.tensor([21]), torch.tensor([count or len(x)])
    layer = layer._replace(**changes)
    cpp.decode_layer_(x, layer, cos, sin, prompts, completions, *numbers, 0, 0.3, None)
    return x


def test_the_bits_of_a_row_depend_on_no_other_row_and_no_thread():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([decoded(slice(i, i + 1)) for i in range(45)])
        torch.set_num_threads(2)
        assert torch.equal(decoded(slice(None)), alone)
        assert torch.equal(decoded(slice(3, 8)), alone[3:8])
    finally:
        torch.set_num_threads(threads)


def test_the_operator_refuses_wrong_shapes():
    for name, change in (
        ("down", {"down": cpp.pack(torch.ones(200, 16))}),
        ("bias", {"bias": torch.ones(5)}),
        ("norm", {"norm": torch.ones(5)}),
        ("heads", {"heads": 0}),
        ("inner", {"inner": 0}),
        ("counts", {"count": 3}),
    ):
        with pytest.raises((RuntimeError, ValueError), match=name):
            decoded(slice(2), **change)
    with pytest.raises((RuntimeError, ValueError), match="weight"):
        cpp.pack(torch.ones(2, 2, dtype=torch.float64))


def unwanted(*_: Any) -> None:
    pytest.fail("a decoder is packed")


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gemma2", {}), ("cohere", {}), ("llama", {"hidden_act": "gelu"}),
     ("llama", {"hidden_act": "relu"})],
)  # fmt: skip
def test_layers_of_other_parts_are_not_packed(family, changes, steps, monkeypatch):
    monkeypatch.setattr(decoder, "Decoder", unwanted)
    sampled(policy_of(family, **changes))
    assert steps() == [None]


def test_a_formula_that_is_not_llamas_is_found_once(steps, monkeypatch):
    """Check that the C++ decoder is not used for Granite.

    Granite has the same parameters as Llama but also scales the output of each layer. Only a
    comparison of the computed numbers can find this difference. The comparison must run only once.
    """
    policy = policy_of("granite")
    ours = sampled(policy)
    monkeypatch.setattr(decoder, "Decoder", unwanted)
    again = sampled(policy)
    assert steps() == [None, None] and ours.completion_ids == again.completion_ids


SCALED = {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}


def check_logps(policy: Policy) -> None:
    """Sample from the policy, and check that the logps equal those of a single forward pass."""
    policy.eos_ids = frozenset()
    prompt = list(range(3, 33))
    drawn = generate(policy, [prompt], Sampling(max_new_tokens=20), group_size=2, seed=1)
    with policy.generation():
        for ids, logps in zip(drawn.completion_ids, drawn.sampling_logps, strict=True):
            expected = policy.model_logps([prompt + ids])[0, len(prompt) - 1 :]
            torch.testing.assert_close(torch.as_tensor(logps), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("original", [16, 40, 4096])
@pytest.mark.parametrize("beta", [0.0, 0.01, 0.5])
def test_a_scale_that_begins_at_a_limit_is_found(original, beta, steps):
    rope = {**SCALED, "original_max_position_embeddings": original, "llama_4_scaling_beta": beta}
    check_logps(policy_of("ministral3", rope_parameters=rope))
    assert [step is None for step in steps()] == [beta > 0]  # beta 0 means a scale of 1


@pytest.mark.parametrize(
    "zero", ["q_proj", "o_proj", "embed_tokens", "input_layernorm", "v_proj", "down_proj", ""]
)
def test_weights_that_hide_a_formula_do_not_decide(zero, steps):
    policy = policy_of("ministral3", rope_parameters=SCALED)
    saved = {name: p.clone() for name, p in policy.lm.named_parameters()}
    for name, parameter in policy.lm.named_parameters():
        if zero in name:
            torch.nn.init.zeros_(parameter)
    sampled(policy)
    policy.lm.load_state_dict(saved, strict=False)
    check_logps(policy)
    assert steps() == [None, None]


def test_a_verdict_is_shared_by_models_of_one_configuration(spied, steps):
    tried = spied(decoder, "difference")
    changes = {"rope_theta": 12345.0}  # no other test uses it, so no verdict is cached yet
    for seed in (0, 1):
        policy = policy_of("llama", seed=seed, **changes)
        for _ in range(2):
            sampled(policy)
    assert len(tried) == 1 and all(steps())
    sampled(policy_of("llama", rope_theta=54321.0))
    assert len(tried) == 2


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def adapted(lm: Any) -> None:
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(settings, lm)


def parametrized(lm: Any) -> None:
    layer = lm.model.layers[0].self_attn.q_proj
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Double())


# Changes to a model after its first rollout. After every change except the last, the next rollout
# must use the model's modules instead of the decoder. The decoder supports the last change, because
# it reads the attention scale from the key-value cache.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook of the trunk": lambda lm: lm.model.register_forward_pre_hook(lambda *_: None),
    "a hook before a layer": lambda lm: lm.model.layers[0].register_forward_pre_hook(
        lambda *_: None
    ),
    "a hook of an activation": lambda lm: lm.model.layers[1].mlp.act_fn.register_forward_hook(
        lambda m, a, out: 2 * out
    ),
    "the forward of an MLP": lambda lm: setattr(
        lm.model.layers[1].mlp, "forward", functools.partial(torch.mul, 2.0)
    ),
    "an activation": lambda lm: setattr(lm.model.layers[0].mlp, "act_fn", torch.nn.GELU()),
    "a setting": lambda lm: lm.config.rope_parameters.update(llama_4_scaling_beta=0.5),
    "the dtype": lambda lm: lm.double(),
    "an adapter": adapted,
    "a parametrization": parametrized,
    "the scale of the attention": lambda lm: setattr(lm.model.layers[0].self_attn, "scaling", 0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_rollout_is_honoured(change, steps):
    policy = policy_of("ministral3", rope_parameters={**SCALED, "llama_4_scaling_beta": 0.0})
    sampled(policy)
    assert isinstance(steps()[-1], decoder.Decoder)
    CHANGES[change](policy.lm)
    check_logps(policy)
    assert (steps()[-1] is None) == (change != "the scale of the attention")


@pytest.mark.parametrize("limit", [30, 1000, 2048, 5000, 100_000])
def test_a_limit_that_no_configuration_names_is_found(limit, steps, monkeypatch):
    from transformers.models.llama import modeling_llama

    rotate = modeling_llama.LlamaAttention.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        places = kwargs["position_ids"][0]
        scaled = hidden_states * (1 + 0.1 * (places > limit))[None, :, None]
        return rotate(self, scaled, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    sampled(policy_of("llama"))
    assert steps() == [None]
