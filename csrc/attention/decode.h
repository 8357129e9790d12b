// Attention of a decoding step. One new token of each of B completions attends to its prompt, which
// several completions may share, and to the earlier tokens of its completion.
//
// Layout: keys are stored in tiles (D, kTile) of kTile tokens, so a vector contains the same
// dimension of kLanes tokens. Values are stored in tiles (kTile, D). grpo_fast/rollout/own/cache.py
// has the torch implementation.
//
// Rounding: sums are fp32. The order of the additions for a completion does not depend on the other
// completions.
//
// Parallelism: a share is a group of at most kRowsTogether completions of one prompt. A task
// computes the attention of one share in one key-value head. It processes the completions of the
// share together, so it reads the keys of the prompt only once.
#pragma once

#include <vector>

#include "api/tensors.h"
#include "attention/products.h"
#include "rows/chunk.h"

namespace grpo_fast {

constexpr int64_t kRowsTogether = 4;  // completions of one prompt in a task

// The tokens [first, end) of a prompt or a completion, with their keys and values in one head.
struct Tokens {
  const float *keys, *values;  // (tiles, D, kTile) and (tiles, kTile, D)
  int64_t first, end;
};

// A group of completions of one prompt that a thread processes together. It has `rows` completions,
// and `first` is the index of its first completion.
struct Share {
  int64_t prompt, first, rows;
};

// Keys and values of N prompts and of their B completions.
struct KvCache {
  const float *prompt_k, *prompt_v;  // (N, H_kv, tiles, D, kTile) and (N, H_kv, tiles, kTile, D)
  float *completion_k, *completion_v;  // the same shapes for B completions
  const int64_t* lengths;  // (N,) prompt lengths
  int64_t heads, depth;              // H_kv, D
  int64_t longest, room, time;  // capacity of prompt and completion tiles; index of the new token
  int64_t window;  // number of visible tokens, including the new one
  std::vector<Share> shares;
};

// The inputs of a decoding step: the cache, the queries, keys and values of the new tokens, and the
// output.
struct Attention : KvCache {
  const float *q, *k, *v;  // (H, B, D), (H_kv, B, D): the new tokens
  int64_t q_head, q_row, k_head, k_row, v_head, v_row;  // strides
  int64_t repeats;                                      // H/H_kv
  float scale;
  float* out;  // (B, H, D)
};

// Writes the key and the value of a completion's new token into the tiles of the completion.
// Consecutive elements of a key are kTile apart, because the elements between them belong to other
// tokens.
inline void append_kv(const Attention& p, int64_t row, int64_t head) {
  const int64_t at = (row * p.heads + head) * p.room * p.depth, lane = p.time % kTile;
  float* keys = p.completion_k + at + (p.time - lane) * p.depth + lane;
  float* values = p.completion_v + at + p.time * p.depth;
  const float* k = p.k + head * p.k_head + row * p.k_row;
  for (int64_t d = 0; d < p.depth; ++d) keys[d * kTile] = k[d];
  std::memcpy(values, p.v + head * p.v_head + row * p.v_row, p.depth * sizeof(float));
}

// Returns the tokens of a share's prompt that are inside the attention window.
inline Tokens prompt_tokens(const Attention& p, const Share& share, int64_t head) {
  const int64_t at = (share.prompt * p.heads + head) * p.longest * p.depth;
  const int64_t end = p.lengths[share.prompt];
  const int64_t first = std::max<int64_t>(0, end + p.time + 1 - p.window);
  return {p.prompt_k + at, p.prompt_v + at, std::min(first, end), end};
}

// Returns the tokens of a completion that are inside the attention window.
inline Tokens completion_tokens(const Attention& p, int64_t row, int64_t head) {
  const int64_t at = (row * p.heads + head) * p.room * p.depth, end = p.time + 1;
  return {p.completion_k + at, p.completion_v + at, std::max<int64_t>(0, end - p.window), end};
}

// Computes the attention of one share (completions of one prompt) in one key-value head. A query is
// a pair of a completion and one of the `repeats` query heads that use this key-value head. Queries
// are ordered by completion.
inline void attend(const Attention& p, const Share& share, int64_t head) {
  const int64_t split = round_up_to_tile(p.lengths[share.prompt]);
  const int64_t width = split + round_up_to_tile(p.time + 1), queries = share.rows * p.repeats;
  thread_local std::vector<float> buffer;
  // Set all scores to -inf first, because step 2 does not write the scores of tiles outside the
  // window. Otherwise, scores of an earlier task would remain there.
  buffer.assign(queries * width, kUnseen);
  const int64_t head_of_q = head * p.repeats;
  // Calls body(tokens, first query, number of queries, scores) for all visible tokens, with 4, 2 or
  // 1 queries at a time. The first calls cover the tokens of the prompt, to which all queries
  // attend. Each later call covers the tokens of one completion, to which only its own queries
  // attend.
  const auto each = [&](const auto& body) {
    by_rows(0, queries, [&](int64_t i, auto count) {
      body(prompt_tokens(p, share, head), i, count,
           Matrix<float>{buffer.data() + i * width, width});
    });
    for (int64_t r = 0; r < share.rows; ++r)
      by_rows(r * p.repeats, (r + 1) * p.repeats, [&](int64_t i, auto count) {
        body(completion_tokens(p, share.first + r, head), i, count,
             Matrix<float>{buffer.data() + i * width + split, width});
      });
  };
  // 1. Append the new keys and values to the completions, and copy the queries, multiplied by
  // `scale`.
  std::vector<float> q(queries * p.depth), sums(queries * p.depth);
  for (int64_t r = 0; r < share.rows; ++r) {
    const int64_t row = share.first + r;
    append_kv(p, row, head);
    for (int64_t j = 0; j < p.repeats; ++j)
      write_scaled(p.q + (head_of_q + j) * p.q_head + row * p.q_row, p.scale, p.depth,
                   q.data() + (r * p.repeats + j) * p.depth);
  }
  // 2. Compute the scores of all visible tokens. The scores of a query for the prompt and for the
  // completion are stored in one row, so that one softmax covers both.
  each([&](const Tokens& on, int64_t i, auto count, const Matrix<float>& scores) {
    multiply_tokens<count>({q.data() + i * p.depth, p.depth}, on.keys, p.depth, on.first, on.end,
                           scores);
    for (int row = 0; row < count; ++row) hide_tokens(scores.row(row), on.first, on.end);
  });
  // 3. Replace the scores of each query by their exponentials, and sum the exponentials.
  std::vector<float> totals(queries);
  for (int64_t i = 0; i < queries; ++i)
    totals[i] = exponentials(buffer.data() + i * width, width);
  // 4. Sum the values of the tokens, weighted by the exponentials.
  each([&](const Tokens& on, int64_t i, auto count, const Matrix<float>& scores) {
    const Matrix<const float> values{on.values + on.first * p.depth, p.depth};
    add_tokens<count>({scores.data + on.first, 1, width}, values, on.end - on.first, p.depth,
                      {sums.data() + i * p.depth, p.depth});
  });
  // 5. Divide by the sum of the exponentials, and write the outputs.
  for (int64_t i = 0; i < queries; ++i) {
    const int64_t row = share.first + i / p.repeats, of = head_of_q + i % p.repeats;
    write_scaled(sums.data() + i * p.depth, 1 / totals[i], p.depth,
                 p.out + (row * p.heads * p.repeats + of) * p.depth);
  }
}

// Computes the attention of the shares with index `from` to `to` - 1. Each pair of a share and a
// key-value head is one task.
inline void attend(const Attention& p, int64_t from, int64_t to) {
  const int64_t numbers = 2 * kRowsTogether * p.repeats * p.depth * (p.longest + p.time + 1);
  for_each_row((to - from) * p.heads, numbers, [&](int64_t task) {
    attend(p, p.shares[from + task / p.heads], task % p.heads);
  });
}

// Checks that x is a contiguous fp32 tensor of the given shape.
inline void check_contiguous(const Tensor& x, const char* name,
                             std::initializer_list<int64_t> shape) {
  check(x, name, shape);
  STD_TORCH_CHECK(x.is_contiguous(), name, ": expected a contiguous tensor");
}

// Checks the tensors of the cache, and divides the completions of each prompt into shares of at
// most kRowsTogether completions.
inline KvCache checked_cache(const Tensor& prompt_k, const Tensor& prompt_v,
                             const Tensor& completion_k, const Tensor& completion_v,
                             const Tensor& lengths, const Tensor& counts, int64_t rows,
                             int64_t time, std::optional<int64_t> window) {
  STD_TORCH_CHECK(prompt_k.dim() == 5 && completion_k.dim() == 5,
                  "prompt_k and completion_k: expected 5 axes");
  const int64_t prompts = prompt_k.size(0), heads = prompt_k.size(1), depth = prompt_k.size(3);
  const int64_t longest = prompt_k.size(2) * kTile, room = completion_k.size(2) * kTile;
  STD_TORCH_CHECK(heads > 0, "prompt_k: expected at least one head");
  check_contiguous(prompt_k, "prompt_k", {prompts, heads, longest / kTile, depth, kTile});
  check_contiguous(prompt_v, "prompt_v", {prompts, heads, longest / kTile, kTile, depth});
  check_contiguous(completion_k, "completion_k", {rows, heads, room / kTile, depth, kTile});
  check_contiguous(completion_v, "completion_v", {rows, heads, room / kTile, kTile, depth});
  STD_TORCH_CHECK(time >= 0 && time < room, "time: expected less than ", room, ", got ", time);
  STD_TORCH_CHECK(!window || *window > 0, "window: expected at least 1");
  const int64_t* ends = checked_vector<int64_t>(lengths, prompts, "lengths");
  const int64_t* count = checked_vector<int64_t>(counts, prompts, "counts");
  std::vector<Share> shares;
  int64_t row = 0;
  for (int64_t n = 0; n < prompts; ++n) {
    STD_TORCH_CHECK(ends[n] >= 0 && ends[n] <= longest && count[n] >= 0,
                    "lengths and counts: expected 0 to ", longest, " and more than -1");
    for (int64_t end = row + count[n]; row < end; row += shares.back().rows)
      shares.push_back({n, row, std::min(kRowsTogether, end - row)});
  }
  STD_TORCH_CHECK(row == rows, "counts: expected ", rows, " rows in all, got ", row);
  return {data<float>(prompt_k), data<float>(prompt_v), data<float>(completion_k),
          data<float>(completion_v), ends, heads, depth, longest, room, time,
          window.value_or(longest + room), std::move(shares)};
}

}  // namespace grpo_fast
