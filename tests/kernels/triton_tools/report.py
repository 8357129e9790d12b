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

from benchmarks.gpu.fake_driver import compile_launches
from benchmarks.gpu.resources import SHARED_LIMIT, resources
from tests.kernels.triton_tools.shipped import shipped


def entries(arch: str) -> list[dict]:
    """Return one entry for each kernel that is compiled for `arch`.

    `benchmarks.gpu.resources.resources` documents the fields of an entry.
    """
    found = []
    for name, call in shipped(arch):
        with compile_launches(arch) as compiled:
            call()
        for kernel, result in compiled:
            cost = resources(result, counts_all=False)
            about = {"name": name, "kernel": kernel, "limit": SHARED_LIMIT[arch]}
            found.append(about | cost._asdict())
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        json.dump(entries(sys.argv[1]), sys.stdout)
