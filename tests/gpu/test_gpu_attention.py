"""Tests of the attention kernels on a real GPU against the dense reference, alone and in a model.

`benchmarks/gpu_session.sh --part tests` runs these tests. They need no further package,
because they test torch's FlashAttention. They also test flash-attn (FA2, FA3 or FA4) if installed.
"""

import itertools

import pytest
import torch

from grpo_fast.attention import dispatch, pack_groups, plan_packs, register, tree
from grpo_fast.attention.dispatch import Kind
from grpo_fast.attention.layout import AttentionParams
from tests.attention.layouts import inputs, results, two_levels
from tests.tiny import tiny_model

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Maximum relative L2 errors of outputs and gradients, for each input dtype. The errors are measured
# against fp64 results for the same inputs.
BARS = {BF16: 1e-2, FP16: 1.5e-3, FP32: 2e-5}
LAYOUTS = {
    "packed": ([257, 64, 1, 640, 129], []),
    "shared": ([300, 1, 64, 1, 128, 200, 3, 129, 333], [3, 4]),
    "single tokens": ([1, 1, 1, 1], [2]),
    "long prompt": ([2048, 64, 63, 1, 64, 64, 64, 64, 5], [8]),
}
SIZES = (BF16, 64), (FP16, 64), (BF16, 128), (BF16, 256), (BF16, 96), (BF16, 60), (FP32, 64)
LIMITS = (True, False), (False, True), (True, True)  # (has_window, has_softcap)
KINDS = [Kind("cuda", BF16, 64, *limits) for limits in LIMITS]
KINDS += [Kind("cuda", *size) for size in SIZES]
FOR_FLASH = KINDS[:1] + KINDS[3:8]  # without any package, FlashAttention of torch is chosen


def rule_of(kind):
    limits = 100 if kind.has_window else None, 5.0 if kind.has_softcap else None
    return AttentionParams(kind.head_dim**-0.5, *limits)


def problem(name, kind, heads=(6, 2)):
    layout = two_levels(*LAYOUTS[name], "cuda")
    return [x.cuda() for x in inputs(layout, heads, kind.head_dim, kind.dtype)], layout


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_provider_is_the_dense_reference(kind):
    """Check that outputs and gradients of every attention provider agree with the dense reference.

    The test covers ragged layouts, grouped heads, windows and soft caps, and reports all failures
    together. If a provider raises an exception, it is skipped, as in `choose`, and its name is
    printed (`pytest -rP` shows it). flex is tested separately, because it takes 15 seconds to
    compile. FlashAttention must be chosen where it can compute the kind.
    """
    wrong, rule = [], rule_of(kind)
    providers = [provider for provider in dispatch.candidates(kind) if provider.name != "flex"]
    for name, heads in itertools.product(LAYOUTS, ((4, 4), (6, 2))):
        given, layout = problem(name, kind, heads)
        expected = results(dispatch.dense_attention, given, layout, rule, torch.float64)
        for provider in providers:
            try:
                got = results(provider.attend, given, layout, rule)
            except Exception as error:
                assert provider.name not in ("flash_aten", "explicit"), (provider.name, name)
                print(f"{provider.name} cannot take {kind}, {name}: {error}")
                continue
            pairs = zip(got, expected, strict=True)
            errors = [float((x.double() - y).norm() / y.norm()) for x, y in pairs]
            if not max(errors) <= BARS[kind.dtype]:
                wrong.append((provider.name, name, heads, errors))
    assert not wrong, wrong
    if kind in FOR_FLASH:
        assert dispatch.choose(kind).name in ("fa4", "fa3", "fa2", "flash_aten")


@pytest.mark.parametrize(
    ("kind", "bar"),
    [
        (Kind("cuda", BF16, 64, has_softcap=True), 1e-2),
        (Kind("cuda", BF16, 256, has_window=True, has_softcap=True), 1e-2),
        (Kind("cuda", BF16, 60), 1e-2),
        (Kind("cuda", FP32, 64), 1e-3),  # flex may use TF32 for fp32
    ],
    ids=str,
)
def test_flex_is_the_dense_reference(kind, bar):
    """Check that tree, which CUDA uses if no other provider works, agrees with the dense reference.

    The test uses the tiny packed row of the self-test and a long packed row.
    """
    assert dispatch.pair_of(tree.attend_flex, kind).gap() <= bar
    (given, layout), rule = problem("shared", kind), rule_of(kind)
    expected = results(dispatch.dense_attention, given, layout, rule, torch.float64)
    for x, y in zip(results(tree.attend_flex, given, layout, rule), expected, strict=True):
        assert (x.double() - y).norm() <= bar * y.norm()


@pytest.mark.parametrize("has_window", [False, True])
def test_deterministic_where_asked_for(has_window):
    kind = Kind("cuda", BF16, 64, has_window)
    (given, layout), attention = problem("long prompt", kind), dispatch.choose(kind).attend
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (results(attention, given, layout, rule_of(kind)) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("family", ["qwen2", "mistral"])  # gemma2 may need flex
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_bf16_model_shared_packed_and_split(family, checkpointing):
    """Check that sharing prompts and splitting groups hardly increase the error of a bf16 model.

    Three layouts are compared with fp32 on the CPU. "shared" is one pack that contains each prompt
    once. "packed" is one pack that contains a copy of the prompt for each completion. "split"
    consists of several packs with shared prompts. The errors of "shared" and "split" may be at most
    1.3 times the errors of "packed".
    """
    g = torch.Generator().manual_seed(1)
    lengths = [(200, (30, 1, 64, 17)), (90, (5, 40))]
    groups = [
        (torch.randint(2, 61, (prompt,), generator=g),
         [torch.randint(2, 61, (n,), generator=g) for n in completions])
        for prompt, completions in lengths
    ]  # fmt: skip
    one, many = (plan_packs(lengths, budget) for budget in (10**6, 260))
    assert len(one) == 1 and len(many) > 2
    rows = pack_groups(groups).split_groups(torch.arange(157))
    model, weight = tiny_model(family, head_dim=16, hidden_size=64), torch.randn(157, 61)
    model.set_attn_implementation(register())

    def run(device, plan, shared=True):
        """Return the logits that predict the completion tokens, and all gradients, on the CPU."""
        logits = torch.empty(157, 61)
        model.zero_grad()
        for shares in plan:
            pack = pack_groups([s.of(groups) for s in shares], shared=shared, device=device)
            own = torch.cat([rows[s.group][i] for s in shares for i in s.completions])
            found = model(**pack.model_inputs).logits[0][pack.predicting].float().cpu()
            (found * weight[own]).sum().backward()
            logits[own] = found.detach()
        return logits, torch.cat([p.grad.flatten().float().cpu() for p in model.parameters()])

    truth = run("cpu", one)
    model.to("cuda", BF16).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    shared, packed, split = (
        [((x - y).norm() / y.norm()).item() for x, y in zip(run("cuda", *how), truth, strict=True)]
        for how in ((one,), (one, False), (many,))
    )
    assert shared[0] <= 1.3 * packed[0] + 1e-3 and packed[0] < 0.1
    assert max(shared[1], split[1]) <= 1.3 * packed[1] + 1e-3 and packed[1] < 0.3
