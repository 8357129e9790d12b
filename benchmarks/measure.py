"""How calls are timed and weighed, and on what machine: shared by all benchmarks."""

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
clock = "wall"  # of `seconds` on a CPU; process: its CPU time, which others on it do not stretch
PACKAGES = (
    "torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy", "quack-kernels",
    "nvidia-cutlass-dsl", "verl", "flash-attn", "flash-attn-3", "flash-attn-4", "numpy",
)  # fmt: skip

# glibc gives large blocks back to the kernel at every free, so by default each call pays for its
# page faults again. "fair" keeps them and asks for huge pages; both are reported, because a peer's
# time may be mostly page faults.
FAIR_ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=68719476736"
    ":glibc.malloc.mmap_threshold=68719476736"
    ":glibc.malloc.hugetlb=1"
}
# Some of: loss (0-d), logps (N,), grad_hidden (N, H), grad_weight (V, H), grad_logits (R, V).
Result = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Step:
    """One call that is verified and timed.

    Attributes:
        run: does the work, returns fresh results (or, in place, the buffer it was given).
        reset: run before each call and outside of its time: gives `run` back the input that it
            overwrites.
        owned_bytes: bytes of the results that lie in memory which was there before the call.
    """

    run: Callable[[], Result]
    reset: Callable[[], None] | None = None
    owned_bytes: int = 0

    def __call__(self) -> Result:
        if self.reset is not None:
            self.reset()
        return self.run()


def seconds(step: Step | Callable[[], Any], calls: int, device: str) -> float:
    """Time of one call, averaged over `calls`: wall time, on a GPU the device's own clock."""
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
    """Between events around each call: resets stay out, and the queue never runs dry."""
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
    """Times of every step, in rounds of all, so that a slow minute of the machine hits all alike.

    A step gets as many rounds as `budget` seconds hold, at least `minimum` and at most `rounds`,
    spread evenly over the whole time; one of microseconds is repeated within a round until it takes
    20 ms. The steps have run before (they were verified), so the call that tells how long one takes
    counts as a sample when it is a slow one.
    """
    warm = {name: seconds(step, 1, device) for name, step in steps.items()}
    samples = {name: [time_] if time_ > SLOW else [] for name, time_ in warm.items()}
    warm = {
        name: time_ if time_ > SLOW else seconds(steps[name], 1, device)
        for name, time_ in warm.items()
    }
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
    """Median and half the interquartile range (below four samples half the range), in ms."""
    ordered = sorted(samples)
    if len(ordered) < 4:
        half = (ordered[-1] - ordered[0]) / 2
    else:
        first, _, third = statistics.quantiles(ordered, n=4)
        half = (third - first) / 2
    return {
        "median_ms": statistics.median(ordered) * 1e3,
        "spread_ms": half * 1e3,
        "min_ms": ordered[0] * 1e3,
    }


def peak_memory(step: Step | Callable[[], Any], device: str) -> dict[str, float]:
    """Peak MiB of one warm call beyond what was there before and the gradients it returns.

    On the CPU: free pages go back to the kernel (malloc_trim), the high-water mark of the resident
    set is reset (5 into /proc/self/clear_refs), the step runs, and VmHWM minus the resident set
    before is read. The workspace that we keep between calls is given up before, and so counted.
    `page_faults` are those of this call. On a GPU: torch's allocator statistics.
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
    before, faults = resident("VmRSS"), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = gradient_bytes(step.run()) - step.owned_bytes
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return {
        "workspace_mib": (resident("VmHWM") - before - gradients) / MIB,
        "page_faults": float(faults),
    }


def gradient_bytes(result: Any) -> int:
    """Of a `Result`, or of a tuple (loss, gradient, ...)."""
    if isinstance(result, dict):
        return sum(value.nbytes for name, value in result.items() if name.startswith("grad_"))
    return 0 if result is None else sum(value.nbytes for value in result[1:])


def resident(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"field: expected one of /proc/self/status, got {field!r}")


def hardware(device: str) -> dict[str, Any]:
    """What a figure must be quoted with."""
    information: dict[str, Any] = {
        "machine": platform.machine(),
        "cpu": "unknown",
        "cores": os.cpu_count(),
    }
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        fields = dict(
            line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line
        )
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        flags = set(fields.get("flags", "").split())
        information["cpu"] = (
            f"{fields.get('model name', 'unknown')} "
            f"(family {fields.get('cpu family')}, model {fields.get('model')})"
        )
        information["instructions"] = [
            name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags
        ]
    information["memory_gib"] = round(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
    )
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        information["gpu"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} SMs"
        )
        information["cuda"] = torch.version.cuda
    return information


def cpu_class(hardware: dict[str, Any]) -> str:
    """What two machines with comparable figures share, as part of a file name."""
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
    """Of Python and of everything compared."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def header(benchmark: str, device: str) -> dict[str, Any]:
    """What a report begins with: what was measured when, on which code and machine."""
    return {
        "benchmark": benchmark,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(device),
        "versions": versions(),
    }
