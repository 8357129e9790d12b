"""Block sizes of the Triton kernels, by vocabulary size, dtype and architecture.

The block sizes are constants, because they determine the order of sums. If they were tuned by
timing at run time, noise in the timings could change the bits of the results. The constants were
chosen from the compiler's reports (registers, spills, tensor-core instructions).

tests/kernels/test_triton_compile.py compiles every entry for sm_80, 90, 100, 120 and gfx942. The
test requires zero register spills and checks that the shared memory does not exceed the limit.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

# Number of vocabulary columns that one program processes for a block of rows. These columns are
# called a slice. The number is constant, so that the order of sums, and with it every bit of a
# log-probability, does not depend on the number of rows. The value is a compromise: larger slices
# leave more multiprocessors idle in the last wave of programs, and smaller slices need more
# programs. For example, a 1 GiB chunk at V = 151936 has 2752 rows. On 132 multiprocessors, slices
# of 4096 columns give 6.2 waves of programs, so the seventh wave is nearly empty. Slices of 2048
# columns take 5% less time. Slices of 1024 columns would save another 3%, but would double the
# number of programs.
SLICE_COLUMNS = 2048

# Maximum size of the hidden states that are processed concurrently. Every tile of W reads them
# again, so they must stay in L2 together with the tiles of W in use. On an H100 (50 MB of L2), 8
# MiB are 2 to 4% faster than 24 MiB at H = 2048 and 4096. At H = 896, 8 MiB are 3% slower with
# stored exponentials, and 3% faster without.
GROUP_BYTES = 8 << 20


class RowConfig(NamedTuple):
    """Block sizes of a row kernel. One program processes one row, BLOCK_V columns at a time."""

    block_v: int
    num_warps: int


class SupportConfig(NamedTuple):
    """Block sizes of a kernel for token sets.

    One program processes one row of hidden states, and reads BLOCK_K rows of W at a time.
    """

    block_k: int
    block_h: int
    num_warps: int


class LinearConfig(NamedTuple):
    """Block sizes of the kernel that computes logps from hidden states.

    A program computes BLOCK_T rows of one vocabulary slice. A tile of logits has BLOCK_V columns,
    and the GEMM advances by BLOCK_H elements of the hidden size. The epilogue processes a tile in
    pieces of `piece` columns, so that only one piece needs additional registers. The bits of a
    log-probability depend on `piece` and `block_h`, but not on the other fields.

    With `flatten`, the loops over tiles and over the hidden size are one pipelined loop, so that
    the loads of the next tile overlap with the epilogue of the current tile.
    """

    block_t: int
    block_v: int
    block_h: int
    num_warps: int
    num_stages: int
    piece: int
    use_tma: bool = False
    flatten: bool = False


def architecture(device: torch.device) -> str:
    """Return the device architecture, for example "sm_90" or "gfx942".

    The result is "interpreter" if Triton interprets the kernels on the CPU.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    return _architecture(device.index if device.type == "cuda" and device.index is not None else -1)


@functools.cache
def _architecture(index: int) -> str:
    from triton.runtime import driver

    with torch.cuda.device(index):  # Triton reports the current device
        target = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def row_config(vocab: int) -> RowConfig:
    """Return the block sizes of all row kernels. Equal block sizes give equal bits.

    With eight warps, a thread processes 8 columns. It needs one vector load for 16-bit logits and
    two for fp32 logits. With 16 columns per thread, registers would spill: with fp32 logits on
    sm_80, and with 16-bit logits on sm_120 and Triton 3.6. A small vocabulary uses a smaller block,
    because the lanes of a large block would mostly process padding.
    """
    return RowConfig(1024, 4) if vocab <= 1024 else RowConfig(2048, 8)


# Block sizes that `linear_config` returns. The key is (architecture or "other", whether inputs have
# 16 bits, whether W is aligned). W is aligned if the size of a row is a multiple of 16 bytes, which
# tensor descriptors (TMA) and vector loads require. FMA units multiply fp32 inputs, in IEEE
# precision. The tile sizes were chosen so that registers do not spill:
#
# - Only sm_90 and gfx942 use a tile of 128 x 128. It would spill on all other architectures. On
#   sm_100, it would spill only with a soft cap and Triton 3.6. But Triton 3.9 cannot compile a tile
#   for sm_100 that is split into pieces and uses 8 warps.
# - Unaligned rows are loaded element by element, and large tiles then spill. In fp32, even a tile
#   of 32 x 64 spills.
# - sm_120 uses pointers instead of TMA, because with TMA, Triton 3.6 uses local memory there.
_LINEAR: dict[tuple[str, bool, bool], LinearConfig] = {
    ("sm_90", True, True): LinearConfig(128, 128, 64, 8, 3, 32, use_tma=True, flatten=True),
    ("sm_100", True, True): LinearConfig(128, 64, 64, 4, 3, 32, use_tma=True),
    ("gfx942", True, True): LinearConfig(128, 128, 64, 8, 2, 32),
    ("other", True, True): LinearConfig(128, 64, 64, 8, 3, 64),
    ("other", True, False): LinearConfig(64, 64, 32, 8, 2, 64),
    ("other", False, True): LinearConfig(64, 64, 16, 8, 3, 64),
    ("other", False, False): LinearConfig(32, 32, 16, 4, 2, 32),
}
# Larger tiles of sm_90, for 16-bit inputs, an aligned W and an epilogue that needs few registers.
# These tiles have twice as many columns, which reduces the L2 traffic from 1/64 to 1/85 byte per
# flop. On Hopper, the L2 traffic limits the speed of a 128 x 128 tile.
#
# - plain: no soft cap, bias, entropy or temperature per row. With any of these, this tile would
#   spill registers in a flattened loop. benchmarks/LOG.md has the times on an H100.
# - light: no soft cap, and no bias together with an entropy; or no exponentials are stored.
_LARGE = {
    "plain": LinearConfig(128, 256, 64, 8, 3, 32, use_tma=True, flatten=True),
    "light": LinearConfig(128, 256, 64, 8, 4, 32, use_tma=True),
}


def linear_config(dtype: torch.dtype, arch: str, *, aligned: bool, epilogue: str) -> LinearConfig:
    """Return the block sizes of the kernel that computes logps from hidden states.

    They do not depend on the batch. `epilogue` is "plain", "light" or "heavy", from few to many
    registers. The results are bitwise equal for all three, because `piece` and `block_h` are.
    """
    key = arch, dtype in (torch.bfloat16, torch.float16), aligned
    if key == ("sm_90", True, True) and epilogue in _LARGE:
        return _LARGE[epilogue]
    return _LINEAR.get(key) or _LINEAR[("other", *key[1:])]


# Block sizes for the rows of token sets, which have tens to hundreds of logits each.
RAGGED = RowConfig(256, 2)
# Maximum hidden size of the token-set kernel. One row of `hidden` and one row of slopes must fit
# into the registers of 16 warps.
SUPPORT_COLUMNS = 8192


def support_config(width: int, dtype: torch.dtype, *, aligned: bool) -> SupportConfig:
    """Return the block sizes of the kernel that reads the weight rows of a token set.

    `width` is the hidden size. Each thread loads 128 bytes of W at a time, so that two programs
    keep about 64 KiB of loads in flight on a multiprocessor. If W is unaligned, every element needs
    a separate address, and a thread loads only a quarter as much.
    """
    # Round H up, because the size of a Triton block must be a power of two.
    block_h = max(1 << (width - 1).bit_length(), 128)
    num_warps = min(max(block_h // 512, 4), 16)
    numbers = 32 * num_warps * (128 // dtype.itemsize if aligned else 16)
    return SupportConfig(min(max(numbers // block_h, 1), 32), block_h, num_warps)


def sums_config(*, aligned: bool) -> SupportConfig:
    """Return the block sizes of the kernel that sums listed rows, 1024 columns at a time.

    Several programs share one row of dW, each with 1024 of its columns. A common token, such as a
    line break, may occur in every set, and one program would take too long for its row.
    """
    return SupportConfig(8 if aligned else 4, 1024, 4)
