"""Measurement of time and memory, and the header and the file of every report."""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shutil
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
SLOW = 5.0  # seconds; if the first call of a step takes longer, it already counts as a sample
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
# The clock of all timings on a CPU. "process" is the CPU time of this process, on which other
# programs have little effect.
clock = "wall"
PACKAGES = (
    "torch", "triton", "transformers", "trl", "liger-kernel", "cut-cross-entropy",
    "nvidia-cutlass-dsl", "verl", "flash-attn", "flash-attn-3", "flash-attn-4", "numpy",
)  # fmt: skip

# Environment variables for glibc's allocator. By default, glibc returns a large block to the
# operating system when it is freed, so every call causes the same page faults again. With these
# variables, glibc keeps freed blocks and requests huge pages. Times with both allocators are
# reported, because page faults may take most of the time of a peer.
FAIR_ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=68719476736"
    ":glibc.malloc.mmap_threshold=68719476736"
    ":glibc.malloc.hugetlb=1"
}
# Results of a step. The possible keys are loss (0-d), logps (N,), grad_hidden (N, H), grad_weight
# (V, H) and grad_logits (R, V).
Result = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation that is verified and timed.

    Attributes:
        run: function that does the work and returns the results. It may overwrite an input with a
            result, such as the logits with their gradient.
        reset: function that is called before each run, but not timed. It restores the input that
            `run` overwrites.
        owned_bytes: size of the gradients that `run` writes over an input. They need no additional
            memory, so `peak_memory` does not subtract them from the peak.
        path: name of the code that a library chose, if it has several, for the report.
    """

    run: Callable[[], Any]
    reset: Callable[[], Any] = lambda: None
    owned_bytes: int = 0
    path: str = ""

    def __call__(self) -> Any:
        self.reset()
        return self.run()


def seconds(step: Step | Callable[[], Any], calls: int, device: str) -> float:
    """Return the mean time of a call in seconds, measured over `calls` calls.

    On a GPU, CUDA events measure the time. On a CPU, the module variable `clock` names the clock.
    """
    step = as_step(step)
    if device == "cuda":
        return _seconds_on_gpu(step, calls)
    now = CLOCKS[clock]
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
    """Return the mean time of a call in seconds, measured with CUDA events.

    Each call has its own pair of events, so the time of `reset` does not count. The host does not
    wait between calls, so the GPU always has queued work if a call takes longer on the GPU than on
    the host. One additional call comes first and is not timed. While the GPU runs it, the host
    prepares the next call. In training, the host does the same during the forward pass of the
    model.
    """
    step()
    pairs = []
    for _ in range(calls):
        step.reset()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step.run()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return sum(start.elapsed_time(stop) for start, stop in pairs) / calls / 1e3


def interleaved(
    steps: Mapping[str, Step | Callable[[], Any]], device: str, budget: float, rounds: int
) -> dict[str, dict[str, Any]]:
    """Time all steps in interleaved rounds, so that a slow phase of the machine affects all steps.

    A fast step is repeated within a round, so that its calls take about 20 ms in total. The steps
    are not warmed up, because the caller has already run them to verify them. One call of each step
    estimates its time. If this call takes longer than `SLOW`, it counts as a sample.

    Args:
        steps: the steps, keyed by name.
        device: "cpu" or "cuda".
        budget: time for each step, in seconds, without the untimed calls on a GPU.
        rounds: maximum number of samples of a step. At least 2 samples are taken, even if they
            exceed the budget.

    Returns:
        The times of each step, as returned by `spread`.
    """
    warm = {name: seconds(step, 1, device) for name, step in steps.items()}
    samples = {name: [time_] if time_ > SLOW else [] for name, time_ in warm.items()}
    for name, time_ in warm.items():
        if time_ <= SLOW:
            warm[name] = seconds(steps[name], 1, device)
    calls = {name: max(1, round(0.02 / time_)) for name, time_ in warm.items()}
    wanted = {
        name: max(2, min(rounds, int(budget / (time_ * calls[name])))) - len(samples[name])
        for name, time_ in warm.items()
    }
    total = max(wanted.values(), default=0)
    names = list(steps)
    for index in range(total):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            if (index + 1) * wanted[name] // total > index * wanted[name] // total:
                samples[name].append(seconds(steps[name], calls[name], device))
    return {name: spread(times) for name, times in samples.items()}


def measured(steps: Mapping[str, Step | Callable[[], Any]], options: Any) -> dict[str, Any]:
    """Measure the peak memory of all steps, then time them in interleaved rounds.

    Args:
        steps: the steps, keyed by name.
        options: object with the attributes `device`, `budget` and `rounds`, see `interleaved`.

    Returns:
        The times of each step, as returned by `spread`, and its peak memory (`workspace_mib`).
    """
    memory = {name: peak_memory(step, options.device) for name, step in steps.items()}
    times = interleaved(steps, options.device, options.budget, options.rounds)
    return {name: {**times[name], "workspace_mib": memory[name]} for name in steps}


def spread(samples: list[float]) -> dict[str, Any]:
    """Return the median, the spread and the minimum of the samples, and all samples, in ms.

    The spread is half the interquartile range. With fewer than four samples, it is half the
    difference between the largest and the smallest sample.
    """
    ms = sorted(sample * 1e3 for sample in samples)
    first, _, third = statistics.quantiles(ms, n=4) if len(ms) > 3 else (ms[0], 0, ms[-1])
    return {
        "median_ms": statistics.median(ms),
        "spread_ms": (third - first) / 2,
        "min_ms": ms[0],
        "samples_ms": [round(sample * 1e3, 4) for sample in samples],
    }


def peak_memory(step: Step | Callable[[], Any], device: str) -> float:
    """Return how much the memory grows at the peak of one call, in MiB.

    The returned gradients are not counted. On a GPU, the peak comes from the statistics of torch's
    allocator. On a CPU, it is the peak of the resident set after the call (VmHWM) minus the
    resident set before the call. For this, grpo_fast first releases the workspace that it keeps
    between calls, so that the call allocates it again. malloc_trim returns free pages to the
    operating system, and writing 5 to /proc/self/clear_refs resets the peak.
    """
    step = as_step(step)
    gc.collect()
    step.reset()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = gradient_bytes(step.run()) - step.owned_bytes
        return (torch.cuda.max_memory_allocated() - before - gradients) / MIB
    drop_workspace()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    gradients = gradient_bytes(step.run()) - step.owned_bytes
    return (resident("VmHWM") - before - gradients) / MIB


def allocated_peak(call: Callable[[], Any]) -> int:
    """Return the peak of the CPU memory that torch allocates during a call, in bytes."""
    gc.collect()  # if the call freed old garbage, the measured peak would be too low
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    steps = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(itertools.accumulate(steps, initial=0))


def gradient_bytes(result: Any) -> int:
    """Return the total size in bytes of the gradients in a `Result` or (loss, gradient, …)."""
    if isinstance(result, dict):
        return sum(value.nbytes for name, value in result.items() if name.startswith("grad_"))
    return 0 if result is None else sum(value.nbytes for value in result[1:])


def resident(field: str) -> int:
    """Return a memory field of /proc/self/status, such as VmRSS, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)[1]) * 1024


def hardware(device: str) -> dict[str, Any]:
    """Return the description of CPU, memory and GPU that every report contains."""
    information: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count()}
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = [line.split(":", 1) for line in lines if ":" in line]
    fields = {key.strip(): value.strip() for key, value in pairs}
    family = f"family {fields.get('cpu family')}, model {fields.get('model')}"
    information["cpu"] = f"{fields.get('model name', 'unknown')} ({family})"
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    flags = fields.get("flags", "").split()
    information["instructions"] = [name for name in known if name in flags]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    information["memory_gib"] = round(memory / 2**30, 1)
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        size = f"{gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} SMs"
        information["gpu"] = f"{gpu.name}, {size}"
        information["cuda"] = torch.version.cuda
    return information


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child process, in which Python finds this checkout."""
    search = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search), **changes}


def commit() -> str:
    """Return the commit hash of the source tree, or "none" if it is unknown.

    If there are uncommitted changes, "+changes" is appended. Reports do not count as changes,
    because every benchmark writes one. For a tree that was copied without .git, set the environment
    variable `GRPO_FAST_COMMIT` to the hash.
    """
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    if shutil.which("git") is None:
        return "none"
    head = git("rev-parse", "--short=12", "HEAD")
    changes = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return f"{head}{'+changes' if changes else ''}" if head else "none"


def versions() -> dict[str, str]:
    """Return the version of Python and of each package, or "not installed"."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def header(benchmark: str, device: str) -> dict[str, Any]:
    """Return the first fields of every report: benchmark, date, commit, hardware and versions."""
    return {
        "benchmark": benchmark,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(device),
        "versions": versions(),
    }


def write(path: Path, content: Any) -> None:
    """Write `content` as JSON. If this is interrupted, the old file remains unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(json.dumps(content, indent=1) + "\n")
    scratch.replace(path)
