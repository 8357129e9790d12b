// Decoder step of a Llama-like model in fp32. decode_layer_ runs one layer for one new token of
// each of B completions. linear computes the LM head.
//
//   x += attention(rotary(norm(x) W_qkv + bias)) W_out
//   x += (silu(norm(x) W_gate) * norm(x) W_up) W_down
//
// Layout: activations are contiguous (B, columns) matrices. Weights are packed into panels once
// (gemm/pack.h), because packing would take a third of the time of a product with few rows.
//
// Rounding: all numbers are fp32. The bits of a row do not depend on the batch or on the threads.
// Parallel: if there are enough rows, each thread runs its rows through all steps of the layer
// without synchronisation. With fewer rows, all threads work on each product together.
#include <torch/csrc/stable/library.h>

#include "attention/decode.h"
#include "gemm/result.h"
#include "rows/layers.h"

namespace grpo_fast {
namespace {

// Minimum number of rows per thread for which threads work separately. With fewer rows, a thread
// would not fill the registers of its micro-kernel.
constexpr int64_t kRowsAlone = 16;

// Describes the product of x (rows, depth) and a transposed weight (width, depth).
Problem<float, float> problem_of(int64_t rows, int64_t width, int64_t depth, const float* x,
                                 const float* weight, int64_t stride) {
  return {rows, width, depth, {x, depth, false}, {weight, stride, false}};
}

// Returns the number of 32-bit words of a packed weight.
int64_t packed_words(const Problem<float, float>& p) {
  return p.slices() * p.panels() * kPanelWords;
}

// Packs a weight (N, K) fp32 into panels. Returns a vector of 32-bit words with the dtype fp32.
Tensor pack(Tensor weight) {
  check_matrix(weight, "weight");
  STD_TORCH_CHECK(is_fp32(weight) && weight.numel() > 0, "weight: expected float32 numbers");
  const Problem<float, float> p = problem_of(0, weight.size(0), weight.size(1), nullptr,
                                             data<const float>(weight), weight.stride(0));
  const Tensor packed = empty(weight, packed_words(p));
  pack_panels(p, torch::stable::get_num_threads(), data<uint32_t>(packed));
  return packed;
}

// View of a packed weight, which has the unpacked shape (width, depth).
struct Packed {
  const uint32_t* panels;
  int64_t width, depth;

  // Computes x (rows, depth) times the transposed weight. The result is stored in out (rows,
  // width), or added to it.
  void multiply(const float* x, int64_t rows, float* out, bool add) const {
    const auto store = [&](const Block& block, float* sums, int64_t stride) {
      store_block(block, sums, stride, out, width, add);
    };
    const Problem<float, float> p = problem_of(rows, width, depth, x, nullptr, 0);
    if (rows > 0) grpo_fast::multiply<Vectors>(p, store, 0, panels);
  }
};

// Checks that a tensor has the size of a packed (width, depth) weight.
Packed checked_packed(const Tensor& x, const char* name, int64_t width, int64_t depth) {
  const int64_t words = packed_words(problem_of(0, width, depth, nullptr, nullptr, 0));
  STD_TORCH_CHECK(x.is_cpu() && x.is_contiguous() && is_fp32(x), name,
                  ": expected float32, packed");
  STD_TORCH_CHECK(x.numel() == words, name, ": expected ", words, " packed numbers, got ",
                  x.numel());
  return {data<const uint32_t>(x), width, depth};
}

// Returns the product of x (B, K) and a packed, transposed weight (N, K), which is (B, N) fp32.
Tensor linear(Tensor x, Tensor weight, int64_t width) {
  check_matrix(x, "x");
  STD_TORCH_CHECK(is_fp32(x) && x.is_contiguous(), "x: expected contiguous float32 rows");
  const Packed packed = checked_packed(weight, "weight", width, x.size(1));
  const Tensor out = torch::stable::new_empty(x, {x.size(0), width});
  packed.multiply(data<const float>(x), x.size(0), data<float>(out), false);
  return out;
}

// One call of decode_layer_: the layer's weights, its inputs and its buffers.
struct Layer {
  Packed qkv, out, gate_up, down;
  const float *norm, *bias, *q_norm, *k_norm, *post_norm;
  float eps;
  const float *cos, *sin;  // (B, D)
  float* x;                // (B, hidden)
  // Buffers with one row per completion. Threads that work separately use different rows.
  float *normed, *projected, *found, *both, *gated;
  Attention attention;

  // Applies RMSNorm to `rows` rows, starting at row `first`.
  void normalise(const float* weight, int64_t first, int64_t rows) const {
    const int64_t hidden = qkv.depth;
    for_each_row(rows, hidden, [&](int64_t i) {
      float unused;
      norm_row(x + (first + i) * hidden, weight, eps, hidden, normed + (first + i) * hidden,
               &unused);
    });
  }

  // Adds the qkv bias to row i, applies the optional per-head norms, and rotates queries and keys.
  void add_bias_and_rotate(int64_t i) const {
    const int64_t depth = attention.depth, keys = attention.heads, heads = keys * attention.repeats;
    float* row = projected + i * qkv.width;
    if (bias) add_scaled(bias, 1.0f, qkv.width, row);
    for (int64_t head = 0; head < heads + keys; ++head) {
      const float* scales = head < heads ? q_norm : k_norm;
      float *at = row + head * depth, unused;
      if (scales) norm_row(at, scales, eps, depth, at, &unused);
      rotate<false>(at, cos + i * depth, sin + i * depth, depth / 2, at);
    }
  }

  // Runs the layer for the shares [from, to). A share is a group of completions of one prompt,
  // which one thread handles together (attention/decode.h).
  void run(int64_t from, int64_t to) const {
    const std::vector<Share>& shares = attention.shares;
    const int64_t first = shares[from].first;
    const int64_t rows = shares[to - 1].first + shares[to - 1].rows - first;
    const int64_t hidden = qkv.depth, wide = qkv.width, depth = out.depth, inner = down.depth;
    // 1. Compute the attention block.
    normalise(norm, first, rows);
    qkv.multiply(normed + first * hidden, rows, projected + first * wide, false);
    for_each_row(rows, wide, [&](int64_t i) { add_bias_and_rotate(first + i); });
    attend(attention, from, to);
    out.multiply(found + first * depth, rows, x + first * hidden, true);

    // 2. Compute the MLP block.
    normalise(post_norm, first, rows);
    gate_up.multiply(normed + first * hidden, rows, both + first * 2 * inner, false);
    for_each_row(rows, inner, [&](int64_t i) {
      const float* gate = both + (first + i) * 2 * inner;
      swiglu_row(gate, gate + inner, inner, gated + (first + i) * inner);
    });
    down.multiply(gated + first * inner, rows, x + first * hidden, true);
  }

  // Runs the layer. If there are enough rows for each thread, the threads process different shares.
  // Otherwise, all threads work on each product together.
  void run() const {
    const int64_t shares = static_cast<int64_t>(attention.shares.size());
    const int64_t parts = std::min<int64_t>(shares, torch::stable::get_num_threads());
    if (shares == 0) return;
    if (shares * kRowsTogether < parts * kRowsAlone) return run(0, shares);
    torch::stable::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      run(begin * shares / parts, end * shares / parts);
    });
  }
};

// Updates x (B, hidden) in place. x must be contiguous. The weight qkv computes queries, keys and
// values. The weight gate_up computes gate and up, with `inner` columns each. q_norm and k_norm are
// RMSNorm weights that all heads use. cos and sin are (B, D).
void decode_layer_(Tensor x, Tensor norm, Tensor qkv, std::optional<Tensor> bias,
                   std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, Tensor out_weight,
                   Tensor post_norm, Tensor gate_up, Tensor down, int64_t heads, int64_t inner,
                   double eps, Tensor cos, Tensor sin, Tensor prompt_k, Tensor prompt_v,
                   Tensor completion_k, Tensor completion_v, Tensor lengths, Tensor counts,
                   int64_t time, double scale, std::optional<int64_t> window) {
  // 1. Check the arguments.
  check_matrix(x, "x");
  STD_TORCH_CHECK(is_fp32(x) && x.is_contiguous(), "x: expected contiguous float32 rows");
  const int64_t rows = x.size(0), hidden = x.size(1);
  KvCache cache = checked_cache(prompt_k, prompt_v, completion_k, completion_v, lengths, counts,
                                rows, time, window);
  const int64_t depth = cache.depth, keys = cache.heads, width = (heads + 2 * keys) * depth;
  STD_TORCH_CHECK(heads > 0 && heads % keys == 0, "heads: expected a multiple of ", keys,
                  ", got ", heads);
  STD_TORCH_CHECK(inner > 0 && depth % 2 == 0, "inner, D: expected some columns, an even number");
  check_contiguous(cos, "cos", {rows, depth}), check_contiguous(sin, "sin", {rows, depth});

  // 2. Allocate one buffer and divide it.
  const int64_t columns = hidden + width + heads * depth + 3 * inner;
  const Tensor room = empty(x, rows * columns);
  float* normed = data<float>(room);
  float* projected = normed + rows * hidden;
  float* found = projected + rows * width;
  float* both = found + rows * heads * depth;
  float* gated = both + rows * 2 * inner;
  const float *k = projected + heads * depth, *v = k + keys * depth;
  // 3. Collect the weights and run.
  const Layer layer{
      checked_packed(qkv, "qkv", width, hidden),
      checked_packed(out_weight, "out_weight", hidden, heads * depth),
      checked_packed(gate_up, "gate_up", 2 * inner, hidden),
      checked_packed(down, "down", hidden, inner),
      checked_vector<float>(norm, hidden, "norm"),
      checked_vector(bias, width, "bias"),
      checked_vector(q_norm, depth, "q_norm"),
      checked_vector(k_norm, depth, "k_norm"),
      checked_vector<float>(post_norm, hidden, "post_norm"),
      static_cast<float>(eps),
      data<const float>(cos),
      data<const float>(sin),
      data<float>(x),
      normed,
      projected,
      found,
      both,
      gated,
      {std::move(cache), projected, k, v, depth, width, depth, width, depth, width, heads / keys,
       static_cast<float>(scale), found},
  };
  layer.run();
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(GRPO_FAST_LIBRARY, library) {
  library.def("pack(Tensor weight) -> Tensor");
  library.def("linear(Tensor x, Tensor weight, int width) -> Tensor");
  library.def(
      "decode_layer_(Tensor(a!) x, Tensor norm, Tensor qkv, Tensor? bias, Tensor? q_norm,"
      " Tensor? k_norm, Tensor out_weight, Tensor post_norm, Tensor gate_up, Tensor down,"
      " int heads, int inner, float eps, Tensor cos, Tensor sin, Tensor prompt_k, Tensor prompt_v,"
      " Tensor(b!) completion_k, Tensor(c!) completion_v, Tensor lengths, Tensor counts,"
      " int time, float scale, int? window) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(GRPO_FAST_LIBRARY, CPU, library) {
  library.impl("pack", TORCH_BOX(&grpo_fast::pack));
  library.impl("linear", TORCH_BOX(&grpo_fast::linear));
  library.impl("decode_layer_", TORCH_BOX(&grpo_fast::decode_layer_));
}
