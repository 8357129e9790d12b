// The instructions of Hopper that CUDA C++ has no words for, one function each, named after what it
// does. Addresses of shared memory are 32-bit offsets, those of a barrier among them.
//
// emulated.h has the same functions for a CPU.
#pragma once

using int64_t = long long;
using uint64_t = unsigned long long;
using uint32_t = unsigned int;

#define DEVICE __device__ __forceinline__
#define KERNEL(threads)                                                                            \
    extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(threads, 1)
#define TENSOR_MAP const __grid_constant__ TensorMap

struct alignas(64) TensorMap {
    uint64_t words[16];  // CUtensorMap
};

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int cluster_index() { return blockIdx.x / 2; }
DEVICE int cluster_count() { return gridDim.x / 2; }
DEVICE int block_in_cluster() { return blockIdx.x % 2; }

// The shared memory of this block, from a multiple of 1024 bytes on, where a swizzled tile starts.
DEVICE uint32_t shared_memory() {
    extern __shared__ unsigned char dynamic[];
    return (static_cast<uint32_t>(__cvta_generic_to_shared(dynamic)) + 1023) / 1024 * 1024;
}

DEVICE void store_shared(uint32_t address, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// ---- barriers: a phase ends when `count` have arrived and all announced bytes have landed ----

DEVICE void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

DEVICE void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival that announces bytes, which the loads of this phase bring.
DEVICE void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// One arrival at the same barrier of another block of the cluster, or of this one. A stage was read:
// nothing is published to the other block (release.cluster would wait for all stores to memory).
DEVICE void barrier_arrive(uint32_t barrier, int block) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(block)
        : "memory");
}

// Waits until the last phase of this parity is over; the phase before the first has parity 1.
DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

DEVICE void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;" ::
            : "memory");
}

// ---- tiles of a matrix between global and shared memory (TMA), zeros outside of the matrix ----

DEVICE void load_tile(const TensorMap& map, uint32_t barrier, uint32_t to, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

// To the same place in both blocks of the cluster; the bytes count at the barrier of each.
DEVICE void load_tile_to_both(const TensorMap& map, uint32_t barrier, uint32_t to, int column,
                              int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"(static_cast<unsigned short>(3))
        : "memory");
}

// What this thread's warp wrote to shared memory is seen by the stores that follow.
DEVICE void fence_before_store() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

DEVICE void store_tile(const TensorMap& map, uint32_t from, int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];\n"
        "cp.async.bulk.commit_group;" ::"l"(&map),
        "r"(from), "r"(column), "r"(row)
        : "memory");
}

// Until no more than kLeft of this thread's stores still read shared memory.
template <int kLeft>
DEVICE void wait_for_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}

// ---- matrix products of a warpgroup: wgmma() itself is written by kernel.py ----

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kLeft>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

template <int kRegisters>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- within a warp ----

DEVICE void warp_sync() { __syncwarp(); }
DEVICE float from_lane_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }
// Tells the compiler that the whole warp has one value.
DEVICE int from_first_lane(int value) { return __shfl_sync(~0u, value, 0); }
DEVICE bool any_lane(bool value) { return __any_sync(~0u, value); }

// ---- arithmetic ----

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two numbers as bf16, the first in the lower half; a NaN or a negative one becomes 0.
DEVICE uint32_t positive_pair(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
        : "=r"(pair)
        : "f"(fmaxf(second, 0.f)), "f"(fmaxf(first, 0.f)));
    return pair;
}
