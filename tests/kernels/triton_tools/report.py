"""Report of registers, spills, shared memory and matrix instructions of every shipped kernel.

    python tests/kernels/triton_tools/report.py [sm_90 ...] [--json]

The script needs no GPU and must run without TRITON_INTERPRET. It uses an empty compiler cache, so
it takes minutes for all architectures.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


def lines(arch: str, *, counts_all: bool = True) -> list[dict]:
    """Return one entry for each kernel that is compiled for `arch`.

    `benchmarks.gpu.resources.resources` documents the fields of an entry.
    """
    from benchmarks.gpu.fake_driver import compile_launches
    from benchmarks.gpu.resources import SHARED_LIMIT, resources
    from tests.kernels.triton_tools.shipped import shipped

    found = []
    for name, call in shipped(arch):
        with compile_launches(arch) as compiled:
            call()
        for kernel, result in compiled:
            cost = resources(result, counts_all=counts_all)
            about = {"arch": arch, "name": name, "kernel": kernel, "limit": SHARED_LIMIT[arch]}
            found.append(about | cost._asdict())
    return found


def main(arguments: list[str]) -> None:
    from benchmarks.gpu.fake_driver import TARGETS

    as_json = "--json" in arguments
    archs = [a for a in arguments if a != "--json"] or list(TARGETS)
    for arch in archs:
        entries = lines(arch, counts_all=not as_json)
        if as_json:
            print(json.dumps(entries))
            continue
        for e in entries:
            counts = " ".join(f"{k}={v}" for k, v in e["counts"].items() if v and k.isupper())
            print(
                f"{arch:7} {e['name']:36} {e['kernel']:17} "
                f"registers {e['registers']:3}  spills {e['spills']:3}  "
                f"shared {e['shared']:6}  {counts}",
                flush=True,
            )


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        main(sys.argv[1:])
