"""Block sizes of the Triton kernels, by vocabulary size, dtype and architecture.

There is no timing-based autotuning. With autotuning, the noise of the first step would influence
the block sizes, and thus the order of sums. tests/kernels/test_triton_compile.py compiles every
entry for sm_80, 90, 100, 120 and gfx942 and requires zero spills and shared memory within the
limit. The entries were chosen from the compiler's reports (registers, spills, tensor-core
instructions), not from timings.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

# Number of vocabulary columns that one program processes (for a block of 128 rows). The width is
# constant, so that the order of sums, and with it every bit of a log-probability, depends on V only
# and not on the number of rows. The value 2048 balances idle multiprocessors in the last wave of
# programs against the number of programs. With 2752 rows (a 1 GiB chunk at V = 151936), 4096
# columns would give 814 programs. On 132 multiprocessors, these are 6.2 waves, so the seventh wave
# is nearly empty. 2048 columns waste 5% less time. 1024 columns would save another 3%, but would
# double the number of programs. With 8192 rows, 2048 columns waste 2% of the time.
SLICE_COLUMNS = 2048

# Maximum size of the hidden states that are processed concurrently. They are read again for every
# tile of W, so they must stay in L2 together with the tiles of W in use (11 MB at H = 4096). L2 has
# 50 MB on an H100 and 60 MB on an H200. 24 MiB hold 3072 rows of 4096 16-bit elements.
GROUP_BYTES = 24 << 20


class RowConfig(NamedTuple):
    """Block sizes of a row kernel. One program processes one row, BLOCK_V columns at a time."""

    block_v: int
    num_warps: int


class SupportConfig(NamedTuple):
    """Block sizes of a token-set kernel.

    One program processes one row, BLOCK_K weight rows at a time.
    """

    block_k: int
    block_h: int
    num_warps: int


class LinearConfig(NamedTuple):
    """Block sizes of the kernel that computes logps from hidden states.

    A program computes BLOCK_T rows of one vocabulary slice. A tile of logits has BLOCK_V columns,
    and the GEMM advances by BLOCK_H elements of the hidden size. The epilogue processes a tile in
    pieces of `piece` columns, so that it needs registers for one piece only. The bits of a
    log-probability depend on `piece` and `block_h`, but not on the other fields.
    """

    block_t: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int
    piece: int
    use_tma: bool = False


def architecture(device: torch.device) -> str:
    """Return the device architecture, such as "sm_90" or "gfx942", or "interpreter"."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    return _architecture(device.index if device.type == "cuda" and device.index is not None else -1)


@functools.cache
def _architecture(index: int) -> str:
    from triton.runtime import driver

    with torch.cuda.device(index):  # Triton reports the current device; -1 keeps it
        target = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def row_config(vocab: int) -> RowConfig:
    """Return the block sizes of all row kernels. Equal block sizes give equal bits.

    With eight warps, a thread processes 8 columns. This takes one vector load in 16 bits, and two
    in fp32. With 16 columns per thread, registers spill (fp32 on sm_80; 16 bits on sm_120 with
    Triton 3.6). Small vocabularies use a smaller block, so that padding wastes no lanes or
    registers.
    """
    return RowConfig(1024, 4) if vocab <= 1024 else RowConfig(2048, 8)


# The block sizes of `linear_config`. The key is (architecture or "other", whether inputs have 16
# bits, whether W is aligned). "Aligned" means that the size of a row is a multiple of 16 bytes, as
# tensor descriptors (TMA) and vector loads require. The tiles were chosen so that registers do not
# spill, for these reasons:
# - A tile of 128 x 128 spills on all architectures except sm_90 and gfx942. On sm_100, it spills
#   only with a soft cap and Triton 3.6, but Triton 3.9 cannot compile pieces of a tile with 8 warps
#   there.
# - Unaligned rows are loaded element by element. Large tiles then spill, and in fp32 even 32 x 64.
# - With TMA on sm_120, Triton 3.6 uses local memory, so this architecture uses pointers.
# fp32 inputs are multiplied by FMA units, in IEEE precision.
_LINEAR: dict[tuple[str, bool, bool], LinearConfig] = {
    ("sm_90", True, True): LinearConfig(128, 128, 64, 8, 3, 32, use_tma=True),
    ("sm_100", True, True): LinearConfig(128, 64, 64, 4, 3, 32, use_tma=True),
    ("gfx942", True, True): LinearConfig(128, 128, 64, 8, 2, 32),
    ("other", True, True): LinearConfig(128, 64, 64, 8, 3, 64),
    ("other", True, False): LinearConfig(64, 64, 32, 8, 2, 64),
    ("other", False, True): LinearConfig(64, 64, 16, 8, 3, 64),
    ("other", False, False): LinearConfig(32, 32, 16, 4, 2, 32),
}
# Epilogues that need few registers use a tile of twice the size. It reduces L2 traffic, which
# limits a 128 x 128 tile on Hopper, from 1/64 to 1/85 byte per flop. Epilogues that store
# exponentials cannot use the large tile with a soft cap (3 to 12 spills with Triton 3.6, 14 to 44
# with 3.9), nor with both a bias and an entropy (57 spills with 3.6).
_LIGHT: dict[tuple[str, bool, bool], LinearConfig] = {
    ("sm_90", True, True): LinearConfig(128, 256, 64, 8, 4, 32, use_tma=True)
}


def linear_config(dtype: torch.dtype, arch: str, *, aligned: bool, light: bool) -> LinearConfig:
    """Return the block sizes of the kernel that computes logps from hidden states.

    They are the same for every batch. `light` selects the large tile for epilogues that need few
    registers. An entry of `_LIGHT` has the same `piece` and `block_h` as its counterpart in
    `_LINEAR`, so it gives the same bits.
    """
    key = arch, dtype in (torch.bfloat16, torch.float16), aligned
    return (_LIGHT.get(key) if light else None) or _LINEAR.get(key) or _LINEAR[("other", *key[1:])]


# Block sizes for the rows of token sets, which have tens to hundreds of logits.
RAGGED = RowConfig(256, 2)
# Maximum hidden size of the token-set kernel. A row of `hidden` and its slope must fit into the
# registers of 16 warps.
SUPPORT_COLUMNS = 8192


def support_config(width: int, dtype: torch.dtype, *, aligned: bool) -> SupportConfig:
    """Return the block sizes of the kernel that reads the weight rows of a token set.

    `width` is the hidden size. Each thread loads 128 bytes of W at a time, so two programs with
    4096 columns have 64 KiB in flight per multiprocessor. With unaligned weights, a thread loads a
    quarter of this, because every element needs its own address.
    """
    # Round H up, because the size of a Triton block must be a power of two.
    block_h = max(1 << (width - 1).bit_length(), 128)
    num_warps = min(max(block_h // 512, 4), 16)
    numbers = 32 * num_warps * (128 // dtype.itemsize if aligned else 16)
    return SupportConfig(min(max(numbers // block_h, 1), 32), block_h, num_warps)


def sums_config(*, aligned: bool) -> SupportConfig:
    """Return the block sizes of the kernel that sums listed rows, 1024 columns at a time.

    Several programs share a row of dW, because a common token, such as a line break, may occur in
    every set.
    """
    return SupportConfig(8 if aligned else 4, 1024, 4)
