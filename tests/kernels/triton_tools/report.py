"""Report of the resources of every shipped kernel, as JSON for one architecture.

    python -m tests.kernels.triton_tools.report sm_90

The resources are registers, spills, shared memory and matrix instructions. The script needs no GPU
and must run without TRITON_INTERPRET. It uses an empty compiler cache, so it takes minutes.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

from triton.runtime import driver

from benchmarks.gpu.host import TARGETS, TargetOnlyDriver, patched_launches
from tests.kernels.triton_tools.resources import SHARED_LIMIT, resources
from tests.kernels.triton_tools.shipped import shipped


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
