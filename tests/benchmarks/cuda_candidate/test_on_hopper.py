"""On a Hopper GPU: the forward kernel in CUDA C++ against fp64, with every configuration.

Run by `benchmarks/gpu_session.sh --part forward-tests`, 128 x 192 in the first call.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_tools.launcher import HAS_TRITON

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (IS_HOPPER and HAS_TRITON), reason="no NVIDIA GPU of compute 9.0"),
]
CONFIGS: tuple = ()
SHAPES: tuple = ()
if HAS_TRITON:
    from benchmarks.gpu.cuda_forward.kernel import CONFIGS, using
    from grpo_fast import LossConfig, linear_grpo_loss
    from grpo_fast.kernels.gpu import linear
    from grpo_fast.kernels.types import LogitRule
    from tests.benchmarks.cuda_candidate.parity import PLAIN, SHAPES, assert_right, make, written

# And: many tiles for every cluster; more rows than are swept at once; a real vocabulary.
LARGE = ((4096, 896, 32000), (16500, 64, 2000), (200, 4096, 151936))
REPEATS = 200


@pytest.fixture(params=CONFIGS, ids=lambda c: "x".join(map(str, c)))
def config(request):
    with using(request.param) as started:
        yield request.param
    assert started, "no call was taken"


@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_against_fp64(config, shape):
    head, rule = make(*shape, "cuda"), LogitRule(0.9, None, 0.7)
    stats, units, out = written(head, rule)
    bare = linear.head_logps(*head, rule, return_entropy=False)
    assert torch.equal(bare[0], stats[0]) and torch.equal(bare[1], stats[1])
    for rows in torch.arange(len(head[3])).split(1024):  # fp64 of some rows at a time
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        some = (head[0][part], head[1], None, head[3][part])
        assert_right(some, rule, [x[part] for x in stats[:2]], [x[part] for x in units], out[part])


def test_the_same_bits_beside_a_busy_stream(config):
    head = make(1000, 904, 20000, "cuda")
    expected, _, out = written(head, PLAIN)
    other, busy = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(REPEATS):
        with torch.cuda.stream(other):
            busy @ busy
        stats, _, again = written(head, PLAIN)
        assert torch.equal(stats[1], expected[1]) and torch.equal(again, out)


def test_a_row_depends_on_itself_alone(config):
    hidden, weight, _, target = make(700, 256, 5000, "cuda")
    stats, _, out = written((hidden, weight, None, target), PLAIN)
    few = slice(640, 647)
    again, _, some = written((hidden[few], weight, None, target[few]), PLAIN)
    assert torch.equal(again[1], stats[1][few]) and torch.equal(some, out[few])


@pytest.mark.parametrize("tile", CONFIGS, ids=lambda c: "x".join(map(str, c)))
def test_the_loss(tile):
    """Loss and gradients as with the Triton kernel, within the bar of bf16 gradients."""
    hidden, weight, _, target = make(300, 256, 3000, "cuda")

    def run():
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
        advantages = torch.tensor([0.7, -1.2], device="cuda")
        result = linear_grpo_loss(
            *leaves, target, advantages, LossConfig(), cu_seqlens=cu_seqlens, backend="triton"
        )
        return [result.loss.detach(), *torch.autograd.grad(result.loss, leaves)]

    with using(tile) as started:
        found = run()
    assert started
    for value, expected in zip(found, run(), strict=True):
        assert (value - expected).float().norm() <= 3e-3 * expected.float().norm() + 1e-6
