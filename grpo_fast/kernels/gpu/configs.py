"""Block sizes of the Triton kernels, by vocabulary, dtype and architecture: a table, no autotune.

Timing-based autotune would make a run depend on the noise of its first step, and it changes the
order of the sums. Every entry is compiled in tests/kernels/test_triton_compile.py for sm_80, 90,
100, 120 and gfx942: no spills, shared memory within the device's limit. The entries were chosen by
those reports (registers, spills, tensor-core instructions), not by timings.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

# A vocabulary is cut into slices of this many columns. The width is a constant, so the cut (and
# with it the order of the sums, hence every bit of a log-probability) depends on V alone, never on
# the number of rows. A program takes one slice of 128 rows: at 2752 rows (a chunk of 1 GiB at V =
# 151936) and 4096 columns 814 of them fill 132 multiprocessors 6.2 times and the 7th round runs
# nearly empty; 2048 columns leave 5% less idle. 1024 would leave another 3% and start twice as many
# programs. A chunk of 8192 rows leaves 2% idle.
SLICE_COLUMNS = 2048

# Rows that are worked on side by side: what they hold of hidden is read again for every tile of W
# and stays in L2, with those tiles (of 5.5 slices, 11 MB at H = 4096; L2: 50 MB on an H100, 60 on
# an H200). 3072 rows of 4096: a chunk fits.
GROUP_BYTES = 24 << 20


class RowConfig(NamedTuple):
    """One program works on one row, BLOCK_V columns at a time."""

    block_v: int
    num_warps: int


class SupportConfig(NamedTuple):
    """One program works on one row, BLOCK_K named rows of BLOCK_H columns at a time."""

    block_k: int
    block_h: int
    num_warps: int


class LinearConfig(NamedTuple):
    """One program works on BLOCK_T rows and one vocabulary slice, BLOCK_V columns by BLOCK_H of the
    hidden size.

    The epilogue takes a tile of logits in pieces of `piece` columns: registers for a piece, not for
    the tile. The bits of a log-probability depend on `piece` and `block_h` and on nothing else
    here.
    """

    block_t: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int
    piece: int
    use_tma: bool = False


def architecture(device: torch.device) -> str:
    """ "sm_90", "gfx942", … of a device; "interpreter" under TRITON_INTERPRET."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    return _architecture(device.index if device.type == "cuda" and device.index is not None else -1)


@functools.cache
def _architecture(index: int) -> str:
    from triton.runtime import driver

    with torch.cuda.device(index):  # Triton names the current device; -1 leaves it
        target = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def row_config(vocab: int) -> RowConfig:
    """Blocks of the row kernels, the same for all of them: their sums then agree bit for bit.

    Eight warps take 8 columns per thread: one vector load of 16 bits, two of fp32. 16 columns spill
    (fp32 on sm_80, and 16 bits on sm_120 with Triton 3.6). A vocabulary that fits a smaller block
    takes it, so that lanes and registers are not spent on padding.
    """
    return RowConfig(1024, 4) if vocab <= 1024 else RowConfig(2048, 8)


# (architecture or "other", 16-bit inputs?, aligned?) -> blocks. "Aligned" means rows of 16-byte
# multiples, which tensor descriptors (TMA) and vector loads need; odd rows are loaded element by
# element, where a large tile spills (for fp32 already 32 x 64). 128 x 128 spills everywhere but on
# sm_90 and gfx942: on sm_100 with a soft cap, with Triton 3.6 (and Triton 3.9 fails to compile
# pieces of a tile with 8 warps there). With TMA on sm_120 Triton 3.6 writes to the stack. fp32 runs
# on the FMA units (IEEE).
_LINEAR: dict[tuple[str, bool, bool], LinearConfig] = {
    ("sm_90", True, True): LinearConfig(128, 128, 64, 8, 3, 32, use_tma=True),
    ("sm_100", True, True): LinearConfig(128, 64, 64, 4, 3, 32, use_tma=True),
    ("gfx942", True, True): LinearConfig(128, 128, 64, 8, 2, 32),
    ("other", True, True): LinearConfig(128, 64, 64, 8, 3, 64),
    ("other", True, False): LinearConfig(64, 64, 32, 8, 2, 64),
    ("other", False, True): LinearConfig(64, 64, 16, 8, 3, 64),
    ("other", False, False): LinearConfig(32, 32, 16, 4, 2, 32),
}
# Most epilogues are light enough for twice the tile: a third less traffic from L2 per product, 1/85
# instead of 1/64 byte per flop, which is what bounds a tile of 128 x 128 on Hopper. Not those that
# store exponentials under a soft cap (3 to 12 spills with Triton 3.6, 14 to 44 with 3.9), or beside
# a bias and an entropy (57 with 3.6).
_LIGHT: dict[tuple[str, bool, bool], LinearConfig] = {
    ("sm_90", True, True): LinearConfig(128, 256, 64, 8, 4, 32, use_tma=True)
}


def linear_config(dtype: torch.dtype, arch: str, *, aligned: bool, light: bool) -> LinearConfig:
    """Blocks of the hidden -> logps kernel. They depend on nothing that varies from one batch to
    the next.

    `light`: the epilogue, as above. An entry of `_LIGHT` has the `piece` and `block_h` of its
    neighbour in `_LINEAR`.
    """
    key = arch, dtype in (torch.bfloat16, torch.float16), aligned
    return (_LIGHT.get(key) if light else None) or _LINEAR.get(key) or _LINEAR[("other", *key[1:])]


# Rows of logits in a sampler's support: tens to hundreds of them.
RAGGED = RowConfig(256, 2)
# As many columns of a row of hidden and of its slope as 16 warps hold in registers.
SUPPORT_COLUMNS = 8192


def support_config(width: int, dtype: torch.dtype, *, aligned: bool) -> SupportConfig:
    """Blocks of the kernel that reads the rows of W in a support, by the columns of W.

    A thread reads 128 bytes of W at a time: two programs of 4096 columns then have 64 KiB under way
    on a multiprocessor. A quarter of that where each number needs an address of its own.
    """
    block_h = max(1 << (width - 1).bit_length(), 128)
    num_warps = min(max(block_h // 512, 4), 16)
    numbers = 32 * num_warps * (128 // dtype.itemsize if aligned else 16)
    return SupportConfig(min(max(numbers // block_h, 1), 32), block_h, num_warps)


def sums_config(*, aligned: bool) -> SupportConfig:
    """Blocks of the kernel that sums named rows, 1024 columns at a time: a row of dW that every
    token names (a line break) is shared by several programs.
    """
    return SupportConfig(8 if aligned else 4, 1024, 4)
