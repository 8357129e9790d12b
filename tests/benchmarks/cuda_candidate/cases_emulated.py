"""The forward kernel in CUDA C++, emulated, against fp64 and the interpreted slice_kernel.

test_cuda_candidate runs some of it; all: `TRITON_INTERPRET=1 python -m pytest --noconftest` and it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.cuda_forward import kernel
from benchmarks.gpu.cuda_forward.emulator import Emulator
from benchmarks.gpu.cuda_forward.kernel import CONFIGS, CudaConfig
from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.gpu import linear
from grpo_fast.kernels.types import LogitRule
from tests.benchmarks.cuda_candidate.parity import (
    BF16_UNIT,
    PLAIN,
    SHAPES,
    assert_right,
    make,
    written,
)
from tests.kernels.triton_tools import interpreter  # noqa: F401 (it mends the interpreter's bf16)

pytestmark = pytest.mark.skipif(loader.compiler() is None, reason="no C++ compiler")


@pytest.fixture
def emulated(monkeypatch) -> Iterator[Callable]:
    """emulated(config): from there on the kernel in CUDA C++ runs, on the CPU."""
    with contextlib.ExitStack() as stack:

        def start(config: CudaConfig = CONFIGS[0]) -> SimpleNamespace:
            gpu = Emulator(monkeypatch, config)
            return SimpleNamespace(gpu=gpu, started=stack.enter_context(kernel.using(config)))

        yield start


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        *((config, shape) for config in CONFIGS[:2] for shape in SHAPES),
        *((config, SHAPES[-1]) for config in CONFIGS[2:]),
    ],
    ids=lambda x: "x".join(map(str, x)),
)
def test_against_fp64(emulated, config, shape):
    emulator = emulated(config)
    head, rule = make(*shape), LogitRule(0.9, None, 0.7)
    stats, units, out = written(head, rule)
    assert_right(head, rule, stats, units, out)
    assert emulator.started == [len(head[3])]


def test_as_the_triton_kernel_says(emulated):
    head = make(70, 64, 400)
    expected = written(head, PLAIN)
    emulated()
    stats, units, out = written(head, PLAIN)
    torch.testing.assert_close(stats[:2], expected[0][:2], rtol=0, atol=2e-6)
    torch.testing.assert_close(units, list(expected[1]), rtol=2e-5, atol=0)
    torch.testing.assert_close(out, expected[2], rtol=2 * BF16_UNIT, atol=0)


def test_nan_infinity_and_far_rows(emulated):
    """NaN stays, and stores zeros; a far target is swept again; ids outside have no column."""
    emulated()
    hidden, weight, _, target = make(40, 64, 300)
    hidden[3, 5], hidden[4] = float("nan"), hidden[4] * 12
    target[4] = (hidden[4].float() @ weight.float().T).argmin()
    target[6], target[7] = -100, 300
    stats, units, out = written((hidden, weight, None, target), PLAIN)
    assert stats[1][3].isnan() and (out[3] == 0).all() and out.isfinite().all()
    kept = torch.tensor([r for r in range(40) if r not in (3, 6, 7)])
    head = (hidden[kept], weight, None, target[kept])
    stats, units = [x[kept] for x in stats[:2]], [x[kept] for x in units]
    assert -stats[1][kept.tolist().index(4)] > 40
    assert_right(head, PLAIN, stats, units, out[kept])


@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda c: "x".join(map(str, c)))
def test_any_number_of_clusters_and_any_group(emulated, monkeypatch, config, clusters):
    """The same bits, whatever cluster takes a tile, in whatever order, in one call or several."""
    head, emulator = make(520, 64, 400), emulated(config)
    expected = linear.head_logps(*head, PLAIN, return_entropy=False)[1]
    emulator.gpu.clusters = clusters
    monkeypatch.setattr(kernel, "GROUP_BYTES", 2 * 2 * config.block_t * 64 * 2)  # two pairs
    p = linear.head_inputs(*head, PLAIN)
    assert kernel.scalars_of(p, config).group == 2
    assert torch.equal(linear.head_logps(*head, PLAIN, return_entropy=False)[1], expected)
    assert emulator.started == [520, 520]
    monkeypatch.setattr(kernel, "ROWS_AT_ONCE", 256)
    assert torch.equal(linear.head_logps(*head, PLAIN, return_entropy=False)[1], expected)
    assert emulator.started[2:] == [256, 256, 8]
