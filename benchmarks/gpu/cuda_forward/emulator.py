"""forward.cu on a CPU, thread by thread, with the functions of emulated.h in the place of Hopper's
instructions and a driver that starts it: kernel.py runs as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.cuda_forward import kernel
from benchmarks.gpu.cuda_forward.kernel import FOLDER, CudaConfig
from grpo_fast.kernels.cpu import loader

FLAGS = ("-std=c++20", "-O2", "-pthread", "-Wno-unknown-pragmas")
LIBRARY, RACES = ("-shared", "-fPIC"), ("-fsanitize=thread", "-g")


@functools.cache
def built(config: CudaConfig, *, store: bool, flags: tuple[str, ...] = LIBRARY) -> Path:
    """The driver with this kernel, or with `RACES` a program."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-fast-emulator-"))
    (folder / "constants.h").write_text(kernel.constants(config, store=store))
    includes = [f"-I{path}" for path in (folder, FOLDER)]
    command = [*loader.compiler(), *FLAGS, *flags, *includes, str(FOLDER / "forward.cpp")]
    done = subprocess.run(
        [*command, "-o", str(folder / "forward")], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"the compiler failed with status {done.returncode}\n{done.stderr}")
    return folder / "forward"


class Emulator:
    """In the place of a GPU with `clusters` pairs of multiprocessors."""

    def __init__(self, monkeypatch: Any, config: CudaConfig) -> None:
        self.clusters = 2
        self.library = ctypes.CDLL(str(built(config, store=True)))
        stream, here = SimpleNamespace(cuda_stream=0), contextlib.nullcontext()
        for name, value in (
            ("architecture", lambda device: "sm_90"),
            ("compiled", self.compiled),
            ("loaded", kernel.loaded.__wrapped__),
            ("library", lambda: self.library),
        ):
            monkeypatch.setattr(kernel, name, value)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.properties)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "device", lambda device: here)

    def properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=2 * self.clusters)

    def compiled(self, config: CudaConfig, *, store: bool) -> tuple[bytes, str]:
        self.library = ctypes.CDLL(str(built(config, store=store)))
        return b"", ""
