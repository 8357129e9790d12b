"""Timing, memory, hardware and report headers, shared by all benchmarks."""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import gc
import importlib.metadata
import os
import platform
import re
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import ROOT
from grpo_fast.kernels.workspace import drop_workspace

MIB = 2**20
COMMIT_VARIABLE = "GRPO_FAST_COMMIT"
SLOW = 5.0  # seconds
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
# Clock of `seconds` on a CPU. "process" counts the process's CPU time, which does not grow if other
# programs share the CPU.
clock = "wall"
PACKAGES = (
    "torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "quack-kernels",
    "nvidia-cutlass-dsl", "verl", "flash-attn", "flash-attn-3", "flash-attn-4", "numpy",
)  # fmt: skip

# By default glibc returns large blocks to the kernel at every free, so each call repeats its page
# faults. "fair" keeps the blocks and requests huge pages. Both are reported, because a peer's time
# may be mostly page faults.
FAIR_ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=68719476736"
    ":glibc.malloc.mmap_threshold=68719476736"
    ":glibc.malloc.hugetlb=1"
}
# May contain loss (0-d), logps (N,), grad_hidden (N, H), grad_weight (V, H), grad_logits (R, V).
Result = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Step:
    """One call that is verified and timed.

    Attributes:
        run: does the work and returns new results, or the buffer that it has overwritten.
        reset: restores the input that `run` overwrites. It runs untimed before each call.
        owned_bytes: bytes of the results in memory that existed before the call.
    """

    run: Callable[[], Result]
    reset: Callable[[], None] | None = None
    owned_bytes: int = 0

    def __call__(self) -> Result:
        if self.reset is not None:
            self.reset()
        return self.run()


def seconds(step: Step | Callable[[], Any], calls: int, device: str) -> float:
    """Return the seconds of one call, averaged over `calls`.

    A GPU is timed by its own events, a CPU by the clock that `clock` names.
    """
    step = as_step(step)
    if device == "cuda":
        return _seconds_on_gpu(step, calls)
    now = CLOCKS[clock]
    if step.reset is None:
        start = now()
        for _ in range(calls):
            step.run()
        return (now() - start) / calls
    total = 0.0
    for _ in range(calls):
        step.reset()
        start = now()
        step.run()
        total += now() - start
    return total / calls


def as_step(step: Step | Callable[[], Any]) -> Step:
    return step if isinstance(step, Step) else Step(step)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _seconds_on_gpu(step: Step, calls: int) -> float:
    """Time each call between two events, so that resets are excluded and the queue never runs
    empty.
    """
    torch.cuda.synchronize()
    pairs = []
    for _ in range(calls):
        if step.reset is not None:
            step.reset()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step.run()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return sum(start.elapsed_time(stop) for start, stop in pairs) / calls / 1e3


def interleaved(
    steps: Mapping[str, Step | Callable[[], Any]],
    device: str,
    budget: float,
    rounds: int,
    minimum: int = 2,
) -> dict[str, list[float]]:
    """Time all steps in interleaved rounds, so that a slow minute of the machine affects all of
    them.

    A step that takes microseconds is repeated within a round until it takes 20 ms. The steps have
    run before, because they were verified. If the call that estimates the time of a step is slow,
    it counts as a sample.

    Args:
        steps: the steps by name.
        device: "cpu" or "cuda".
        budget: seconds for each step.
        rounds: largest number of rounds of a step.
        minimum: smallest number of rounds of a step, whatever the budget.

    Returns:
        The seconds of each step's samples.
    """
    warm = {name: seconds(step, 1, device) for name, step in steps.items()}
    samples = {name: [time_] if time_ > SLOW else [] for name, time_ in warm.items()}
    for name, time_ in warm.items():
        if time_ <= SLOW:
            warm[name] = seconds(steps[name], 1, device)
    calls = {name: max(1, round(0.02 / time_)) for name, time_ in warm.items()}
    wanted = {
        name: max(minimum, min(rounds, int(budget / (time_ * calls[name])))) - len(samples[name])
        for name, time_ in warm.items()
    }
    total = max(wanted.values(), default=0)
    names = list(steps)
    for index in range(total):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            if (index + 1) * wanted[name] // total > index * wanted[name] // total:
                samples[name].append(seconds(steps[name], calls[name], device))
    return samples


def spread(samples: list[float]) -> dict[str, float]:
    """Return the median, the spread and the minimum of samples, in ms.

    The spread is half the interquartile range, or half the range of fewer than four samples.
    """
    ordered = sorted(samples)
    if len(ordered) < 4:
        half = (ordered[-1] - ordered[0]) / 2
    else:
        first, _, third = statistics.quantiles(ordered, n=4)
        half = (third - first) / 2
    median = statistics.median(ordered)
    return {"median_ms": median * 1e3, "spread_ms": half * 1e3, "min_ms": ordered[0] * 1e3}


def peak_memory(step: Step | Callable[[], Any], device: str) -> dict[str, float]:
    """Return the peak MiB of one warm call, without earlier memory and the returned gradients.

    On a GPU this is from the statistics of torch's allocator. On a CPU, free pages are returned to
    the kernel (malloc_trim) and the high-water mark of the resident set is reset (5 into
    /proc/self/clear_refs). After the step, the result is VmHWM minus the resident set before. The
    workspace that grpo_fast keeps between calls is released before, so it is included.
    `page_faults` counts the page faults of this call.
    """
    step = as_step(step)
    gc.collect()
    if step.reset is not None:
        step.reset()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = gradient_bytes(step.run()) - step.owned_bytes
        return {"workspace_mib": (torch.cuda.max_memory_allocated() - before - gradients) / MIB}
    drop_workspace()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = gradient_bytes(step.run()) - step.owned_bytes
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    workspace = (resident("VmHWM") - before - gradients) / MIB
    return {"workspace_mib": workspace, "page_faults": float(faults)}


def gradient_bytes(result: Any) -> int:
    """Return the bytes of the gradients in a `Result`, or in a tuple (loss, gradient, ...)."""
    if isinstance(result, dict):
        return sum(value.nbytes for name, value in result.items() if name.startswith("grad_"))
    return 0 if result is None else sum(value.nbytes for value in result[1:])


def resident(field: str) -> int:
    """Return the bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"field: expected one of /proc/self/status, got {field!r}")


def hardware(device: str) -> dict[str, Any]:
    """Return the hardware that every figure must be reported with."""
    information: dict[str, Any] = {"machine": platform.machine(), "cpu": "unknown"}
    information["cores"] = os.cpu_count()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if ":" in line]
        pairs = [line.split(":", 1) for line in lines]
        fields = {key.strip(): value.strip() for key, value in pairs}
        name = fields.get("model name", "unknown")
        family = f"family {fields.get('cpu family')}, model {fields.get('model')}"
        information["cpu"] = f"{name} ({family})"
        flags = set(fields.get("flags", "").split())
        known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
        information["instructions"] = [name for name in known if name in flags]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    information["memory_gib"] = round(memory / 2**30, 1)
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        size = f"{gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} SMs"
        information["gpu"] = f"{gpu.name}, {size}"
        information["cuda"] = torch.version.cuda
    return information


def cpu_class(hardware: dict[str, Any]) -> str:
    """Return a file name part that is equal for machines with comparable figures."""
    instructions = " ".join(hardware.get("instructions", []))
    text = f"{hardware['machine']} {hardware['cpu']} {instructions}"
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def commit() -> str:
    """Return the commit of the tree, "none" if it is unknown.

    "+changes" follows if the tree differs from the commit. A tree that was copied without .git has
    its commit in the environment variable `COMMIT_VARIABLE`.
    """
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        if not found:
            return "none"
        return found + ("+changes" if git("status", "--porcelain") else "")
    except OSError:
        return "none"


def versions() -> dict[str, str]:
    """Return the versions of Python and of all compared packages."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def header(benchmark: str, device: str) -> dict[str, Any]:
    """Return the beginning of a report: benchmark, date, commit, hardware and versions."""
    return {
        "benchmark": benchmark,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(device),
        "versions": versions(),
    }
