"""The candidate in CUDA C++ (benchmarks/gpu/cuda_forward): compiled, emulated, its races."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.kernels.triton_tools.launcher import HAS_TRITON, ROOT, run_python

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
if HAS_TRITON:
    from benchmarks.gpu import resources
    from benchmarks.gpu.cuda_forward import emulator, kernel
    from benchmarks.gpu.cuda_forward.kernel import CONFIGS
    from grpo_fast.kernels.cpu import loader
else:
    CONFIGS = ()

has_nvrtc = importlib.util.find_spec("cuda") is not None
needs_nvrtc = pytest.mark.skipif(
    not has_nvrtc,
    reason="no NVRTC: cuda-bindings comes with CUDA builds of torch (make test-floor)",
)
# It is shipped nowhere: emulated where its own compiler is, too.
by_hand = pytest.mark.skipif(
    "GRPO_FAST_ALL_GPUS" not in os.environ or not HAS_TRITON or loader.compiler() is None,
    reason="make test-floor emulates the candidate",
)


@needs_nvrtc
@pytest.mark.parametrize("store", [True, False], ids=["stored", "bare"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "x".join(map(str, c)))
def test_compiled_code(config, store):
    cubin, log = kernel.compiled(config, store=store)
    # ptxas warns where it makes a wgmma wait for the one before.
    assert "0 bytes spill stores, 0 bytes spill loads" in log
    assert "warning" not in log.lower() and "serializ" not in log, log
    shared = kernel.shared_bytes(config, store=store)
    cost = resources.of_cubin(cubin, shared)
    parts = config.block_t // 64 // (3 - config.teams)
    assert cost.spills == 0
    assert cost.registers * kernel.THREADS <= 65536
    assert cost.shared <= resources.SHARED_LIMIT["sm_90"]
    assert cost.matrix == cost.counts["HGMMA"] == parts * kernel.BLOCK_H // 16
    assert cost.counts["UTMALDG"] == 2 and cost.counts["USETMAXREG"] == 2
    assert cost.counts["UTMASTG"] == (parts * config.block_v // 64 if store else 0)
    sass = resources.disassembled(cubin)
    assert len(re.findall(r"UTMALDG\.2D\.MULTICAST", sass)) == 1
    # No barrier of a block: warps meet at mbarriers only, clusters at their start and end.
    assert not re.search(r"\bBAR\b", sass) and len(re.findall(r"\bUCGABAR_ARV\b", sass)) == 2
    # Nobody waits for stores to memory but a cluster, when it starts and ends.
    assert len(re.findall(r"MEMBAR\.\w+\.(GPU|SYS)", sass)) == 2


def test_the_package_knows_nothing_of_it():
    for path in Path(ROOT, "grpo_fast").rglob("*.py"):
        assert "cuda_forward" not in path.read_text(), path
    assert not [*Path(ROOT, "csrc").rglob("*.cu"), *Path(ROOT, "csrc").rglob("*.cuh")]


@by_hand
def test_emulated_against_fp64_and_the_shipped_kernel():
    """The tile that is tried first; the others by hand, or on a GPU."""
    cases = "tests/benchmarks/cuda_candidate/cases_emulated.py"
    chosen = "(128x192 and (300x392x700 or any_number)) or not (fp64 or any_number)"
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-k", chosen]
    assert "5 passed" in run_python("-m", "pytest", cases, *options, interpret=True)


@by_hand
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda c: "x".join(map(str, c)))
def test_no_two_threads_race(config):
    """Under a thread sanitizer, with products and stores that read as late as they may."""
    try:
        program = emulator.built(config, store=True, flags=emulator.RACES)
    except RuntimeError as error:
        if "tsan" not in str(error):
            raise
        pytest.skip("the compiler has no thread sanitizer")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
