"""Every shipped Triton configuration is compiled for real, without a GPU, for five architectures, and its code counted.

No spills, shared memory within the device's limit, the matrix units of that architecture in use. The configurations are
listed in tests/triton_tools/shipped.py; `python tests/triton_tools/report.py` prints the table.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from triton_tools.launcher import HAS_TRITON, OTHER_TRITON, TOOLS, run_python  # noqa: E402

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
MATRIX_UNIT = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_120": "HMMA"}


def check(arch: str, other_triton: str | None = None) -> None:
    entries = json.loads(
        run_python(str(TOOLS / "report.py"), arch, "--json", interpret=False, other_triton=other_triton)
    )
    kernels = {e["kernel"] for e in entries}
    rows = {"row_logps_kernel", "row_grad_kernel", "row_loss_kernel"}
    assert kernels == {"slice_kernel", "join_kernel", "scale_kernel"} | rows
    for e in entries:
        where = f"{arch} {e['name']} {e['kernel']}: {e}"
        assert e["spills"] == 0, where
        assert e["shared"] <= e["limit"], where
        if e["kernel"] == "slice_kernel" and "float16" in e["name"]:
            assert e["matrix"] > 0, where
        if arch == "sm_90":
            assert e["counts"]["HMMA"] == 0, where
        if e["kernel"] == "slice_kernel" and "float16" in e["name"] and arch in MATRIX_UNIT:
            assert e["counts"][MATRIX_UNIT[arch]] > 0, where
            uses_tma = e["counts"]["UTMALDG"] > 0
            assert uses_tma == (arch in ("sm_90", "sm_100") and "V=32000" in e["name"]), where


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiled_code(arch):
    check(arch)


@pytest.mark.slow
@pytest.mark.skipif(OTHER_TRITON is None, reason="GRPO_FAST_TRITON36 does not name a folder with triton 3.6")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiled_code_other_triton(arch):
    assert os.path.isdir(OTHER_TRITON)
    check(arch, OTHER_TRITON)
