"""Bugs planted in the packed attention for CPUs (csrc/api/attention.cpp)."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

CPP = "csrc/api/attention.cpp"
DISPATCH = "grpo_fast/attention/dispatch.py"

MUTANTS = [
    Mutant("packed-one-key-more", CPP,
           "row / repeats + 1 : keys;", "std::min(keys, row / repeats + 2) : keys;",
           "a query sees the key behind it", "csrc_attention"),
    Mutant("packed-first-row", CPP,
           "causal ? key * repeats : 0;", "causal ? (key + 1) * repeats : 0;",
           "a key has no gradient from the first query that sees it", "csrc_attention"),
    Mutant("packed-heads-share-a-row", CPP,
           "body(row, first_q + query, head * repeats + repeat);",
           "body(row, first_q + query, head * repeats);",
           "queries that share a key head are all the first one", "csrc_attention"),
    Mutant("packed-lse-of-the-largest", CPP,
           "s.largest + std::log(s.sum);", "std::log(s.sum);",
           "the log-sum-exp lacks its shift", "csrc_attention"),
    Mutant("packed-no-delta", CPP,
           "e * (load(slopes + t) - block.delta[i])", "e * load(slopes + t)",
           "the gradient of the softmax lacks its mean", "csrc_attention"),
    Mutant("packed-unseen-weigh", CPP,
           "store(weights + t, keep_where(is_seen, e));", "store(weights + t, e);",
           "keys behind a query have a gradient of v from it", "csrc_attention"),
    Mutant("packed-unseen-slope", CPP,
           "store(slopes + t, keep_where(is_seen, ", "store(slopes + t, keep_where(Ints{} - 1, ",
           "keys behind a query have a gradient of k from it", "csrc_attention"),
    Mutant("packed-dq-unscaled", CPP,
           "depth, p.scale, depth, to.dq.at(token, of));", "depth, 1, depth, to.dq.at(token, of));",
           "dq lacks the scale", "csrc_attention"),
    Mutant("packed-second-block", CPP,
           "const int64_t last = span.seen(block.begin + block.rows - 1);",
           "const int64_t last = std::min(kBackwardKeys, span.seen(block.begin + block.rows - 1));",
           "keys behind the first block have no gradient", "csrc_attention"),
    Mutant("packed-keys-of-the-block", CPP,
           "weigh(p, span, block, k_tiles, v_tiles, key, end);",
           "weigh(p, span, block, k_tiles, v_tiles, 0, end - key);",
           "later keys have the first ones' weights", "csrc_attention"),
    Mutant("packed-dv-of-slopes", CPP,
           "add_tokens<keys>({block.weights + place,", "add_tokens<keys>({block.slopes + place,",
           "dv is the sum of slopes", "csrc_attention"),
    Mutant("packed-for-windows", DISPATCH,
           "return is_whole and kind.device", "return kind.device",
           "layers with a window attend to everything", "attention"),
]  # fmt: skip
