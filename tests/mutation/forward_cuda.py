"""Bugs planted in the forward kernel in CUDA C++, which runs emulated on the CPU."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

FORWARD, SUITE = "csrc/cuda/forward.cu", "triton_forward_cuda"


def mutant(name: str, old: str, new: str, why: str) -> Mutant:
    return Mutant(f"cuda-{name}", FORWARD, old, new, why, SUITE)


MUTANTS = [
    mutant("no-turns",
           "if (kTeams == 2) barrier_wait(ring.turn(team), nth / 2 + team + 1 & 1);", "",
           "a team takes an old use of a stage, of the same parity, for its own"),
    mutant("turn-parity", "nth / 2 + team + 1 & 1", "nth + team + 1 & 1",
           "the parity of a turn counts the tiles of both teams"),
    mutant("release-unread", "wgmma_wait<1>();", "", "a stage is filled again before it was read"),
    mutant("release-here-alone", "barrier_arrive(ring.emptied(step), lane)",
           "barrier_arrive(ring.emptied(step), block_in_cluster())",
           "a block fills a stage that the other one still reads"),
    mutant("load-parity", "ring.parity(step) ^ 1", "ring.parity(step)",
           "the loads wait for a stage that nobody has used yet"),
    mutant("expected-bytes", "barrier_expect(filled, kStageBytes)",
           "barrier_expect(filled, kStageBytes - kHalfBytes)",
           "a stage is read before the other block's half of W is there"),
    mutant("halves-of-w", "ring.weight(step) + half * kHalfBytes", "ring.weight(step)",
           "both blocks load into the first half of a tile of W"),
    mutant("buffer-unread", "wait_for_stores<kBuffers - 1>()", "wait_for_stores<kBuffers>()",
           "a buffer is written before its last store has read it"),
    mutant("stores-unfinished", "if (kStore && lane == 0) wait_for_stores<0>();", "",
           "a block ends before its stores have read its memory"),
    mutant("swizzle-of-e", "(buffers ^ chunk * 16)", "(buffers + chunk * 16)",
           "E is not swizzled as its store expects"),
    mutant("part-of-hidden", "part * 64 * kRowBytes", "part * 32 * kRowBytes",
           "the second 64 rows of a tile begin at its row 32"),
    mutant("column-edge", "column >= inside", "column > inside",
           "a column beyond the vocabulary is summed"),
    mutant("target-edge", "id < tile.column + min(inside, kBlockV)",
           "id < tile.column + kBlockV - 1",
           "a target in the last column of a tile counts as an ordinary one"),
    mutant("last-group", "min(p.pairs - first, p.group)", "p.group",
           "pairs of row blocks that do not fill a group take other places"),
    mutant("maximum-of-two", "return fmaxf(value, from_lane_xor(value, 2));", "return value;",
           "lanes that share a row have maxima of their own"),
    mutant("masked-target", "if (column == target[r] || column >= inside)", "if (column >= inside)",
           "the target's column is in the sum, and in E"),
]  # fmt: skip
