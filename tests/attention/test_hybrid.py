"""Test packed rows and rollouts of hybrid models, and of models with attention sinks.

The expected results come from one forward pass of each sequence alone.

The models are tiny and have both recurrent layers and attention.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from grpo_fast.attention import (
    TreeLayout,
    disable_dropout,
    head_of,
    hybrid,
    pack_groups,
    pack_tree,
    prepare,
    register,
)
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout import Sampling
from grpo_fast.rollout.own.engine import TransformersEngine
from grpo_fast.train.policy import Policy, enable_checkpointing, self_check
from tests.attention.families import HYBRID, SINKS, family_model
from tests.attention.test_trees import by_sample, samples_of

# Prompts and completions. A completion of two tokens has one row in the pack, which is the case
# that needs padding to two rows. A completion of one token has none.
SHORT = ((9, (5, 1, 12)), (14, (3, 8, 2)))
LONG = ((70, (75, 3)), (64, (2, 66)))  # beyond one chunk of Gated DeltaNet, which has 64 tokens
Group = tuple[list[int], list[list[int]]]


def ids_of(n: int, generator: torch.Generator) -> list[int]:
    return torch.randint(3, 61, (n,), generator=generator).tolist()


def groups_of(lengths: Any = SHORT) -> list[Group]:
    generator = torch.Generator().manual_seed(3)
    return [(ids_of(p, generator), [ids_of(n, generator) for n in counts]) for p, counts in lengths]


def model_of(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model of a family whose states, norms and biases differ between all channels."""
    model = family_model(kind, max_position_embeddings=512, **changes)
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("A_log") and p.dim() == 2:  # Mamba 1: (channels, state)
            start = torch.arange(1, p.shape[1] + 1.0).log().expand(p.shape)
        elif p.dim() < 2:
            start = p.data if bool(p.data.isfinite().all()) else torch.zeros_like(p.data)
        else:
            start = torch.zeros_like(p.data)
        p.data = start + (0.2 if p.dim() < 2 or start.any() else 0.25) * noise
    if dtype == torch.float64:
        in_fp64(model)
    model.set_experts_implementation("eager")
    disable_dropout(model)
    return model.to(dtype).train()


def in_fp64(model: nn.Module) -> None:
    """Replace the classes of a model by copies of their file without casts to fp32."""
    name = type(model).__module__
    base = importlib.import_module(name)
    source = open(base.__file__).read()
    source = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    source = re.sub(r"torch\.float\b(?!\d)", "torch.float64", source)
    copied = importlib.util.module_from_spec(importlib.util.spec_from_loader(name + "_64", None))
    copied.__package__ = base.__package__
    copied.__file__ = base.__file__
    sys.modules[name + "_64"] = copied
    exec(compile(source, base.__file__, "exec"), vars(copied))  # noqa: S102
    for module in model.modules():
        if type(module).__module__ == name:
            module.__class__ = getattr(copied, type(module).__name__)


def packed_logps(model: Any, pack: Any) -> Tensor:
    hidden = model.base_model(**pack.model_inputs).last_hidden_state[0]
    head = head_of(model)
    logits = nn.functional.linear(hidden[pack.predicting], head.weight, head.bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * head.logit_scale
    return logits.log_softmax(-1).gather(-1, pack.target_ids[:, None])[:, 0]


def gradients(model: Any, logps: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logps, and the gradients of a loss that weights each token differently."""
    model.zero_grad(set_to_none=True)
    values = logps()
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(5))
    ((weights * values).sum() + 0.05 * values.square().sum()).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return values.detach(), grads


def assert_equal(model: Any, pack: Any, expected: Any, bars: tuple[float, float]) -> None:
    """Compare logps in nats, and each gradient by its relative L2 error."""
    logps, grads = gradients(model, lambda: packed_logps(model, pack))
    assert (logps - expected[0]).abs().max() <= bars[0]
    assert grads.keys() == expected[1].keys()
    # In fp32, rounding dominates the error of tensors with a small gradient. fp64 is strict.
    floor = 1e-2 if logps.dtype == torch.float32 else 1e-6
    least = floor * max(float(grad.norm()) for grad in expected[1].values())
    for name, grad in expected[1].items():
        assert (grads[name] - grad).norm() <= bars[1] * max(float(grad.norm()), least), name


# The scans of transformers 5.17 compute fp64 models in fp32.
OLD = Version(transformers.__version__) < Version("5.18")
BARS = {torch.float32: (2e-5, 1e-4), torch.float64: (1e-6, 1e-6) if OLD else (1e-12, 1e-12)}


@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("family", [*HYBRID, *SINKS])
def test_packed_rows_equal_separate_sequences(family, dtype):
    """Check shared prompts, repeated prompts, and shared prompts with gradient checkpointing."""
    model = model_of(family, dtype)
    groups = groups_of()
    expected = gradients(model, lambda: by_sample(model, samples_of(groups)))
    bars = BARS[dtype]
    if dtype == torch.float32:
        # Separate sequences have rounding errors, too: 1.5e-5 nats for qwen3_next. With 15 other
        # draws of the parameters, the difference was up to 1.9 times their error. On another CPU,
        # it was 2.3 times their error.
        with torch.no_grad():
            exact = by_sample(model_of(family, torch.float64), samples_of(groups))
        bars = max(bars[0], 4 * float((expected[0] - exact).abs().max())), bars[1]
    prepare(model)
    assert_equal(model, pack_groups(groups), expected, bars)
    assert_equal(model, pack_groups(groups, shared=False), expected, bars)
    enable_checkpointing(model)
    assert_equal(model, pack_groups(groups), expected, bars)


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "gpt_oss", "granite_swa"])
def test_bf16_autocast_is_as_exact_as_with_separate_sequences(family):
    """Compare rounding errors of logps and gradients. The expected values are computed in fp32."""
    model = model_of(family)
    groups = groups_of()
    expected = gradients(model, lambda: by_sample(model, samples_of(groups)))

    def errors(logps: Callable[[], Tensor]) -> tuple[float, float]:
        with torch.autocast("cpu", torch.bfloat16):
            values, grads = gradients(model, logps)
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        apart = [(grad - expected[1][name]).square().sum() for name, grad in grads.items()]
        return float((values - expected[0]).square().mean().sqrt()), float(sum(apart)) ** 0.5

    theirs = errors(lambda: by_sample(model, samples_of(groups)))
    prepare(model)
    ours = errors(lambda: packed_logps(model, pack_groups(groups)))
    assert ours[0] <= 1.5 * theirs[0] and ours[1] <= 1.5 * theirs[1]


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "jamba", "lfm2", "gpt_oss"])
def test_trees_of_several_levels(family):
    """Check a tree with branches of one token, which layers cannot compute from a state."""
    model = model_of(family, torch.float64)
    generator = torch.Generator().manual_seed(0)
    root, left, right = (ids_of(n, generator) for n in (7, 4, 6))
    for branch in (left, left[:1]):
        paths = [root + branch + ids_of(n, generator) for n in (3, 5, 2)]
        paths += [root + right + ids_of(n, generator) for n in (4, 1)]
        samples = [(ids, [0] * 3 + [1] * (len(ids) - 3)) for ids in paths]
        expected = gradients(model, lambda samples=samples: by_sample(model, samples))
        prepare(model)
        pack = pack_tree(samples, merge_cost=0)
        assert max(len(branch), 1) + 7 in pack.layout.prefixes  # three levels
        assert_equal(model, pack, expected, BARS[torch.float64])


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "kimi_linear", "olmo_hybrid", "granitemoehybrid"]
)
def test_sequences_of_several_chunks(family):
    model = model_of(family, torch.float64)
    groups = groups_of(LONG)
    expected = gradients(model, lambda: by_sample(model, samples_of(groups)))
    prepare(model)
    assert_equal(model, pack_groups(groups), expected, (1e-11, 1e-11))


# M-RoPE, which equals RoPE in rows of text.
MROPE = {
    "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 0], "mrope_interleaved": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in (*HYBRID, *SINKS)), ("qwen3_5_text", {"rope_parameters": MROPE})],
    ids=str,
)
def test_the_trainer_and_its_sampler(family, changes):
    """Check the load of a policy, and the logps of samples against each sequence alone."""
    policy = Policy(model_of(family, **changes), build_symbol_tokenizer(["0", "1"]))
    policy.eos_ids = frozenset([7, 11])
    assert self_check(policy) <= 1e-4
    engine = TransformersEngine(policy)
    assert engine.fallback is None and policy.unshared is None
    prompts = [prompt for prompt, _ in groups_of()]
    done = engine.generate(prompts, Sampling(max_new_tokens=24), group_size=3, seed=5)
    pairs = zip([p for p in prompts for _ in "abc"], done, strict=True)
    samples = samples_of([(prompt, [one.ids]) for prompt, one in pairs])
    with torch.no_grad(), policy.generation():
        expected = by_sample(policy.lm, samples)
    # transformers' Nemotron-H clamps dt in its scan but not while decoding.
    bar = 1e-2 if family == "nemotron_h" else 2e-4
    assert (torch.cat([one.logps for one in done]) - expected).abs().max() <= bar


def test_which_layers_begin_with_a_state():
    """Check that Mamba 1 of transformers, which ignores its state, is found in every dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        hybrid._continues.clear()
        for family in ("jamba", "lfm2", "qwen3_5_text"):
            hybrid.split_recurrent_layers(model_of(family).to(dtype).base_model)
        found = {kind.__name__: value for (kind, _), value in hybrid._continues.items()}
        assert found == {
            "JambaMambaMixer": False, "Lfm2ShortConv": True, "Qwen3_5GatedDeltaNet": True,
        }  # fmt: skip


@pytest.mark.parametrize("kind", [AssertionError, RuntimeError, ValueError])
def test_a_kernel_that_takes_only_16_bits_is_compared_in_bf16(monkeypatch, kind):
    """Check a layer whose kernel raises an error in fp32, as Gated DeltaNet of fla does."""
    model = model_of("qwen3_5_text")
    layer = hybrid.recurrent_layers(model)[0]
    file = sys.modules[type(layer).__module__]
    kernel = file.torch_chunk_gated_delta_rule
    dtypes = []

    def of_16_bits(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        dtypes.append(query.dtype)
        if query.dtype == torch.float32:
            raise kind("expected 16 bits")
        return kernel(query, *args, **kwargs)

    monkeypatch.setattr(file, "torch_chunk_gated_delta_rule", of_16_bits)
    monkeypatch.setattr(hybrid, "_continues", {})
    assert hybrid.can_continue(layer, hybrid._cache_name(type(layer)), 32)
    assert dtypes == [torch.float32, *[torch.bfloat16] * 3]


def test_a_small_difference_in_fp32_on_a_cpu_is_found(monkeypatch):
    layer = hybrid.recurrent_layers(model_of("lfm2"))[0]
    step = hybrid.step
    scaled = lambda *given: (step(*given)[0] * 1.01, step(*given)[1])  # noqa: E731
    monkeypatch.setattr(hybrid, "step", scaled)
    monkeypatch.setattr(hybrid, "_continues", {})
    assert not hybrid.can_continue(layer, hybrid._cache_name(type(layer)), 32)


@pytest.mark.parametrize("family", ["qwen3_5_text", "jamba", "lfm2", "minimax"])
def test_a_model_that_is_not_prepared_is_refused(family):
    model = model_of(family)
    model.set_attn_implementation(register())
    with pytest.raises(ValueError, match=r"call grpo_fast.attention.prepare\(model\) first"):
        model.base_model(**pack_groups(groups_of()).model_inputs)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("mamba", "packed rows do not support its layers.*it fails"),
        ("zaya", "this recurrent layer cannot be split"),
        ("rwkv", "its recurrent state would run across packed segments"),
        ("minimax", "its recurrent state would run across packed segments"),
        ("bloom", "packed rows do not support its layers.*differs by"),
        ("bert", "this layer is not"),
    ],
)
def test_prepare_refuses_what_packed_rows_would_get_wrong(family, message):
    model = family_model(family, is_decoder=False)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        prepare(model)
    assert model.config._attn_implementation == before and not model.training


def test_a_model_without_a_head_is_prepared():
    trunk = model_of("qwen3_5_text").base_model
    prepare(trunk)
    assert trunk.config._attn_implementation == register()


def test_a_padding_mask_is_refused():
    model = model_of("qwen3_5_text")
    prepare(model)
    pack = pack_groups(groups_of())
    mask = torch.ones_like(pack.input_ids)
    with pytest.raises(ValueError, match="takes no padding mask"):
        model.base_model(**pack.model_inputs, attention_mask=mask)


def test_a_prepared_model_computes_padded_batches_as_before():
    model = model_of("qwen3_5_text").eval()
    ids = torch.tensor([[0, 5, 6, 7], [8, 9, 10, 11]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    before = model(input_ids=ids, attention_mask=mask).logits
    prepare(model)
    model.set_attn_implementation("eager")
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)


def test_segments_are_batched():
    """Check how many calls a layer makes, and how many rows padding adds."""
    layout = TreeLayout.of(
        [30] * 4 + [9, 8, 8, 7] * 4, parents=[-1] * 4 + [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    )
    plan = hybrid.plan_states(layout)
    assert [len(batch.segments) for batch in plan.batches] == [4, 16]
    assert sum(batch.rows.numel() for batch in plan.batches) == 4 * 30 + 16 * 9
    assert all(batch.rows.shape[1] >= 2 for batch in plan.batches[1:])
