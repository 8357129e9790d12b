// hidden (N, H) · Wᵀ (V, H) -> the softmax statistics of every row and tile of columns, and E.
//
//     z = scale·logit;   high = max z, rest = Σ e^(z - high), both without the target's column
//     E = e^(z - z_target) in bf16, 0 in the target's column                      (kStore)
//
// Only for Hopper. A persistent grid of clusters of two blocks. The blocks of a cluster take the
// same columns of W and neighbouring rows, and each loads half of a tile of W into both. In a block
// one warp loads (TMA, a ring of kStages stages), two groups of four warps multiply (wgmma):
//
//     kTeams = 2   the groups take turns: one multiplies a whole tile while the other is in its
//                  epilogue, so that the tensor cores see no epilogue
//     kTeams = 1   both share each tile, half of its rows for each
//
// In the epilogue every warp works alone: 16 rows at a time, pieces of 64 columns of E through
// kBuffers buffers of its own, whose stores (TMA) nobody waits for until a buffer comes round.
//
// The sums of a row within a tile have one order, whatever the batch around it.
//
// kBlockT, kBlockV, kStages, kBuffers, kTeams, kStore and wgmma() come from kernel.py, the
// instructions from ptx.h.

constexpr int kBlockH = 64;          // 128 bytes of bf16: one swizzled row of a tile
constexpr int kRowBytes = 2 * kBlockH;
constexpr int kWarps = 8;            // that multiply
constexpr int kThreads = 384;        // two groups that multiply, one whose first warp loads
constexpr int kParts = kBlockT / 64 / (3 - kTeams);  // of 64 rows, in the registers of a group
constexpr int kPieces = kBlockV / 64;
constexpr int kHiddenBytes = kBlockT * kRowBytes;
constexpr int kHalfBytes = kBlockV / 2 * kRowBytes;
constexpr int kStageBytes = kHiddenBytes + 2 * kHalfBytes;
constexpr int kBufferBytes = 16 * kRowBytes;
constexpr int kBuffersAt = kStages * kStageBytes;
constexpr int kBarriersAt = kBuffersAt + (kStore ? kWarps * kBuffers * kBufferBytes : 0);
constexpr float kFloor = -1e30f;     // no logit that means something is below: no inf - inf
constexpr float kMasked = -3e38f;    // below kFloor

static_assert(kBlockT % 64 == 0 && kBlockV % 64 == 0 && kParts >= 1, "whole products");
static_assert(kHalfBytes % 1024 == 0, "every tile starts on a period of the swizzle");
static_assert(kParts * kPieces % kBuffers == 0, "a piece of a tile has a buffer of its own");

struct Problem {
    int rows, columns;         // N, V
    int steps;                 // stages for one tile: H in blocks of kBlockH
    int pairs, column_tiles;   // blocks of rows for a whole cluster, tiles beside each other
    int group;                 // pairs that take all columns before the next ones do
    float scale, factor;       // logit_scale / temperature, that times log2(e)
};

// Where a block of a cluster is in the cluster's list of tiles.
struct Tile {
    int row, column, number;  // its first row, its first column, which of the column tiles
};

DEVICE int place_of(int nth) { return cluster_index() + nth * cluster_count(); }
DEVICE bool exists(const Problem& p, int nth) { return place_of(nth) < p.pairs * p.column_tiles; }

// Neighbouring clusters share a tile of W, which comes from L2 for all but the first of them.
DEVICE Tile tile_of(const Problem& p, int nth) {
    const int first = place_of(nth) / (p.group * p.column_tiles) * p.group;
    const int rest = place_of(nth) - first * p.column_tiles, group = min(p.pairs - first, p.group);
    const int pair = first + rest % group, number = rest / group;
    return {(2 * pair + block_in_cluster()) * kBlockT, number * kBlockV, number};
}

// The stages of the ring in the order of their use; `step` counts the uses.
struct Ring {
    uint32_t memory;

    DEVICE uint32_t hidden(int step) const { return memory + step % kStages * kStageBytes; }
    DEVICE uint32_t weight(int step) const { return hidden(step) + kHiddenBytes; }
    DEVICE uint32_t filled(int step) const { return memory + kBarriersAt + step % kStages * 8; }
    DEVICE uint32_t emptied(int step) const { return filled(step) + kStages * 8; }
    DEVICE uint32_t turn(int group) const { return filled(0) + (2 * kStages + group) * 8; }
    static DEVICE uint32_t parity(int step) { return step / kStages & 1; }
};

DEVICE void load_tiles(const TensorMap& hidden, const TensorMap& weight, const Problem& p,
                       const Ring& ring) {
    const int half = block_in_cluster();
    for (int nth = 0, step = 0; exists(p, nth); ++nth) {
        const Tile tile = tile_of(p, nth);
#pragma unroll 1
        for (int k = 0; k < p.steps; ++k, ++step) {
            const uint32_t filled = ring.filled(step);
            barrier_wait(ring.emptied(step), ring.parity(step) ^ 1);
            barrier_expect(filled, kStageBytes);
            load_tile(hidden, filled, ring.hidden(step), k * kBlockH, tile.row);
            load_tile_to_both(weight, filled, ring.weight(step) + half * kHalfBytes, k * kBlockH,
                              tile.column + half * (kBlockV / 2));
        }
    }
}

// A matrix of rows of 128 swizzled bytes, as wgmma takes it: start, 1024 bytes from 8 rows to the
// next 8, swizzle of 128 bytes (PTX ISA, matrix descriptor). The second field is not used then.
DEVICE uint64_t descriptor(uint32_t address) {
    return uint64_t(address >> 4 & 0x3fff) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
           uint64_t(1) << 62;
}

// This warp has read a stage: it is free in this block, and in the other one its half of W.
DEVICE void release(const Ring& ring, int step, int lane) {
    if (lane < 2) barrier_arrive(ring.emptied(step), lane);
}

using Logits = float[kParts][kBlockV / 2];

// logits of a group's rows of a tile; `step` is the first of the tile's stages.
DEVICE void multiply(Logits& logits, const Ring& ring, int first_row, int step, int steps,
                     int lane) {
#pragma unroll 1
    for (int k = 0; k < steps; ++k, ++step) {
        barrier_wait(ring.filled(step), ring.parity(step));
        const uint64_t a = descriptor(ring.hidden(step) + first_row * kRowBytes);
        const uint64_t b = descriptor(ring.weight(step));
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int i = 0; i < kBlockH / 16; ++i)  // 16 of depth are 32 bytes
                wgmma(logits[part], a + (part * 64 * kRowBytes + i * 32 >> 4), b + (i * 32 >> 4),
                      k + i > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (k > 0) release(ring, step - 1, lane);
    }
}

// The maximum or the sum over the four lanes that share a row.
DEVICE float row_maximum(float value) {
    value = fmaxf(value, from_lane_xor(value, 1));
    return fmaxf(value, from_lane_xor(value, 2));
}

DEVICE float row_sum(float value) {
    value += from_lane_xor(value, 1);
    return value + from_lane_xor(value, 2);
}

struct Out {
    const int64_t* target;    // (N,)
    const float* raw_target;  // (N,) logits of the targets, for E
    float* partial;           // (3, tiles of columns, N): high, rest, z of the target
    const TensorMap* matrix;  // E
};

// (3, tiles of columns, N) numbers of a row and a tile.
DEVICE void write(const Problem& p, const Out& out, const Tile& tile, int kind, int row,
                  float value) {
    const int64_t line = int64_t(kind) * p.column_tiles + tile.number;
    if (row < p.rows) out.partial[line * p.rows + row] = value;
}

// 16 rows of a tile by one warp: a lane has two rows, 8 apart, and in each of them columns 8j and
// 8j + 1 behind its own two. `buffers` is where this lane writes its part of E.
DEVICE void fold(float (&logits)[kBlockV / 2], const Problem& p, const Out& out, const Tile& tile,
                 int first_row, uint32_t buffers, int first_piece, int lane) {
    const int row = first_row + lane / 4, own = 2 * (lane % 4);
    const int inside = p.columns - tile.column;  // columns of this tile that exist
    float high[2] = {kFloor, kFloor}, rest[2] = {0.f, 0.f}, shift[2];
    {
        int target[2];
        float found[2] = {0.f, 0.f};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64_t id = row + 8 * r < p.rows ? out.target[row + 8 * r] : -1;
            const bool is_here = id >= tile.column && id < tile.column + min(inside, kBlockV);
            target[r] = is_here ? int(id) - tile.column : -1;
        }
        if (inside < kBlockV || any_lane(max(target[0], target[1]) >= 0)) {
#pragma unroll
            for (int i = 0; i < kBlockV / 2; ++i) {
                const int column = i / 4 * 8 + own + i % 2, r = i / 2 % 2;
                if (column == target[r]) found[r] = logits[i];
                if (column == target[r] || column >= inside) logits[i] = kMasked;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            found[r] = row_sum(found[r]);
            if (lane % 4 == 0) write(p, out, tile, 2, row + 8 * r, found[r] * p.scale);
        }
    }
#pragma unroll
    for (int i = 0; i < kBlockV / 2; ++i) high[i / 2 % 2] = fmaxf(high[i / 2 % 2], logits[i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        high[r] = row_maximum(high[r]);
        if (lane % 4 == 0) write(p, out, tile, 0, row + 8 * r, high[r] * p.scale);
        if (kStore) {
            const float raw = row + 8 * r < p.rows ? out.raw_target[row + 8 * r] : 0.f;
            shift[r] = exp2_fast((high[r] - raw) * p.factor);
        }
    }
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
        const uint32_t buffer = (first_piece + piece) % kBuffers * kBufferBytes;
        if (kStore) {
            if (lane == 0) wait_for_stores<kBuffers - 1>();
            warp_sync();
        }
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = piece * 32 + chunk * 4 + r * 2;
                const float e0 = exp2_fast((logits[i] - high[r]) * p.factor);
                const float e1 = exp2_fast((logits[i + 1] - high[r]) * p.factor);
                rest[r] += e0 + e1;
                // The swizzle exchanges the eight 16 bytes of a row of E.
                if (kStore)
                    store_shared((buffers ^ chunk * 16) + buffer + 8 * r * kRowBytes,
                                 positive_pair(e0 * shift[r], e1 * shift[r]));
            }
        if (kStore) {
            fence_before_store();
            warp_sync();
            if (lane == 0)
                store_tile(*out.matrix, buffers + buffer, tile.column + piece * 64, first_row);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rest[r] = row_sum(rest[r]);
        if (lane % 4 == 0) write(p, out, tile, 1, row + 8 * r, rest[r]);
    }
}

DEVICE void multiply_tiles(const Problem& p, const Out& out, const Ring& ring, int warp, int lane) {
    const int team = kTeams == 2 ? warp / 4 : 0;
    const int first_row = kTeams == 2 ? 0 : warp / 4 * kParts * 64;
    // Row lane / 4 of a buffer, and what the swizzle makes of the first 16 bytes there.
    const uint32_t buffers = ring.memory + kBuffersAt + warp * kBuffers * kBufferBytes +
                             lane / 4 * (kRowBytes + 16) + lane % 4 * 4;
    for (int nth = team; exists(p, nth); nth += kTeams) {
        Logits logits;
        // Nobody may wait for a stage whose last but one use is not over: its parity is the same.
        if (kTeams == 2) barrier_wait(ring.turn(team), nth / 2 + team + 1 & 1);
        multiply(logits, ring, first_row, nth * p.steps, p.steps, lane);
        if (kTeams == 2 && lane == 0) barrier_arrive(ring.turn(team ^ 1), block_in_cluster());
        wgmma_wait<0>();
        release(ring, (nth + 1) * p.steps - 1, lane);
        const Tile tile = tile_of(p, nth);
#pragma unroll
        for (int part = 0; part < kParts; ++part)
            fold(logits[part], p, out, tile, tile.row + first_row + part * 64 + warp % 4 * 16,
                 buffers, part * kPieces, lane);
    }
    if (kStore && lane == 0) wait_for_stores<0>();
}

KERNEL(kThreads)
forward(TENSOR_MAP hidden, TENSOR_MAP weight, TENSOR_MAP matrix, const int64_t* target,
        const float* raw_target, float* partial, Problem p) {
    const int warp = from_first_lane(thread_index() / 32), lane = thread_index() % 32;
    const Ring ring{shared_memory()};
    if (thread_index() == 0) {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(ring.filled(i), 1);
            barrier_init(ring.emptied(i), 2 * kWarps / kTeams);
        }
        for (int group = 0; group < 2; ++group) barrier_init(ring.turn(group), kWarps / 2);
        fence_barrier_init();
    }
    cluster_sync();
    if (warp >= kWarps) {
        give_registers<24>();
        if (warp == kWarps && lane == 0) load_tiles(hidden, weight, p, ring);
    } else {
        take_registers<240>();
        multiply_tiles(p, {target, raw_target, partial, &matrix}, ring, warp, lane);
    }
    // A block ends when the other one writes no more into it.
    cluster_sync();
}
