"""What a GPU session consists of: parts with a time limit each, in three calls of nine and a half
minutes.

Call 1 measures what is right and what it takes compared with the limits. Call 2 has the peers,
whole steps and all tests. Call 3 has tuning, the memory checker, attention and long sequences; it
begins with what the first two left undone. Parts of no call run by their name alone.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from benchmarks import ROOT

PY = sys.executable
BENCH = [PY, "-m", "benchmarks"]
CALL_SECONDS = 570
BY_NAME = 0  # the call of a part that no call runs
OURS = "--providers grpo_fast --backend auto"
# Of the first file of tests: shapes, weights, bits.
FIRST_TESTS = (
    "every_shape", "weights_against_fp64", "weights_of_unlikely_targets_and_of_nan",
    "a_row_does_not_depend_on_its_batch",
)  # fmt: skip
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
    tests, attention_tests = gpu_tests()
    long = f"linear_grpo_loss --model qwen3-8b --tokens 131072 {OURS} --budget 2"
    return {
        # Right or wrong is known in 20 s; a compiler that finds nothing in its cache needs more.
        "smoke": own(1, 120, "smoke")._replace(stops=True),
        "bars": bench(1, 150, *bars()),
        "gemms": own(1, 40, "gemms"),
        "one-chunk": one_chunk(1, 50),
        "profile": own(1, 40, "kernel_times"),
        "first-tests": sharded(1, 60, [f"{tests[0]}::test_{name}" for name in FIRST_TESTS]),
        "peers": bench(2, 180, *peers()),
        "steps": steps(2, 85),
        "tests": sharded(2, 185, tests),
        "tune": tune(3, 120),
        "memcheck": sanitize(3, 60, "memcheck"),
        "attention-tests": sharded(3, 45, attention_tests),
        "attention": bench(3, 40, "attention"),
        "long": bench(3, 60, long),
        "support": support(3, 70),
        "sparse": own(3, 30, "sparse"),
        "rollout": bench(3, 25, "rollout"),
        "races": sanitize(BY_NAME, 240, "racecheck", "synccheck"),
        "trl": bench(BY_NAME, 60, "trl"),
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


def one_chunk(call: int, seconds: int) -> Part:
    """A workspace that holds one chunk, and one of 1 GiB, at the hidden sizes where they differ."""
    command = [PY, "-m", "benchmarks.gpu.tune", "--workspaces"]
    return Part(call, seconds, [command], [[*command, "--dry"]])


def steps(call: int, seconds: int) -> Part:
    """The step with shared prompts against TRL's, at the sizes that have a bar."""
    command = [PY, "-m", "benchmarks.trainers.step", "--providers", "shared", "TRL"]
    where = "--device cuda --model-config qwen2.5-0.5b --rounds 5 --budget 3"
    commands = [
        [*command, *f"{where} --prompt {p} --completion {c} --group {g}".split()]
        for p, c, g in STEPS
    ]
    return Part(call, seconds, commands, [[*command, *"--device cpu --quick --layers 1".split()]])


def support(call: int, seconds: int) -> Part:
    """Rows in a sampler's support against the dense head."""
    command = [PY, "-m", "benchmarks.trainers.support", "--device", "cuda"]
    cases = [f"8192,4096,151936,{k}" for k in (50, 512)]
    return Part(call, seconds, [[*command, "--cases", *cases]], [[*command, "--help"]])


def sharded(call: int, seconds: int, files: list[str]) -> Part:
    command = [PY, "-m", "benchmarks.gpu.shards", "--processes", "8", *files]
    return Part(call, seconds, [command], [[*command, "--dry"]], measures=False)


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


def gpu_tests() -> tuple[list[str], list[str]]:
    """The tests that need a GPU, the general ones first; those of the attention."""
    tests = ROOT / "tests"
    found = {*tests.rglob("test_gpu*.py"), *(tests / "gpu").glob("test_*.py")}
    files = sorted((str(path.relative_to(ROOT)) for path in found), key=lambda f: (len(f), f))
    attention = [file for file in files if "attention" in file]
    return [file for file in files if file not in attention], attention
