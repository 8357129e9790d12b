"""Resources of a compiled kernel: registers, spills, shared memory and tensor-core instructions.

On NVIDIA, the tools in the Triton wheel extract them from the binary. On AMD, the metadata of the
assembly contains them.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton

# Maximum shared memory of a program in bytes, by architecture. The compiler does not check it.
SHARED_LIMIT = {
    "sm_80": 166912,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "gfx942": 65536,
}
# The counted instructions: matrix products (on Hopper, on older GPUs, on Blackwell), TMA loads and
# stores, and fp32 multiply-adds.
COUNTED = ("HGMMA", "HMMA", "UTCHMMA", "UTMALDG", "UTMASTG", "FFMA")


class Resources(NamedTuple):
    """Resources of a compiled kernel.

    Attributes:
        registers: registers of a thread.
        spills: number of instructions that load or store spilled registers. On AMD, the number of
            spilled registers.
        shared: shared memory of a program in bytes.
        matrix: number of matrix-product instructions.
        counts: number of instructions by name. On AMD, the numbers of registers and spilled
            registers.
    """

    registers: int
    spills: int
    shared: int
    matrix: int
    counts: dict[str, int]


def _tool(cubin: bytes, name: str, *arguments: str) -> str:
    """Return the output of a tool in the Triton wheel for a binary."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, *arguments, file.name], capture_output=True, text=True)
    return done.stdout + done.stderr


def resources(kernel: Any, *, counts_all: bool = True) -> Resources:
    """Return the resources of a compiled kernel.

    Args:
        kernel: the result of `kernel.warmup`.
        counts_all: True counts the instructions of every kernel. False leaves all counts at 0 for a
            kernel without local memory, matrix products and bulk copies. This is faster, because
            disassembling a kernel takes a third of a second.
    """
    if "cubin" not in kernel.asm:
        return _amd(kernel)
    has_more = re.search("mma|cp.async.bulk", kernel.asm["ptx"]) is not None
    return of_cubin(kernel.asm["cubin"], kernel.metadata.shared, counts_all or has_more)


@functools.cache
def of_cubin(cubin: bytes, shared: int, counts_all: bool = True) -> Resources:
    """Return the resources of an NVIDIA kernel, given its binary and its shared memory in bytes."""
    said = _tool(cubin, "cuobjdump", "-res-usage")
    usage = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if not counts_all and usage and usage[2] == "0" and "LOCAL:0" in said:
        return Resources(int(usage[1]), 0, shared, 0, dict.fromkeys((*COUNTED, "LDL", "STL"), 0))
    sass = _tool(cubin, "nvdisasm")
    if usage is None or "EXIT" not in sass:
        raise RuntimeError(
            "cubin: expected the disassembler of the Triton wheel to read it, got no code"
        )
    counts = {name: len(re.findall(rf"\b{name}\b", sass)) for name in (*COUNTED, "LDL", "STL")}
    matrix = counts["HGMMA"] + counts["HMMA"] + counts["UTCHMMA"]
    return Resources(int(usage[1]), counts["LDL"] + counts["STL"], shared, matrix, counts)


def _amd(kernel: Any) -> Resources:
    text = kernel.asm["amdgcn"]
    numbers = {
        name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
        for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    }
    spills = numbers["vgpr_spill_count"]
    return Resources(
        numbers["vgpr_count"], spills, kernel.metadata.shared, text.count("v_mfma"), numbers
    )
