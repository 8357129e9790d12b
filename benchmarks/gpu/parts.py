"""What a GPU session consists of: parts with a time limit each, in three calls of nine minutes.

Call 1 is ours beside the limits, call 2 the peers, call 3 what was mended: the parts of the first
two that are not done, in their order, and the slow checkers.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from benchmarks import ROOT

PY = sys.executable
BENCH = [PY, "-m", "benchmarks"]
CALL_SECONDS = 540
OURS = "--providers grpo_fast --backend auto"
STEPS = ((8192, 512, 16), (1500, 250, 16), (150, 200, 8))  # prompt, completion, group


class Part(NamedTuple):
    """Some commands, the seconds they may take together, and the call that they belong to.

    A part that measures gets `--out FILE` (a benchmark of trainers/ `--json FILE`; pytest nothing);
    a `dry` command shows that the part would start.
    """

    call: int
    seconds: int
    commands: list[list[str]]
    dry: list[list[str]]
    measures: bool = True
    environment: dict[str, str] = {}
    stops: bool = False  # run first in every call, which ends where it fails


def parts() -> dict[str, Part]:
    """Most valuable first."""
    tests, attention_tests, forward_tests = gpu_tests()
    long = f"linear_grpo_loss --model qwen3-8b --tokens 131072 {OURS} --budget 2"
    return {
        # Right or wrong is known in 20 s; a compiler that finds nothing in its cache may need more.
        "smoke": own(1, 40, "smoke")._replace(stops=True),
        "bars": bench(1, 90, *bars()),
        "profile": own(1, 35, "kernel_times"),
        "gemms": own(1, 35, "gemms"),
        "tune": tune(1, 130),
        "tests": sharded(1, 210, tests),
        "peers": bench(2, 180, *peers()),
        "long": bench(2, 60, long),
        "attention-tests": sharded(2, 45, attention_tests),
        "attention": bench(2, 40, "attention"),
        "steps": steps(2, 85),
        "rollout": bench(2, 25, "rollout"),
        "memcheck": sanitize(2, 60, "memcheck"),
        # A candidate that no GPU has run: it may hang, and so comes when all else is measured.
        "forward-tests": one_by_one(3, 60, forward_tests),
        "forward": own(3, 60, "forward"),
        "support": support(3, 80),
        "races": sanitize(3, 240, "racecheck", "synccheck"),
        "trl": bench(3, 60, "trl"),
    }


def of_call(every: dict[str, Part], call: int) -> list[str]:
    """Names of the parts of one call; a call may find a fresh machine, so it is tested in each."""
    return [name for name, part in every.items() if part.stops or part.call == call]


def bars() -> list[str]:
    """Ours and the limits at every shape that has a bar."""
    both = "linear_grpo_loss linear_logps"
    large = f"--model qwen3-8b --tokens 8192 {OURS} --budget 0.7"
    return [
        f"{both} {large} --active 1.0 0.2",
        f"{both} --model qwen3-1.7b qwen2.5-0.5b --tokens 8192 1024 {OURS} --budget 0.7",
        f"logits_grpo_loss_inplace logits_grpo_loss --shapes 8192,64,151936 {OURS} --budget 0.5",
        f"linear_grpo_loss {large} --active 0.2 --inactive zero-advantage",
    ]


def peers() -> list[str]:
    return [
        "linear_grpo_loss --model qwen3-8b qwen3-1.7b qwen2.5-0.5b --tokens 8192 --budget 1",
        "linear_grpo_loss --model qwen2.5-0.5b --tokens 1024 --budget 0.5",
        "linear_logps linear_logps_backward --model qwen3-8b --tokens 8192 --budget 0.5",
        "logits_grpo_loss --shapes 8192,64,151936 --budget 0.5",
    ]


def bench(call: int, seconds: int, *arguments: str) -> Part:
    commands = [[*BENCH, *line.split(), "--device", "cuda"] for line in arguments]
    return Part(call, seconds, commands, [[*command, "--dry"] for command in commands])


def own(call: int, seconds: int, module: str) -> Part:
    """A module of this folder; without a GPU it takes tiny sizes and the CPU."""
    command = [PY, "-m", f"benchmarks.gpu.{module}"]
    return Part(call, seconds, [command], [[*command, "--device", "cpu"]])


def tune(call: int, seconds: int) -> Part:
    """No setting is begun in the last third, and the candidates are compiled before."""
    command = [PY, "-m", "benchmarks.gpu.tune"]
    timed = [*command, "--seconds", str(2 * seconds // 3)]
    return Part(call, seconds, [timed], [[*command, "--dry"]])


def steps(call: int, seconds: int) -> Part:
    """The step with shared prompts against TRL's, at the sizes that have a bar."""
    where = "--model-config qwen2.5-0.5b --providers shared TRL --rounds 5 --budget 3"
    command = [PY, "-m", "benchmarks.trainers.step", *where.split()]
    commands = [
        [*command, *f"--device cuda --prompt {p} --completion {c} --group {g}".split()]
        for p, c, g in STEPS
    ]
    return Part(call, seconds, commands, [[*command, "--help"]])


def support(call: int, seconds: int) -> Part:
    """Rows in a sampler's support against the dense head."""
    command = [PY, "-m", "benchmarks.trainers.support", "--device", "cuda"]
    cases = [f"8192,4096,151936,{k}" for k in (50, 512)]
    return Part(call, seconds, [[*command, "--cases", *cases]], [[*command, "--help"]])


def sharded(call: int, seconds: int, files: list[str]) -> Part:
    command = [PY, "-m", "benchmarks.gpu.shards", "--processes", "8", *files]
    return Part(call, seconds, [command], [[*command, "--dry"]], measures=False)


def one_by_one(call: int, seconds: int, files: list[str]) -> Part:
    """Tests of which one may hang: each is named before it starts."""
    command = [PY, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu", *files]
    return Part(call, seconds, [command], [[*command, "--collect-only"]], measures=False)


def sanitize(call: int, seconds: int, *tools: str) -> Part:
    """Every operation under compute-sanitizer, a hundred times slower: small shapes.

    Without torch's caching allocator each tensor is an allocation of its own, so that an access
    past its end is seen.
    """
    operations = "linear_grpo_loss linear_logps linear_logps_backward logits_grpo_loss_inplace"
    options = "--shapes 64,64,512 64,72,1003 --device cuda --verify-only --backend triton"
    checked = [*BENCH, *operations.split(), *options.split(), "--providers", "grpo_fast"]
    flags = ["--error-exitcode", "9", "--target-processes", "all"]
    commands = [["compute-sanitizer", "--tool", tool, *flags, *checked] for tool in tools]
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Part(call, seconds, commands, [[*checked, "--dry"]], False, environment)


def gpu_tests() -> tuple[list[str], list[str], list[str]]:
    """The tests that need a GPU; those of the attention, and of the forward kernel in CUDA C++,
    which parts of their own run.
    """
    tests = ROOT / "tests"
    found = {*tests.rglob("test_gpu*.py"), *(tests / "gpu").glob("test_*.py")}
    files = sorted(str(path.relative_to(ROOT)) for path in found)
    attention, forward = ([f for f in files if name in f] for name in ("attention", "forward_cuda"))
    return [file for file in files if file not in attention + forward], attention, forward
