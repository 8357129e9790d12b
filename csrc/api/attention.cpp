// Operators attention and attention_backward: packed variable-length attention in fp32.
//
// A span is a range of consecutive tokens. The queries of span n attend to the keys of span n.
// grpo_fast/attention/kernels/explicit.py has the formulas.
//
// Layout: q, k and v are (T, heads, D) with any row stride and head stride. `repeats` query heads
// share one key-value head. The kernels treat the queries of these heads as additional rows of the
// span. Keys are repacked into tiles (products.h), so that each lane of a vector belongs to one
// token.
//
// Rounding: all sums are fp32, in an order that depends only on the span.
//
// Parallelism: a task of the forward pass computes kForwardRows rows of one span and head. A task
// of the backward pass computes a full span in one head, because only one thread may add to its dK
// and dV.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <tuple>
#include <vector>

#include "api/tensors.h"
#include "attention/products.h"
#include "gemm/gather.h"
#include "rows/chunk.h"

namespace grpo_fast {
namespace {

// Number of query rows in a forward task, and sizes of a backward block: its number of query rows
// and its number of keys. With these sizes, the attention scores of a task or block stay in cache.
constexpr int64_t kForwardRows = 128;
constexpr int64_t kBackwardRows = 32;
constexpr int64_t kBackwardKeys = 128;

// View of a (T, heads, D) tensor. The last dimension is contiguous.
struct Packed {
  float* data;
  int64_t row, head;

  explicit Packed(const Tensor& x)
      : data(grpo_fast::data<float>(x)), row(x.stride(0)), head(x.stride(1)) {}
  float* at(int64_t token, int64_t of) const { return data + token * row + of * head; }
  Matrix<float> of(int64_t first, int64_t head_) const { return {at(first, head_), row}; }
  Matrix<const float> read(int64_t first, int64_t head_) const { return {at(first, head_), row}; }
};

// The arguments shared by all tasks of a call.
struct Problem {
  const int32_t *starts_q, *starts_k;    // (N + 1,)
  int64_t spans, heads, repeats, depth;  // N, H_kv, H / H_kv, D
  bool causal;
  float scale;
};

// One span in one key-value head. A row is a query of one of the `repeats` query heads that use
// this key-value head. Rows are ordered by query, then by head.
struct Span {
  int64_t first_q, first_k, queries, keys, head, repeats;
  bool causal;

  Span(const Problem& p, int64_t n, int64_t head_)
      : first_q(p.starts_q[n]), first_k(p.starts_k[n]), queries(p.starts_q[n + 1] - first_q),
        keys(p.starts_k[n + 1] - first_k), head(head_), repeats(p.repeats), causal(p.causal) {}

  int64_t rows() const { return queries * repeats; }
  // Returns the number of keys to which a row attends. A causal span has as many keys as queries.
  int64_t seen(int64_t row) const { return causal ? row / repeats + 1 : keys; }
  // Returns the first row that attends to a key.
  int64_t first_row(int64_t key) const { return causal ? key * repeats : 0; }

  // For each row in [begin, end), calls body(row, token of the query, query head).
  template <class Body>
  void each(int64_t begin, int64_t end, const Body& body) const {
    int64_t query = begin / repeats, repeat = begin % repeats;
    for (int64_t row = begin; row < end; ++row) {
      body(row, first_q + query, head * repeats + repeat);
      if (++repeat == repeats) repeat = 0, ++query;
    }
  }

  // Copies the rows [begin, end) of x to contiguous memory, multiplied by `factor`.
  void gather(const Packed& x, int64_t begin, int64_t end, int64_t depth, float factor,
              float* to) const {
    each(begin, end, [&](int64_t row, int64_t token, int64_t of) {
      write_scaled(x.at(token, of), factor, depth, to + (row - begin) * depth);
    });
  }
};

// View of an (H, T) tensor with one number for each query head and token.
struct PerRow {
  float* data;
  int64_t head, row;

  explicit PerRow(const Tensor& x)
      : data(grpo_fast::data<float>(x)), head(x.stride(0)), row(x.stride(1)) {}
  float& at(int64_t token, int64_t of) const { return data[of * head + token * row]; }
};

// Returns uninitialised thread-local memory for `count` floats. A task must call this only once,
// because a second call may reallocate the memory.
float* scratch(int64_t count) {
  thread_local std::vector<float> buffer;
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

// Computes outputs and lse of at most kForwardRows rows of one span, from row `begin` on.
void forward(const Problem& p, const Span& span, int64_t begin, const Packed& q, const Packed& k,
             const Packed& v, const Packed& out, const PerRow& lse) {
  const int64_t end = std::min(span.rows(), begin + kForwardRows), seen = span.seen(end - 1);
  // 1. Repack the keys of these rows into tiles, and copy the queries, multiplied by `scale`.
  const int64_t width = round_up_to_tile(seen), rows = end - begin;
  float* tiles = scratch((width + rows) * p.depth + 4 * (width + p.depth));
  float* queries = tiles + width * p.depth;
  const Matrix<float> scores{queries + rows * p.depth, width}, sums{scores.row(4), p.depth};
  write_tiles(k.read(span.first_k, span.head), seen, p.depth, tiles);
  span.gather(q, begin, end, p.depth, p.scale, queries);
  // 2. Compute scores, their softmax and the weighted sum of the values, for 4, 2 or 1 rows at a
  // time.
  by_rows(begin, end, [&](int64_t row, auto count) {
    const int64_t last = span.seen(row + count - 1);
    multiply_tokens<count>({queries + (row - begin) * p.depth, p.depth}, tiles, p.depth, 0, last,
                           scores);
    SoftmaxSums found[4];
    for (int i = 0; i < count; ++i) {
      // Mask the tokens that the row does not see: a score of -inf gives them the weight 0.
      std::fill(scores.row(i) + span.seen(row + i), scores.row(i) + round_up_to_tile(last),
                kUnseen);
      found[i] = exponentials(scores.row(i), round_up_to_tile(last));
      std::memset(sums.row(i), 0, p.depth * sizeof(float));
    }
    add_tokens<count>({scores.data, 1, width}, v.read(span.first_k, span.head), last, p.depth,
                      sums);
    // 3. Divide by the sum of exponentials and write the results.
    span.each(row, row + count, [&](int64_t at, int64_t token, int64_t of) {
      const SoftmaxSums& s = found[at - row];
      write_scaled(sums.row(at - row), 1 / s.sum, p.depth, out.at(token, of));
      lse.at(token, of) = s.largest + std::log(s.sum);
    });
  });
}

// The tensors that the backward pass reads.
struct Given {
  Packed grad, q, k, v, out;
  PerRow lse;
};

// The gradients that the backward pass writes.
struct Wanted {
  Packed dq, dk, dv;
};

// A block of rows in the backward pass, with copies of its inputs and its partial results.
struct Block {
  int64_t begin, rows;
  float *queries, *grads, *sums;  // (rows, D): scaled q, dO, dQ
  float *lse, *delta;             // (rows,): delta = rowsum(dO * O)
  float *weights, *slopes;        // (rows, kBackwardKeys): P and dS
};

// Copies the inputs of a block of rows, multiplies its queries by `scale`, and computes delta =
// rowsum(dO * O).
void read_block(const Problem& p, const Span& span, const Given& from, const Block& to) {
  const int64_t end = to.begin + to.rows;
  span.gather(from.q, to.begin, end, p.depth, p.scale, to.queries);
  span.gather(from.grad, to.begin, end, p.depth, 1.0f, to.grads);
  std::memset(to.sums, 0, to.rows * p.depth * sizeof(float));
  span.each(to.begin, end, [&](int64_t row, int64_t token, int64_t of) {
    const int64_t i = row - to.begin;
    const float* out = from.out.at(token, of);
    to.delta[i] = dot_product(to.grads + i * p.depth, out, p.depth, out + from.out.row);
    to.lse[i] = from.lse.at(token, of);
  });
}

// Computes the attention weights P = e^(s - lse) of a block of rows and the keys [key, end), where
// s are the scores. Also computes the gradient of the scores, dS = P (dP - delta), where dP is the
// gradient of P.
void weigh(const Problem& p, const Span& span, const Block& block, const float* k_tiles,
           const float* v_tiles, int64_t key, int64_t end) {
  const int64_t count = end - key;
  by_rows(0, block.rows, [&](int64_t i, auto rows) {
    const int64_t at = i * kBackwardKeys, row = i * p.depth;
    multiply_tokens<rows>({block.queries + row, p.depth}, k_tiles + key * p.depth, p.depth, 0,
                          count, {block.weights + at, kBackwardKeys});
    multiply_tokens<rows>({block.grads + row, p.depth}, v_tiles + key * p.depth, p.depth, 0,
                          count, {block.slopes + at, kBackwardKeys});
  });
  // Use a bit mask to set P and dS to 0 for keys that the row does not see. A multiplication by 0
  // would not do: s - lse may be so large that P overflows to inf, and 0 * inf is NaN.
  for (int64_t i = 0; i < block.rows; ++i) {
    const int64_t seen = std::clamp<int64_t>(span.seen(block.begin + i) - key, 0, count);
    float *weights = block.weights + i * kBackwardKeys, *slopes = block.slopes + i * kBackwardKeys;
    for (int64_t t = 0; t < round_up_to_tile(count); t += kLanes) {
      const Ints is_seen = lane_numbers() + static_cast<int32_t>(t) < static_cast<int32_t>(seen);
      const Floats e = exp_floored(floor_exponent(load(weights + t) - block.lse[i]));
      store(weights + t, keep_where(is_seen, e));
      store(slopes + t, keep_where(is_seen, e * (load(slopes + t) - block.delta[i])));
    }
  }
}

// Computes dQ, dK and dV of one span in one head. A single thread adds the terms of all rows in
// order, so that the bits of the gradients do not depend on the number of threads.
void backward(const Problem& p, const Span& span, const Given& from, const Wanted& to) {
  const int64_t depth = p.depth, width = round_up_to_tile(span.keys);
  const int64_t scores = kBackwardRows * kBackwardKeys, in_rows = kBackwardRows * depth;
  // 1. Divide the scratch memory into tiles of keys, tiles of values, and the buffers of a block.
  float* k_tiles = scratch(2 * width * depth + 3 * in_rows + 2 * scores + 2 * kBackwardRows);
  float *v_tiles = k_tiles + width * depth, *free = v_tiles + width * depth;
  const auto k = from.k.read(span.first_k, span.head), v = from.v.read(span.first_k, span.head);
  const auto dk = to.dk.of(span.first_k, span.head), dv = to.dv.of(span.first_k, span.head);
  write_tiles(k, span.keys, depth, k_tiles), write_tiles(v, span.keys, depth, v_tiles);
  // 2. Clear dK and dV, because the blocks of rows add to them.
  for (int64_t key = 0; key < span.keys; ++key) {
    std::memset(dk.row(key), 0, depth * sizeof(float));
    std::memset(dv.row(key), 0, depth * sizeof(float));
  }
  Block block{0, 0, free, free + in_rows, free + 2 * in_rows, nullptr, nullptr, nullptr, nullptr};
  block.weights = block.sums + in_rows, block.slopes = block.weights + scores;
  block.lse = block.slopes + scores, block.delta = block.lse + kBackwardRows;
  // 3. For each block of rows and each block of keys, compute P and dS. Then add dS K to dQ, P^T dO
  // to dV, and dS^T Q to dK.
  for (; block.begin < span.rows(); block.begin += kBackwardRows) {
    block.rows = std::min(kBackwardRows, span.rows() - block.begin);
    read_block(p, span, from, block);
    const int64_t last = span.seen(block.begin + block.rows - 1);
    for (int64_t key = 0; key < last; key += kBackwardKeys) {
      const int64_t end = std::min(last, key + kBackwardKeys);
      weigh(p, span, block, k_tiles, v_tiles, key, end);
      by_rows(0, block.rows, [&](int64_t i, auto rows) {
        const int64_t seen = std::min(end, span.seen(block.begin + i + rows - 1)) - key;
        add_tokens<rows>({block.slopes + i * kBackwardKeys, 1, kBackwardKeys},
                         {k.row(key), k.stride}, seen, depth, {block.sums + i * depth, depth});
      });
      by_rows(key, end, [&](int64_t at, auto keys) {
        // Skip the rows before `first`, which do not attend to these keys.
        const int64_t first = std::max<int64_t>(0, span.first_row(at) - block.begin);
        const int64_t count = block.rows - first, place = first * kBackwardKeys + at - key;
        if (count <= 0) return;
        add_tokens<keys>({block.weights + place, kBackwardKeys, 1},
                         {block.grads + first * depth, depth}, count, depth,
                         {dv.row(at), dv.stride});
        add_tokens<keys>({block.slopes + place, kBackwardKeys, 1},
                         {block.queries + first * depth, depth}, count, depth,
                         {dk.row(at), dk.stride});
      });
    }
    const int64_t end = block.begin + block.rows;
    // 4. Write dQ of the block of rows.
    span.each(block.begin, end, [&](int64_t row, int64_t token, int64_t of) {
      write_scaled(block.sums + (row - block.begin) * depth, p.scale, depth, to.dq.at(token, of));
    });
  }
}

// Checks the arguments of an attention operator, and collects them in a Problem.
Problem checked(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q,
                const Tensor& cu_k, bool causal, double scale) {
  STD_TORCH_CHECK(q.dim() == 3 && k.dim() == 3, "q and k: expected (tokens, heads, D)");
  const int64_t heads = k.size(1), depth = q.size(2), spans = cu_q.size(0);
  STD_TORCH_CHECK(heads > 0 && q.size(1) % heads == 0, "q: expected a multiple of ", heads,
                  " heads, got ", q.size(1));
  check(q, "q", {q.size(0), q.size(1), depth}), check(k, "k", {k.size(0), heads, depth});
  check(v, "v", {k.size(0), heads, depth});
  const int32_t* starts_q = checked_offsets<int32_t>(cu_q, q.size(0), "cu_q");
  const int32_t* starts_k = checked_offsets<int32_t>(cu_k, k.size(0), "cu_k");
  STD_TORCH_CHECK(cu_k.size(0) == spans, "cu_k: expected ", spans, " numbers as in cu_q, got ",
                  cu_k.size(0));
  for (int64_t n = 0; n + 1 < spans; ++n) {
    const int64_t queries = starts_q[n + 1] - starts_q[n], keys = starts_k[n + 1] - starts_k[n];
    STD_TORCH_CHECK(causal ? keys == queries : keys > 0 || queries == 0,
                    "cu_k: expected a key for every query of span ", n, ", got ", keys, " for ",
                    queries);
  }
  return {starts_q, starts_k, spans - 1, heads, q.size(1) / heads, depth, causal,
          static_cast<float>(scale)};
}

// Returns the attention outputs (Tq, H, D) and the lse of the scores (H, Tq), both in fp32.
std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k,
                                     bool causal, double scale) {
  const Problem p = checked(q, k, v, cu_q, cu_k, causal, scale);
  const Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)});
  const Tensor lse = torch::stable::new_empty(q, {q.size(1), q.size(0)});
  struct Task {
    int64_t span, head, begin;
  };
  std::vector<Task> tasks;
  for (int64_t n = 0; n < p.spans; ++n)
    for (int64_t head = 0; head < p.heads; ++head)
      for (int64_t row = 0; row < Span(p, n, head).rows(); row += kForwardRows)
        tasks.push_back({n, head, row});
  const int64_t count = static_cast<int64_t>(tasks.size());
  const int64_t numbers = q.size(0) * q.size(1) * p.depth / std::max<int64_t>(1, count);
  for_each_row(count, numbers, [&](int64_t i) {
    const Task& task = tasks[i];
    forward(p, Span(p, task.span, task.head), task.begin, Packed(q), Packed(k), Packed(v),
            Packed(out), PerRow(lse));
  });
  return {out, lse};
}

// Returns the gradients dq, dk and dv. `out` and `lse` are the results of the forward pass. If
// several forward calls computed the attention to different keys, pass their merged results.
std::tuple<Tensor, Tensor, Tensor> attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v,
                                                      Tensor out, Tensor lse, Tensor cu_q,
                                                      Tensor cu_k, bool causal, double scale) {
  const Problem p = checked(q, k, v, cu_q, cu_k, causal, scale);
  check(grad, "grad", {q.size(0), q.size(1), p.depth});
  check(out, "out", {q.size(0), q.size(1), p.depth});
  STD_TORCH_CHECK(lse.is_cpu() && is_fp32(lse) && lse.dim() == 2 && lse.size(0) == q.size(1) &&
                      lse.size(1) == q.size(0),
                  "lse: expected (", q.size(1), ", ", q.size(0), ") float32");
  const auto like = [](const Tensor& x) {
    return torch::stable::new_empty(x, {x.size(0), x.size(1), x.size(2)});
  };
  const Tensor dq = like(q), dk = like(k), dv = like(v);
  const Given given{Packed(grad), Packed(q), Packed(k), Packed(v), Packed(out), PerRow(lse)};
  const Wanted wanted{Packed(dq), Packed(dk), Packed(dv)};
  const int64_t count = p.spans * p.heads;
  const int64_t numbers = q.size(0) * q.size(1) * p.depth / std::max<int64_t>(1, count);
  for_each_row(count, numbers, [&](int64_t i) {
    backward(p, Span(p, i / p.heads, i % p.heads), given, wanted);
  });
  return {dq, dk, dv};
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(GRPO_FAST_LIBRARY, library) {
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, bool causal, float scale)"
      " -> (Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
      " Tensor cu_q, Tensor cu_k, bool causal, float scale) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(GRPO_FAST_LIBRARY, CPU, library) {
  library.impl("attention", TORCH_BOX(&grpo_fast::attention));
  library.impl("attention_backward", TORCH_BOX(&grpo_fast::attention_backward));
}
