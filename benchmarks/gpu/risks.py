"""What may go wrong the first time that this code meets a GPU, and which part shows it."""

from __future__ import annotations

from typing import NamedTuple


class Risk(NamedTuple):
    """One line of the checklist."""

    part: str  # that shows it
    risk: str
    look: str  # where to look, what to do


RISKS = (
    Risk(
        "smoke", "Triton finds no C compiler or no folder for its cache", "set CC, TRITON_CACHE_DIR"
    ),
    Risk(
        "smoke",
        "wgmma or TMA computes something else than the interpreter",
        "nothing else counts then; GRPO_FAST_LOG=1 says which code ran",
    ),
    Risk(
        "smoke",
        "the attention's self-test opens a context on another GPU",
        "nvidia-smi lists one process on one GPU",
    ),
    Risk(
        "bars",
        "one chunk of 2.3 GiB and no room for it",
        "the peaks; GRPO_FAST_WORKSPACE_MIB bounds a chunk",
    ),
    Risk(
        "bars",
        "another program holds the GPU, or its clock is capped",
        "three GEMMs reach 770 to 800 TFLOP/s, else no time counts",
    ),
    Risk(
        "profile",
        "the vendor takes a slow kernel, or splits a sum that is rounded",
        "its names: no splitK beside a 16-bit dW",
    ),
    Risk(
        "profile",
        "launches take longer than kernels at N = 1024",
        "the time in kernels against that of a call",
    ),
    Risk("gemms", "torch has no product with out_dtype for these layouts", "a line says so"),
    Risk(
        "tune",
        "a candidate hangs, or is refused at launch",
        "it ends at its limit and keeps what it has",
    ),
    Risk(
        "tests",
        "a device assert ends the context (bad cu_seqlens)",
        "one test fails and all behind it in its process",
    ),
    Risk("tests", "two streams race on the workspace", "the same bits a thousand times"),
    Risk(
        "attention-tests",
        "a flash kernel is refused, or differs in deterministic mode",
        "the tests name the kernel",
    ),
    Risk("steps", "a product refuses in deterministic mode", "CUBLAS_WORKSPACE_CONFIG=:4096:8"),
    Risk(
        "peers",
        "a wheel is for another Python, or wants another package",
        "benchmarks/gpu/wheels.sh",
    ),
    Risk(
        "memcheck",
        "compute-sanitizer refuses the device of a sandbox",
        "Device not supported: a fact about the machine",
    ),
)


def checklist() -> str:
    """A line for each risk."""
    return "\n".join(f"[ ] {r.part:15} {r.risk}\n{'':20}-> {r.look}" for r in RISKS)
