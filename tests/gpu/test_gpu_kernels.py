"""Tests of the Triton backend and of the attention kernels that only a real GPU can show.

The tests of the backend cover repeated calls while another stream is busy, long completions, more
than 2³¹ logits, and the CUDA context. The attention kernels are compared with the dense reference,
alone and in a model. They are those of torch, and flash-attn (FA2, FA3 or FA4) if it is installed.

`benchmarks/gpu_session.sh --part tests` runs all tests with the mark "gpu". Those in tests/loss
whose backend is "gpu" check losses, options, sizes and relations. They find races, misaligned
vector loads and wrong tensor-core code. The tests in Triton's interpreter and the compile tests
cannot find such errors. Other tests compare torch's fp32 results with fp64.
"""

import itertools

import pytest
import torch

from benchmarks.kernels import exact, runner
from benchmarks.kernels.operations import Shape
from benchmarks.kernels.problem import make_problem
from benchmarks.kernels.providers import providers_of
from grpo_fast import LossConfig, grpo_loss
from grpo_fast.attention import dispatch, pack_groups, plan_packs, register, tree
from grpo_fast.attention.dispatch import Kind
from grpo_fast.attention.layout import AttentionParams
from tests.attention.layouts import inputs, results, two_levels
from tests.tiny import tiny_model

pytestmark = pytest.mark.gpu
DEVICE, DTYPE = "cuda", torch.bfloat16
REPEATS = 1000
# 8 completions of 65600 tokens. Their length exceeds 65535, the limit of a grid dimension on a GPU.
LONG = 8 * 65600
# A long batch, also with an odd vocabulary size, so that the rows of logits are not aligned. The
# last shape has 2.16e9 logits (4.3 GB in bf16), which are too many for int32 indices.
LARGE = [("linear_grpo_loss", Shape(LONG, 64, 4104)), ("linear_logps", Shape(LONG, 64, 4104)),
         ("logits_grpo_loss", Shape(LONG, 64, 1003)),
         ("logits_grpo_loss_inplace", Shape(LONG, 64, 1003)),
         ("logits_grpo_loss", Shape(16504, 64, 2**17)),
         ("logits_grpo_loss_inplace", Shape(16504, 64, 2**17))]  # fmt: skip
# Largest relative L2 error of a gradient, which is the limit that our documentation promises for
# bf16, and largest error of the loss, relative to the loss of one token.
BAR, LOSS_BAR = 3e-3, 2e-6


def ours(operation):
    return next(p for p in providers_of(operation) if p.name == "grpo_fast (triton)")


@pytest.mark.parametrize(("operation", "shape"), LARGE)
def test_large_calls_are_exact(operation, shape):
    if torch.cuda.mem_get_info()[0] < 5 * 2 * shape.n * shape.v + 2**33:
        pytest.skip("needs more free GPU memory")
    problem = make_problem(shape, DTYPE, DEVICE)
    row, _ = runner.verify(ours(operation), operation, problem, DTYPE, DEVICE)
    assert row["status"] == "ok", row
    bars = {"loss": LOSS_BAR, "logps": exact.logps_bar(shape.h, DEVICE)}
    assert all(x <= bars.get(name, BAR) for name, x in row["errors"].items()), row


@pytest.mark.parametrize("operation", ["linear_grpo_loss", "linear_logps", "logits_grpo_loss"])
def test_the_same_bits_a_thousand_times_while_a_stream_is_busy(operation):
    """Check that repeated calls have the same bits, also in torch's deterministic mode.

    Another stream runs a matrix product at the same time, which changes the timing of the kernels.
    If they contain a race, their results then differ.
    """
    step = ours(operation).prepare(make_problem(Shape(256, 896, 32000), DTYPE, DEVICE))
    first = {name: x.clone() for name, x in step().items()}
    different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    noise, side = torch.randn(2048, 2048, device=DEVICE).bfloat16(), torch.cuda.Stream()
    scratch = torch.empty_like(noise)
    for repeat in range(REPEATS):
        with torch.cuda.stream(side):
            torch.mm(noise, noise, out=scratch)
        torch.use_deterministic_algorithms(repeat == REPEATS - 1)
        try:
            found = step()
        finally:
            torch.use_deterministic_algorithms(False)
        for name, value in found.items():
            different += (value != first[name]).any()
    torch.cuda.synchronize()
    assert different.item() == 0


def test_bad_offsets_leave_the_context_alive():
    """Check that invalid values in `cu_seqlens` do not break the CUDA context.

    The call with invalid offsets finishes, because the GPU clamps them. The next call raises the
    error for the invalid offsets, and the call after that works.
    """
    logps, good = torch.zeros(9, requires_grad=True), torch.tensor([0, 4, 6, 9])
    logps, good, ones = (x.cuda() for x in (logps, good, torch.ones(3)))
    for offsets in ([0, 4, 6, 12], [0, 2**62, -(2**62), 9], [9, 0, 0, 0]):
        cu = torch.tensor(offsets).cuda()
        grpo_loss(logps, ones, LossConfig("gspo"), cu_seqlens=cu)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="cu_seqlens: expected non-decreasing offsets"):
            grpo_loss(logps, ones, LossConfig(), cu_seqlens=good)
        assert torch.isfinite(grpo_loss(logps, ones, LossConfig(), cu_seqlens=good).loss)


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
