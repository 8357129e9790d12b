"""The parts of a GPU session. Each part has commands and a time limit in seconds.

A session has two visits. A visit is one loan of a GPU machine. Visit 1 checks that the kernels are
right, and measures the values for which bars.py has thresholds. Visit 2 measures other libraries
and hybrid models. All other parts run only if the command line names them.

A training step with a context as long as bars.py demands is in no part. With 561,000 tokens, the
attention of Qwen2.5-0.5B alone needs 6e16 flop, which take more than two minutes on an H100.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from benchmarks import ROOT

PY = sys.executable
SESSION_SECONDS = 900  # for both visits, including the time in which the machines start
START_SECONDS = 120  # assumed time in which a machine starts
# A call is one command on the GPU machine. It transfers at most 64 MiB. This is the assumed time of
# a call that only transfers a piece of the wheels.
CARRY_SECONDS = 30
SLACK_SECONDS = 60  # must be left after both visits, even if every part takes its limit
VISIT_SECONDS = {1: 370, 2: 170}
# Number of pieces of the wheels that each visit needs. Visit 1 needs the wheels of `wheels.sh`, and
# visit 2 those of `wheels.sh --cute`. The call that runs the visit transfers the last piece.
PIECES = {1: 1, 2: 3}
BY_NAME = 0  # the visit number of a part that runs only if the command line names it
PROCESSES = 16  # processes that run tests, one for each core of the machine
OURS = "--providers grpo_fast --backend auto"
# Benchmark commands for all shapes for which bars.py has a threshold.
LARGE = f"--shapes 8192,qwen3-8b {OURS} --budget 0.7"
BARS = (
    f"linear_grpo_loss linear_logps {LARGE} --active 1.0 0.2",
    "linear_grpo_loss linear_logps --shapes 8192,qwen3-1.7b 1024,qwen3-1.7b 8192,qwen2.5-0.5b "
    f"1024,qwen2.5-0.5b {OURS} --budget 0.7",
    f"logits_grpo_loss_inplace logits_grpo_loss --shapes 8192,64,151936 {OURS} --budget 0.5",
    f"linear_grpo_loss {LARGE} --active 0.2 --inactive zero-advantage",
)
PEERS = (
    "linear_grpo_loss --shapes 8192,qwen3-8b 8192,qwen3-1.7b 8192,qwen2.5-0.5b --budget 1",
    "linear_logps --shapes 8192,qwen3-8b --budget 0.5",
    "logits_grpo_loss --shapes 8192,64,151936 --budget 0.5",
)
SUPPORT = (
    f"linear_grpo_loss linear_logps --support 50 {LARGE}",
    f"linear_grpo_loss_frozen --support 50 {LARGE}",
)
SMALL = "linear_grpo_loss --shapes 1024,qwen2.5-0.5b --budget 0.5"
FROZEN = (
    "linear_grpo_loss_frozen --shapes 8192,qwen2.5-0.5b 8192,qwen3-8b 8192,qwen3-1.7b "
    "--budget 0.3 --backend auto --providers grpo_fast TRL torch.compile",
)
# Heads whose kernels are written in the CuTe-DSL. QuACK computes only a cross entropy.
HEADS = (
    "linear_cross_entropy linear_grpo_loss --shapes 8192,qwen3-8b 8192,qwen2.5-0.5b "
    "--budget 0.3 --backend auto --providers grpo_fast QuACK SM90",
)
# TRL 1.15 reports for gemma-3-1b on 79 GiB that its Triton head raises the longest sequence that
# can be scored from 28,672 to 114,688 tokens. This part measures the time and the peak of the head
# at these lengths, with random weights.
LONGEST = (
    "linear_logps linear_grpo_loss --shapes 28672,gemma-3-1b 114688,gemma-3-1b --budget 0.3 "
    "--backend auto --providers grpo_fast TRL",
)
STEPS = ((8192, 512, 16), (1500, 250, 16), (150, 200, 8))  # prompt, completion, group
# The limits of the parts below are estimates. In the visit of 2026-11-26, a process needed 8 s
# before its first kernel, three shapes with all peers took 115 s, and the long step took 82 s. It
# is assumed that compiling a CuTe-DSL kernel takes 10 s, and that the exact results of 114,688 rows
# take 10 s.


class Part(NamedTuple):
    """Commands that belong together.

    Attributes:
        visit: 1, 2, or `BY_NAME`.
        seconds: time limit for all commands together.
        commands: command lines. If `measures` is True, `--out FILE` is added to each of them.
        dry: command lines for a machine without a GPU, which check that the part would start.
        measures: True if the commands write reports.
        environment: environment variables of the commands.
        stops: True for a part that begins every visit, and that ends the visit if it fails.
    """

    visit: int
    seconds: int
    commands: list[list[str]]
    dry: list[list[str]]
    measures: bool = True
    environment: dict[str, str] = {}
    stops: bool = False


def parts() -> dict[str, Part]:
    """Return all parts, keyed by name. The most valuable part of each visit comes first."""
    long = f"linear_grpo_loss --shapes 131072,qwen3-8b {OURS} --budget 2"
    return {
        "smoke": own(1, 25, "smoke")._replace(stops=True),
        "bars": bench(1, 50, *BARS),
        "small": bench(1, 35, SMALL),
        "profile": own(1, 20, "kernel_times"),
        "steps": steps(1, 65, STEPS[1:]),
        "support": bench(1, 30, *SUPPORT),
        "tests": tests(1, 100),
        "rows": own(1, 45, "row_candidates"),
        "frozen": bench(2, 40, *FROZEN),
        "heads": bench(2, 50, *HEADS),
        "hybrid": trees(2, 25, "--hybrid"),
        "longest": bench(2, 30, *LONGEST),
        "step": steps(BY_NAME, 95, STEPS[:1]),
        "peers": bench(BY_NAME, 130, *PEERS),
        "memcheck": sanitize(BY_NAME, 60, "memcheck"),
        "races": sanitize(BY_NAME, 240, "racecheck", "synccheck"),
        "trees": trees(BY_NAME, 40),
        "long": bench(BY_NAME, 60, long),
    }


def of_visit(every: dict[str, Part], visit: int) -> dict[str, Part]:
    """Return the parts of a visit.

    Every visit includes the smoke test, because every visit gets a fresh machine.
    """
    return {name: part for name, part in every.items() if part.stops or part.visit == visit}


def bench(visit: int, seconds: int, *arguments: str) -> Part:
    """Return a part that runs several benchmarks in one process, which imports torch only once."""
    lines = [f"{line} --device cuda" for line in arguments]
    command = [PY, "-m", "benchmarks.gpu.several", *lines]
    return Part(visit, seconds, [command], [[*command, "--dry"]])


def own(visit: int, seconds: int, module: str) -> Part:
    """Return a part that runs a module of this folder. Its dry run uses tiny sizes on a CPU."""
    command = [PY, "-m", f"benchmarks.gpu.{module}"]
    return Part(visit, seconds, [command], [[*command, "--device", "cpu"]])


def steps(visit: int, seconds: int, sizes: tuple[tuple[int, int, int], ...]) -> Part:
    """Return a part that compares our training step, which shares prompts, to TRL's step."""
    command = [PY, "-m", "benchmarks.trainers.step", "--providers", "shared", "TRL"]
    where = "--device cuda --model-config qwen2.5-0.5b --rounds 4 --budget 2"
    commands = [
        [*command, *f"{where} --prompt {p} --completion {c} --group {g}".split()]
        for p, c, g in sizes
    ]
    return Part(visit, seconds, commands, [[*command, *"--device cpu --quick --layers 1".split()]])


def trees(visit: int, seconds: int, *options: str) -> Part:
    """Return a part that times trees of samples against plain packed rows."""
    command = [PY, "-m", "benchmarks.trainers.trees", *options]
    timed = [*command, *"--device cuda --rounds 9 --budget 1".split()]
    return Part(visit, seconds, [timed], [[*command, *"--quick --device cpu".split()]])


def tests(visit: int, seconds: int) -> Part:
    """Return a part that runs the GPU tests. At the limit, pytest still prints the tracebacks."""
    pytest = [PY, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", *gpu_tests()]
    spread = ["-v", "-n", str(PROCESSES), "--dist", "worksteal"]
    # Use --foreground, so that pytest stays in the process group that ends with the part.
    timed = ["timeout", "--foreground", "--signal=INT", str(seconds - 10), *pytest, *spread]
    # Run few examples of the fuzz test. It is a single test, so one process runs all of its
    # examples, and more of them would take longer than the limit.
    few = {"GRPO_FAST_FUZZ_CASES": "40"}
    return Part(visit, seconds, [timed], [[*pytest, "--collect-only", "-q"]], False, few)


def sanitize(visit: int, seconds: int, *tools: str) -> Part:
    """Return a part that runs every operation at small shapes under compute-sanitizer."""
    # Set PYTORCH_NO_CUDA_MEMORY_CACHING, so that each tensor is allocated separately. In torch's
    # caching allocator, an access past the end of a tensor would hit the next block and remain
    # undetected.
    operations = "linear_grpo_loss linear_logps linear_logps_backward logits_grpo_loss_inplace"
    options = "--shapes 64,64,512 64,72,1003 --device cuda --verify-only --backend triton"
    checked = [PY, "-m", "benchmarks", *operations.split(), *options.split()]
    checked += ["--providers", "grpo_fast"]
    flags = ["--error-exitcode", "9", "--target-processes", "all"]
    commands = [["compute-sanitizer", "--tool", tool, *flags, *checked] for tool in tools]
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Part(visit, seconds, commands, [[*checked, "--dry"]], False, environment)


def gpu_tests() -> list[str]:
    """Return the files of all GPU tests. Files with short names test the loss and come first."""
    tests = ROOT / "tests"
    found = {*tests.rglob("test_gpu*.py"), *(tests / "gpu").glob("test_*.py")}
    found |= {x for x in (tests / "loss").glob("test_*.py") if "EVERYWHERE" in x.read_text()}
    return sorted((str(path.relative_to(ROOT)) for path in found), key=lambda f: (len(f), f))
