"""Tests of GPU behaviour that need no GPU: device selection and rounding of products.

Patched functions simulate two GPUs, and fp64 sums simulate the sums of tensor cores.
"""

import contextlib
import itertools
from types import SimpleNamespace
from unittest.mock import DEFAULT, MagicMock

import pytest
import torch

from grpo_fast.kernels import workspace
from grpo_fast.kernels.gpu import launch
from grpo_fast.kernels.head import products
from grpo_fast.kernels.head import sums as half_range
from grpo_fast.kernels.types import HeadInputs, LogitTransform
from grpo_fast.loss.checks import ValueChecks, checked_total
from tests.gpu.test_cuda_graphs import OnGpu
from tests.kernels.test_triton_interpreter import HAS_TRITON

FLAGS = ((False, True), (False, True))


@pytest.fixture
def gpus(monkeypatch):
    """Simulate two GPUs. GPU 0 is the current device, and `gpus.tensor` is on GPU 1."""
    here = SimpleNamespace(current=0)

    @contextlib.contextmanager
    def device(index):
        before, here.current = here.current, here.current if index < 0 else index
        yield
        here.current = before

    class Event:
        def record(self, stream=None) -> None:
            self.stream = torch.cuda.current_stream() if stream is None else stream

    streams = {"current_stream": lambda x=None: here.current if x is None else x.index}
    devices = {"device": device, "device_of": lambda x: device(x.device.index)}
    devices["current_device"] = lambda: here.current
    for name, value in {**streams, **devices, "Event": Event}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    on_one = torch.device("cuda", 1)
    here.tensor = SimpleNamespace(shape=(2,), dtype=torch.bool, device=on_one, is_cuda=True)
    return here


def test_a_copy_to_the_host_has_arrived_when_its_own_stream_says_so(gpus, monkeypatch):
    host = SimpleNamespace(copy_=lambda x, non_blocking: None)
    monkeypatch.setattr(torch, "empty", lambda *args, **options: host)
    _, arrived = workspace.copy_to_host_async(gpus.tensor)
    assert arrived.stream == 1


def test_the_stream_of_the_tensor_is_asked_whether_it_is_recorded(gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpus.current == 1)
    assert launch.is_capturing(gpus.tensor)
    assert not launch.is_capturing(SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0)))
    assert not launch.is_capturing(torch.zeros(1)) and gpus.current == 0


def test_a_total_on_the_cpu_is_not_copied_to_the_gpu():
    """Check that a total in a CPU tensor becomes a number, because a copy costs a GPU sync."""
    total = torch.tensor(3, dtype=torch.int32)
    found = checked_total("num_items_in_batch", total, torch.device("meta"), ValueChecks("auto"))
    assert found == 3.0 and isinstance(found, float)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_every_gpu_has_the_blocks_of_its_own_architecture(gpus, monkeypatch):
    import triton.runtime

    def target() -> SimpleNamespace:
        return SimpleNamespace(backend="cuda", arch=(90, 80)[gpus.current])

    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=target))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    launch.architecture.cache_clear()
    found = [launch.architecture(torch.device("cuda", index)) for index in (1, 0, 1)]
    launch.architecture.cache_clear()
    assert found == ["sm_80", "sm_90", "sm_80"] and gpus.current == 0


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
@pytest.mark.parametrize("stored", [None, "logits", "exponentials"])
@pytest.mark.parametrize(("softcap", "bias", "entropy"), itertools.product((None, 30.0), *FLAGS))
def test_the_large_tile_of_hopper(monkeypatch, softcap, bias, entropy, stored):
    """Check that the large tile of sm_90 is used unless its code would spill registers."""
    from grpo_fast.kernels.gpu import linear

    launched = MagicMock()
    monkeypatch.setattr(linear, "launch", launched)
    monkeypatch.setattr(linear, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(linear, "tiles", lambda p, matrix, *shape: matrix)
    hidden, weight = torch.zeros(4, 64).bfloat16(), torch.zeros(16, 64).bfloat16()
    given = weight[:, 0] if bias else None
    transform = LogitTransform(1.0, softcap, 1.0)
    p = linear.prepared(HeadInputs(hidden, weight, given, torch.zeros(4).long(), transform))
    out = None if stored is None else torch.zeros(4, 16).bfloat16()
    target = torch.zeros(4) if stored == "exponentials" else None
    linear.sweep(p, torch.zeros(4 if entropy else 3, 1, 4), out, target)
    spills = stored == "exponentials" and (softcap is not None or (bias and entropy))
    assert launched.call_args.kwargs["BLOCK_V"] == (128 if spills else 256)


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_later_launches_call_the_compiled_kernel(monkeypatch):
    """Check that a launch calls the compiled kernel only if Triton would select the same one.

    If a profiler has added a hook to Triton, the launch calls Triton's own launcher.
    """
    from triton import knobs
    from triton.runtime import driver

    calls = []
    kernel, compiled = MagicMock(arg_names=["x", "y", "n", "BLOCK", "HAS"]), MagicMock()
    monkeypatch.setattr(driver, "_active", MagicMock())
    driver.active.get_current_stream.return_value = 17
    kernel.__getitem__.return_value.return_value = compiled
    kernel.__getitem__.side_effect = lambda grid: calls.append(grid) or DEFAULT
    x = torch.zeros(64)

    def start(*args, BLOCK=8, **options):
        launch.launch(kernel, 3, *args, BLOCK=BLOCK, HAS=True, num_warps=4, **options)
        return len(calls)

    assert start(x, None, 5) == 1
    assert start(torch.ones(9), None, 7) == 1  # the properties are the same
    how = 3, 1, 1, 17, compiled.function, compiled.packed_metadata, None, None, None
    assert compiled.run.call_args.args[:9] == how
    given = compiled.run.call_args.args[9:]
    assert torch.equal(given[0], torch.ones(9)) and given[1:] == (None, 7, 8, True)
    others = [
        (x, None, 1), (x, None, 16), (x, None, 2**31 + 1), (x, x, 5), (x, 0.5, 5),
        (x.double(), None, 5), (x[1:], None, 5),
    ]  # fmt: skip
    assert [start(*args) for args in others] == list(range(2, 9))
    assert start(x, None, 5, BLOCK=16) == 9 and start(x, None, 5) == 9
    count = compiled.run.call_count
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    assert start(x, None, 5) == 9 and compiled.run.call_count == count
    assert compiled.__getitem__.call_args.args == ((3, 1, 1),)
    assert compiled.__getitem__.return_value.call_args.args[1:] == (None, 5, 8, True)


@pytest.mark.parametrize(
    ("gib", "mib"), [(139.8, 4473), (79.25, 2536), (32.5, 1040), (32, 1024), (15, 1024), (0, 1024)]
)
def test_the_workspace_is_a_share_of_the_gpu(monkeypatch, gib, mib):
    """Check that the workspace takes a fixed share of the GPU's memory, but at least 1 GiB.

    If torch sees no GPU, the workspace has 1 GiB. GRPO_FAST_WORKSPACE_MIB overrides the size.
    """
    memory = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gib > 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.delenv("GRPO_FAST_WORKSPACE_MIB", raising=False)
    assert workspace.workspace_bytes(torch.device("cuda")) == mib << 20
    assert workspace.workspace_bytes(torch.device("cuda"), 2, 7) == (mib << 20) + 7
    monkeypatch.setenv("GRPO_FAST_WORKSPACE_MIB", "5")
    assert workspace.workspace_bytes(torch.device("cuda")) == 5 << 20


def test_a_sum_over_the_vocabulary_leaves_its_product_in_fp32():
    """Check that the product dH = d·W, which sums over the vocabulary, returns fp32.

    A GPU product with a 16-bit output may also round its partial sums to 16 bits.
    """
    with OnGpu():
        d, weight = (
            torch.empty(x, dtype=torch.bfloat16, device="meta") for x in ((32, 999), (999, 8))
        )
        assert products.matmul_d_hidden(d, weight).dtype == torch.float32
        assert products.matmul_d_hidden(d.float(), weight).dtype == torch.float32


def test_powers_of_two_are_exact(monkeypatch):
    """Check that `half_range.power_of_two` is exact even on devices whose `pow` is not exact.

    torch.ldexp calls `pow`, so it is not exact on such devices.
    """
    monkeypatch.setattr(torch, "ldexp", lambda x, e: x * 2.0**e * (1 + 2**-23))
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    exact = torch.tensor([2.0**e for e in range(-126, 128)])
    assert torch.equal(half_range.power_of_two(exponents), exact)
