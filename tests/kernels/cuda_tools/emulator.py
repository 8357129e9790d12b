"""csrc/cuda/forward.cu on a CPU, thread by thread, with the functions of emulated.h in the place of
Hopper's instructions.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from grpo_fast.kernels.cpu import loader
from grpo_fast.kernels.gpu import forward_cuda
from grpo_fast.kernels.gpu.configs import CudaConfig, cuda_config
from grpo_fast.kernels.gpu.problem import Problem

TOOLS = Path(__file__).resolve().parent
FLAGS = ["-std=c++20", "-O2", "-pthread", "-Wno-unknown-pragmas"]


@functools.cache
def program(config: CudaConfig, *, store: bool, flags: tuple[str, ...] = ()) -> Path:
    """The kernel of a configuration, as a program of the host."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-fast-emulator-"))
    (folder / "constants.h").write_text(forward_cuda.constants(config, store=store))
    includes = [f"-I{path}" for path in (folder, loader.source_folder() / "cuda", TOOLS)]
    command = [*loader.compiler(), *FLAGS, *flags, *includes, str(TOOLS / "forward.cpp")]
    done = subprocess.run(
        [*command, "-o", str(folder / "forward")], capture_output=True, text=True, timeout=300
    )
    if done.returncode:  # the word of `python -m tests.mutation` for a bug that is none
        raise RuntimeError(f"the compiler failed with status {done.returncode}\n{done.stderr}")
    return folder / "forward"


def sweep(
    p: Problem, stored: tuple[Tensor, Tensor] | None, *, clusters: int = 2, seed: int = 0,
    flags: tuple[str, ...] = (),
) -> Tensor:  # fmt: skip
    """In the place of `forward_cuda.sweep`, for tensors on the CPU."""
    config = cuda_config()
    scalars, (rows, depth) = forward_cuda.scalars_of(p, config), p.hidden.shape
    raw_target = stored[1] if stored else torch.zeros(rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "problem").write_bytes(bytes(scalars))
        tensors = {"hidden": p.hidden, "weight": p.weight, "target": p.target_ids}
        for file, tensor in {**tensors, "raw_target": raw_target}.items():
            raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            (folder / file).write_bytes(raw)
        executable = program(config, store=stored is not None, flags=flags)
        done = subprocess.run(
            [str(executable), name, *map(str, (depth, clusters, seed))],
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        if stored:
            matrix = from_file(folder / "matrix", torch.bfloat16).view(rows, -1)
            columns = p.weight.shape[0]
            assert matrix[:, columns:].isnan().all(), "written beyond the vocabulary"
            stored[0].copy_(matrix[:, :columns])
        return from_file(folder / "partial", torch.float32).view(3, -1, rows)


def from_file(file: Path, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(file.read_bytes()), dtype=dtype)


def partial_sums(
    p: Problem, out: Tensor | None, raw_target: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """`forward_cuda.partial_sums` with the emulated kernel."""
    stored = None if out is None else (out, raw_target)
    yield slice(0, p.hidden.shape[0]), sweep(p, stored)
