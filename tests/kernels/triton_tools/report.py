"""Report of the resources of every shipped kernel, as JSON for one architecture.

    python -m tests.kernels.triton_tools.report sm_90

The resources are registers, spills, shared memory and matrix instructions. On NVIDIA, the tools in
the Triton wheel extract them from the binary. On AMD, the metadata of the assembly contains them.
The script needs no GPU and must run without TRITON_INTERPRET. It uses an empty compiler cache, so
it takes minutes.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.runtime import driver

from benchmarks.gpu.host import TARGETS, TargetOnlyDriver, patched_launches
from tests.kernels.triton_tools.shipped import shipped

# Maximum shared memory of a program in bytes, by architecture. The compiler does not check it.
SHARED_LIMIT = {
    "sm_80": 166912,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "gfx942": 65536,
}
# The counted instructions: matrix products (on Hopper, on older GPUs, on Blackwell), TMA loads and
# stores, and loads and stores of spilled registers.
MATRIX = ("HGMMA", "HMMA", "UTCHMMA")
SPILLS = ("LDL", "STL")
COUNTED = (*MATRIX, *SPILLS, "UTMALDG", "UTMASTG")


def _tool(cubin: bytes, name: str, *arguments: str) -> str:
    """Return the output of a tool in the Triton wheel for a binary."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, *arguments, file.name], capture_output=True, text=True)
    return done.stdout + done.stderr


def resources(kernel: Any) -> dict[str, Any]:
    """Return the resources of a compiled kernel, which is the result of `kernel.warmup`.

    Returns:
        "shared", the shared memory of a program in bytes. "spills", the number of instructions that
        load or store spilled registers, or on AMD the number of spilled registers. "matrix", the
        number of matrix-product instructions. "counts", the number of instructions by name, which
        is empty on AMD.
    """
    shared = kernel.metadata.shared
    if "cubin" not in kernel.asm:
        text = kernel.asm["amdgcn"]
        spills = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])
        return {"shared": shared, "spills": spills, "matrix": text.count("v_mfma"), "counts": {}}
    has_more = re.search("mma|cp.async.bulk", kernel.asm["ptx"]) is not None
    counts = instructions(kernel.asm["cubin"], has_more)
    spills, matrix = (sum(counts[name] for name in names) for names in (SPILLS, MATRIX))
    return {"shared": shared, "spills": spills, "matrix": matrix, "counts": counts}


@functools.cache
def instructions(cubin: bytes, has_more: bool) -> dict[str, int]:
    """Return the number of instructions of an NVIDIA kernel, by name.

    Args:
        cubin: its binary.
        has_more: whether it has matrix products or bulk copies. A kernel without them and without
            local memory is not disassembled, because that takes a third of a second.
    """
    said = _tool(cubin, "cuobjdump", "-res-usage")
    if not has_more and "STACK:0 " in said and "LOCAL:0" in said:
        return dict.fromkeys(COUNTED, 0)
    sass = _tool(cubin, "nvdisasm")
    if "EXIT" not in sass:
        raise RuntimeError(
            "cubin: expected the disassembler of the Triton wheel to read it, got no code"
        )
    return {name: len(re.findall(rf"\b{name}\b", sass)) for name in COUNTED}


def entries(arch: str) -> list[dict]:
    """Return one entry for each kernel that is compiled for `arch`.

    `resources` documents the fields of an entry.
    """
    found = []

    def warmup(kernel: Any, programs: int, *args: Any, **options: Any) -> None:
        """Compile a kernel. This function replaces the one that launches it."""
        result = kernel.warmup(*args, grid=(programs,), enable_fp_fusion=False, **options)
        about = {"name": name, "kernel": kernel.fn.__name__, "limit": SHARED_LIMIT[arch]}
        found.append(about | resources(result))

    driver.set_active(TargetOnlyDriver(TARGETS[arch]))
    with patched_launches(warmup):
        for name, call in shipped(arch):  # noqa: B007  (`warmup` reads the name)
            call()
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        json.dump(entries(sys.argv[1]), sys.stdout)
