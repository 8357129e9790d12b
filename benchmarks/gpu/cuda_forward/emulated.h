// The functions of ptx.h on a CPU: every CUDA thread is a thread of the host.
//
// What runs by itself on the GPU runs here as late as the instructions allow: a product reads its
// tiles when somebody waits for it, a store its buffer when somebody waits for that. Code that gives
// back a stage or writes into a buffer too early then computes something else, and a thread
// sanitizer names the two places. Barriers keep phases, arrivals and bytes as PTX defines them; one
// that nobody completes ends the program.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

using std::max, std::min;

#define DEVICE inline
#define KERNEL(threads) static void
#define TENSOR_MAP const TensorMap
#define REQUIRE(condition, ...)                                                                    \
    if (!(condition)) std::fprintf(stderr, __VA_ARGS__), std::fputs("\n", stderr), std::abort()

struct TensorMap {  // a matrix of bf16, taken in boxes of `box` rows of 64
    uint16_t* data;
    int64_t rows, columns, stride;
    int box;
};

struct Barrier {
    std::mutex mutex;
    std::condition_variable changed;
    int count = 0, pending = 0;
    int64_t bytes = 0;  // announced and not landed; below 0 where they land before
    unsigned phase = 0;

    void update(int arrivals, int64_t announced) {
        std::lock_guard lock(mutex);
        pending -= arrivals, bytes += announced;
        REQUIRE(pending >= 0, "more arrivals than the %d of the barrier", count);
        if (pending == 0 && bytes == 0) pending = count, ++phase, changed.notify_all();
    }
};

// Of a warp or a cluster. (std::barrier spins, and there are more threads than processors.)
struct Meeting {
    std::mutex mutex;
    std::condition_variable changed;
    int count, missing = count;
    unsigned number = 0;
    explicit Meeting(int count) : count(count) {}

    void arrive_and_wait() {
        std::unique_lock lock(mutex);
        const unsigned now = number;
        if (--missing == 0) {
            missing = count, ++number;
            changed.notify_all();
        } else {
            changed.wait(lock, [&] { return number != now; });
        }
    }
};

constexpr int kWarpSize = 32, kSharedBytes = 232448, kPatienceSeconds = 30;

struct Warp {
    Meeting barrier{kWarpSize};
    float values[kWarpSize];
};

struct Block {
    // bf16 and fp32 of these bytes are NaN.
    std::vector<unsigned char> shared = std::vector<unsigned char>(kSharedBytes, 0xff);
    std::map<uint32_t, Barrier> barriers;
    std::vector<Warp> warps;
    explicit Block(int threads) : warps(threads / kWarpSize) {}

    // Where the swizzle of 128 bytes puts an address: bits 4 to 6 take up bits 7 to 9.
    unsigned char* swizzled(uint32_t address) {
        REQUIRE(address < kSharedBytes, "address %u outside of shared memory", address);
        return &shared[address ^ (address >> 7 & 7) << 4];
    }
};

struct Product {
    float* sums;
    int columns;
    uint64_t a, b;
    bool adds;
};

struct Store {
    const TensorMap* map;
    uint32_t from;
    int column, row;
};

struct Thread {
    Block* blocks[2];
    Meeting* cluster;
    int index, block, cluster_index, cluster_count;
    std::vector<Product> open;                 // products that are not committed
    std::deque<std::vector<Product>> groups;   // committed, not waited for
    std::deque<Store> stores;
    std::minstd_rand random;

    Block& own() { return *blocks[block]; }
    Warp& warp() { return own().warps[index / kWarpSize]; }
};

inline thread_local Thread self;

DEVICE int thread_index() { return self.index; }
DEVICE int cluster_index() { return self.cluster_index; }
DEVICE int cluster_count() { return self.cluster_count; }
DEVICE int block_in_cluster() { return self.block; }
DEVICE uint32_t shared_memory() { return 1024; }

DEVICE void warp_sync() { self.warp().barrier.arrive_and_wait(); }

DEVICE void store_shared(uint32_t address, uint32_t value) {
    REQUIRE(address + 4 <= kSharedBytes, "address %u outside of shared memory", address);
    std::memcpy(&self.own().shared[address], &value, 4);
}

DEVICE void barrier_init(uint32_t barrier, int count) {
    REQUIRE(barrier % 8 == 0 && barrier + 8 <= kSharedBytes, "a barrier at %u", barrier);
    self.own().barriers[barrier].count = self.own().barriers[barrier].pending = count;
}

DEVICE void fence_barrier_init() {}
DEVICE void fence_before_store() {}
DEVICE void cluster_sync() { self.cluster->arrive_and_wait(); }

DEVICE void barrier_expect(uint32_t barrier, int bytes) {
    self.own().barriers.at(barrier).update(1, bytes);
}

DEVICE void barrier_arrive(uint32_t barrier, int block) {
    self.blocks[block]->barriers.at(barrier).update(1, 0);
}

DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
    if (self.random() % 4 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(self.random() % 200));
    Barrier& b = self.own().barriers.at(barrier);
    std::unique_lock lock(b.mutex);
    const bool is_over = b.changed.wait_for(lock, std::chrono::seconds(kPatienceSeconds),
                                            [&] { return (b.phase & 1) != parity; });
    REQUIRE(is_over, "thread %d of block %d waits for ever at %u: phase %u, parity %u, %d missing",
            self.index, self.block, barrier, b.phase, parity, b.pending);
}

// The tile stands in shared memory in rows of 128 swizzled bytes.
static void load_into(Block& block, const TensorMap& map, uint32_t barrier, uint32_t to, int column,
                      int row) {
    REQUIRE(to % 1024 == 0, "a tile at %u", to);
    for (int r = 0; r < map.box; ++r)
        for (int c = 0; c < 64; ++c) {
            const bool inside = row + r < map.rows && column + c < map.columns;
            const uint16_t value = inside ? map.data[(row + r) * map.stride + column + c] : 0;
            std::memcpy(block.swizzled(to + r * 128 + c * 2), &value, 2);
        }
    block.barriers.at(barrier).update(0, -map.box * 128);
}

DEVICE void load_tile(const TensorMap& map, uint32_t barrier, uint32_t to, int column, int row) {
    load_into(self.own(), map, barrier, to, column, row);
}

DEVICE void load_tile_to_both(const TensorMap& map, uint32_t barrier, uint32_t to, int column,
                              int row) {
    for (Block* block : self.blocks) load_into(*block, map, barrier, to, column, row);
}

DEVICE void store_tile(const TensorMap& map, uint32_t from, int column, int row) {
    REQUIRE(from % 1024 == 0, "a tile at %u", from);
    self.stores.push_back({&map, from, column, row});
}

template <int kLeft>
static void wait_for_stores() {
    for (; self.stores.size() > kLeft; self.stores.pop_front()) {
        const Store& s = self.stores.front();
        for (int r = 0; r < s.map->box; ++r)
            for (int c = 0; c < 64; ++c)
                if (s.row + r < s.map->rows && s.column + c < s.map->columns)
                    std::memcpy(&s.map->data[(s.row + r) * s.map->stride + s.column + c],
                                self.own().swizzled(s.from + r * 128 + c * 2), 2);
    }
}

// Element (row, k) of an operand: start, bytes from 8 rows to the next, and swizzle as the PTX ISA
// lays out the fields of a matrix descriptor.
DEVICE float operand(uint64_t descriptor, int row, int k) {
    REQUIRE(descriptor >> 62 == 1 && (descriptor >> 49 & 7) == 0, "no swizzle of 128 bytes");
    const uint32_t start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
    uint16_t bits;
    std::memcpy(&bits, self.own().swizzled(start + row / 8 * stride + row % 8 * 128 + 2 * k), 2);
    return std::bit_cast<float>(uint32_t(bits) << 16);
}

template <int kCount>
DEVICE void wgmma(float (&sums)[kCount], uint64_t a, uint64_t b, bool adds) {
    self.open.push_back({sums, 2 * kCount, a, b, adds});
}

// These three take a warp together, so its lanes are where its first one is.
DEVICE void wgmma_fence() { warp_sync(); }

DEVICE void wgmma_commit() {
    warp_sync();
    self.groups.push_back(std::exchange(self.open, {}));
}

// Register 4j + 2r + i of a thread: row lane / 4 + 8r of its warp's 16, column 8j + lane % 4 * 2 + i.
static void run(const Product& p) {
    const int lane = self.index % 32, warp = self.index / 32 % 4;
    for (int i = 0; i < p.columns / 2; ++i) {
        const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8;
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = p.adds ? p.sums[i] : 0.f;
        for (int k = 0; k < 16; ++k) sum += operand(p.a, row, k) * operand(p.b, column, k);
        p.sums[i] = sum;
    }
}

template <int kLeft>
static void wgmma_wait() {
    for (; self.groups.size() > kLeft; self.groups.pop_front())
        for (const Product& product : self.groups.front()) run(product);
    warp_sync();
}

template <int>
DEVICE void take_registers() {}
template <int>
DEVICE void give_registers() {}

DEVICE float from_lane(float value, int lane) {
    Warp& warp = self.warp();
    warp.values[self.index % 32] = value;
    warp_sync();
    const float other = warp.values[lane];
    warp_sync();
    return other;
}

DEVICE float from_lane_xor(float x, int mask) { return from_lane(x, self.index % 32 ^ mask); }
DEVICE int from_first_lane(int value) { return int(from_lane(float(value), 0)); }

DEVICE bool any_lane(bool value) {
    from_lane(value, 0);  // leaves the values of all lanes
    const float* const values = self.warp().values;
    const bool found = std::any_of(values, values + kWarpSize, [](float x) { return x != 0; });
    warp_sync();
    return found;
}

DEVICE float exp2_fast(float x) { return std::exp2(x); }

DEVICE uint32_t positive_pair(float first, float second) {
    uint32_t pair = 0;
    for (float value : {second, first}) {
        const uint32_t bits = std::bit_cast<uint32_t>(std::fmax(value, 0.f));
        pair = pair << 16 | (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    return pair;
}

// Starts `kernel()` on every thread of every cluster, one cluster after the other.
template <class Kernel>
void launch(int clusters, int threads, unsigned seed, Kernel kernel) {
    for (int cluster = 0; cluster < clusters; ++cluster) {
        Block first(threads), second(threads);
        Meeting barrier(2 * threads);
        std::vector<std::thread> running;
        for (int i = 0; i < 2 * threads; ++i)
            running.emplace_back([&, i] {
                self = {{&first, &second}, &barrier, i % threads, i / threads, cluster, clusters};
                self.random.seed(seed + i);
                kernel();
                REQUIRE(self.open.empty() && self.groups.empty() && self.stores.empty(),
                        "thread %d ends before its work does", self.index);
            });
        for (std::thread& thread : running) thread.join();
    }
}
