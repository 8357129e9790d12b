"""A forward kernel in CUDA C++ for Hopper, beside Triton's slice_kernel: a candidate, which no GPU
has run. Compiled with NVRTC, which comes with torch, when it is first called.

It becomes Hopper's default where the first GPU finds it right, and at least 5% faster than
slice_kernel with stored exponentials at two of three hidden sizes (forward.py times both);
otherwise it is deleted.

It does what slice_kernel of kernels/gpu/linear.py does for a call without options: bf16, no bias,
no soft cap, one temperature, no entropy, no stored logits. Its sums have another order, so their
last bits differ from those of slice_kernel, which takes all other calls; the rows beside one that
exponentials.py sweeps again get their exponentials from slice_kernel, too.

HBM as there, but for the sums: 12·ceil(V/block_v) bytes per row.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.patch import patched
from grpo_fast.kernels.gpu import exponentials, linear
from grpo_fast.kernels.gpu.configs import GROUP_BYTES, architecture
from grpo_fast.kernels.gpu.launch import HeadInputs, is_aligned
from grpo_fast.kernels.types import RowStats

FOLDER = Path(__file__).resolve().parent
ARCHITECTURE = "sm_90a"
BLOCK_H, WARPS, THREADS, WARP_ROWS, ROW_BYTES = 64, 8, 384, 16, 128
# The sums of this many rows at V = 151936 take 156 MB.
ROWS_AT_ONCE = 16384
LOG2E = 1.4426950408889634


class CudaConfig(NamedTuple):
    """A tile of BLOCK_T rows and BLOCK_V columns, its stages, the buffers of a warp for what it
    stores, and 2 teams that take turns with tiles or 1 that shares each.
    """

    block_t: int
    block_v: int
    stages: int
    buffers: int
    teams: int


# What fits the shared memory and spills nothing, with what a tile reads from L2 per flop when two
# blocks share a tile of W: turns at 128 x 192 1/109 byte, 128 x 128 and 64 x 256 1/85; no turns at
# 128 x 256 1/128.
CONFIGS = (
    CudaConfig(128, 192, 4, 3, 2),
    CudaConfig(128, 256, 4, 2, 1),
    CudaConfig(128, 128, 5, 2, 2),
    CudaConfig(64, 256, 4, 2, 2),
)


class Scalars(ctypes.Structure):
    """`Problem` of forward.cu."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("rows", "columns", "steps")),
        *((name, ctypes.c_int) for name in ("pairs", "column_tiles", "group")),
        *((name, ctypes.c_float) for name in ("scale", "factor")),
    ]


def takes(p: HeadInputs, out: Tensor | None, raw_target: Tensor | None, *, entropy: bool) -> bool:
    """Whether this call can go here."""
    if architecture(p.hidden.device) != "sm_90":
        return False
    temperature = p.rule.temperature
    if isinstance(temperature, Tensor) or not p.is_light or entropy:
        return False
    return (
        p.hidden.dtype == torch.bfloat16
        and p.target_ids.dtype == torch.int64
        and p.hidden.shape[1] > 0
        and is_aligned(p.weight)
        and (out is None or (raw_target is not None and is_aligned(out)))
        and p.rule.logit_scale / temperature > 0
    )


def shared_bytes(config: CudaConfig, *, store: bool) -> int:
    """Of a block: stages, buffers of the stores, barriers, and 1024 to start on a multiple."""
    stage = (config.block_t + config.block_v) * ROW_BYTES
    buffers = WARPS * config.buffers * WARP_ROWS * ROW_BYTES if store else 0
    return config.stages * stage + buffers + (2 * config.stages + 2) * 8 + 1024


def constants(config: CudaConfig, *, store: bool) -> str:
    """The tile, as forward.cu reads it."""
    names = ("kBlockT", "kBlockV", "kStages", "kBuffers", "kTeams")
    lines = [f"constexpr int {name} = {x};" for name, x in zip(names, config, strict=True)]
    return "\n".join([*lines, f"constexpr bool kStore = {str(store).lower()};\n"])


def product(columns: int) -> str:
    """wgmma() for 64 rows and some columns: D (fp32) = A·Bᵀ, or that added to D."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
DEVICE void wgmma(float (&d)[{count}], uint64_t a, uint64_t b, bool adds) {{
    asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
        "{{{registers}}}, %{count}, %{count + 1}, adds, 1, 1, 0, 0;\\n}}"
        : {operands} : "l"(a), "l"(b), "r"(int(adds)));
}}
"""


@functools.cache
def compiled(config: CudaConfig, *, store: bool) -> tuple[bytes, str]:
    """(the kernel as a cubin, what the compiler said). Takes a second; needs no GPU.

    Raises:
        ValueError: there is no NVRTC.
        RuntimeError: the sources do not compile.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ValueError(f"cuda-bindings: expected a CUDA build of torch, got {error}") from error
    body = (FOLDER / "forward.cu").read_text()
    source = '#include "ptx.h"\n' + constants(config, store=store) + product(config.block_v) + body
    headers = [(FOLDER / "ptx.h").read_bytes()], [b"ptx.h"]
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"forward.cu", 1, *headers)
    options = [f"--gpu-architecture={ARCHITECTURE}", "-std=c++17", "--fmad=false"]
    options.append("--ptxas-options=-v")
    status = nvrtc.nvrtcCompileProgram(program, len(options), [x.encode() for x in options])[0]
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.decode(errors="replace").strip("\0\n ")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"forward.cu does not compile: {status.name}\n{said}")
    cubin = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), said


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def driver(function: str, *arguments: object) -> None:
    """A call of the CUDA driver.

    Raises:
        RuntimeError: it does not succeed.
    """
    status = getattr(library(), function)(*arguments)
    if status:
        raise RuntimeError(f"{function}: expected status 0 of the CUDA driver, got {status}")


@functools.cache
def loaded(config: CudaConfig, index: int, *, store: bool) -> ctypes.c_void_p:
    """The kernel on a device, which is the current one."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuModuleLoadData", ctypes.byref(module), compiled(config, store=store)[0])
    driver("cuModuleGetFunction", ctypes.byref(function), module, b"forward")
    most_shared = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver("cuFuncSetAttribute", function, most_shared, shared_bytes(config, store=store))
    return function


def make_context_current(index: int) -> None:
    """torch's context of the device, in a thread that has called nothing on it yet."""
    context = ctypes.c_void_p()
    driver("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
        driver("cuCtxSetCurrent", context)


class TensorMap:
    """A matrix in boxes of `rows` rows and 128 bytes, which stand swizzled in shared memory."""

    def __init__(self, matrix: Tensor, rows: int) -> None:
        self.memory = ctypes.create_string_buffer(128 + 64)
        self.address = -(-ctypes.addressof(self.memory) // 64) * 64  # the driver wants 64 bytes
        sizes = (ctypes.c_uint64 * 2)(matrix.shape[1], matrix.shape[0])
        strides = (ctypes.c_uint64 * 1)(matrix.stride(0) * matrix.element_size())
        box, steps = (ctypes.c_uint32 * 2)(BLOCK_H, rows), (ctypes.c_uint32 * 2)(1, 1)
        bf16, flat, swizzle_128, promote_256, zeros = 9, 0, 3, 3, 0
        driver(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(self.address), bf16, 2,
            ctypes.c_void_p(matrix.data_ptr()), sizes, strides, box, steps, flat, swizzle_128,
            promote_256, zeros,
        )  # fmt: skip


@contextlib.contextmanager
def using(config: CudaConfig) -> Iterator[list[int]]:
    """Inside, calls that this kernel can take go to it; yields the rows of each start."""
    started: list[int] = []
    shipped = linear.statistics

    def statistics(
        p: HeadInputs,
        *,
        return_entropy: bool,
        out: Tensor | None = None,
        raw_target: Tensor | None = None,
    ) -> RowStats:
        rows = p.hidden.shape[0]
        if not (rows and takes(p, out, raw_target, entropy=return_entropy)):
            return shipped(p, return_entropy=return_entropy, out=out, raw_target=raw_target)
        lse, logps = (
            torch.empty(rows, dtype=torch.float32, device=p.hidden.device) for _ in range(2)
        )
        for first in range(0, rows, ROWS_AT_ONCE):
            part = slice(first, min(first + ROWS_AT_ONCE, rows))
            stored = None if out is None else (out[part], raw_target[part])
            some = p._replace(hidden=p.hidden[part], target_ids=p.target_ids[part])
            started.append(part.stop - part.start)
            linear.join(some, sweep(some, stored, config), (lse[part], logps[part], None))
        return lse, logps, None

    with patched(linear, statistics=statistics), patched(exponentials, statistics=statistics):
        yield started


def scalars_of(p: HeadInputs, config: CudaConfig) -> Scalars:
    (rows, depth), columns = p.hidden.shape, p.weight.shape[0]
    pair_rows, scale = 2 * config.block_t, p.rule.logit_scale / p.rule.temperature
    pairs, tiles = -(-rows // pair_rows), -(-columns // config.block_v)
    group = max(GROUP_BYTES // (pair_rows * depth * p.hidden.element_size()), 1)
    return Scalars(rows, columns, -(-depth // BLOCK_H), pairs, tiles, group, scale, scale * LOG2E)


def sweep(p: HeadInputs, stored: tuple[Tensor, Tensor] | None, config: CudaConfig) -> Tensor:
    """Start the kernel over all rows and columns: (3, tiles of columns, T) sums.

    `stored`: (T, V) bf16 which receives the exponentials, and (T,) raw logits of the targets.
    """
    device = p.hidden.device
    scalars = scalars_of(p, config)
    shape = (3, scalars.column_tiles, scalars.rows)
    partial = torch.empty(shape, dtype=torch.float32, device=device)
    # Without exponentials the kernel looks at none of their arguments.
    out, raw_target = stored or (p.hidden, partial)
    properties = torch.cuda.get_device_properties(device)
    clusters = min(properties.multi_processor_count // 2, scalars.pairs * scalars.column_tiles)
    with torch.cuda.device(device):
        make_context_current(device.index)
        function = loaded(config, device.index, store=stored is not None)
        maps = [
            TensorMap(p.hidden, config.block_t),
            TensorMap(p.weight, config.block_v // 2),
            TensorMap(out, WARP_ROWS),
        ]
        values = [ctypes.c_void_p(x.data_ptr()) for x in (p.target_ids, raw_target, partial)]
        places = [x.address for x in maps] + [ctypes.addressof(x) for x in (*values, scalars)]
        driver(
            "cuLaunchKernel", function, 2 * clusters, 1, 1, THREADS, 1, 1,
            shared_bytes(config, store=stored is not None),
            ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream),
            (ctypes.c_void_p * len(places))(*places), None,
        )  # fmt: skip
    return partial
