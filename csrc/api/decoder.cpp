// The operator decode_layer_: one new token of each of B completions through a layer of a decoder
// like Llama's, in fp32.
//
//   x += attention(rotary(norm(x) W_qkv + bias)) W_out
//   x += (silu(norm(x) W_gate) * norm(x) W_up) W_down
//
// Weights come packed: beside few rows, arranging them takes a third of a product's time.
#include <torch/csrc/stable/library.h>

#include "attention/decode.h"
#include "gemm/result.h"
#include "rows/layers.h"

namespace grpo_fast {
namespace {

Problem<float, float> problem_of(int64_t rows, int64_t width, int64_t depth, const float* x,
                                 const float* weight, int64_t stride) {
  return {rows, width, depth, {x, depth, false}, {weight, stride, false}};
}

int64_t words_of(const Problem<float, float>& p) {
  return p.slices() * p.panels() * kPanelWords;
}

// weight (N, K) fp32 -> its panels, (words,).
Tensor pack(Tensor weight) {
  check_matrix(weight, "weight");
  STD_TORCH_CHECK(is_fp32(weight) && weight.numel() > 0, "weight: expected float32 numbers");
  const Problem<float, float> p = problem_of(0, weight.size(0), weight.size(1), nullptr,
                                             data<const float>(weight), weight.stride(0));
  const Tensor packed = empty(weight, words_of(p));
  pack_panels(p, torch::stable::get_num_threads(), data<uint32_t>(packed));
  return packed;
}

// out (rows, width) = or += x (rows, depth) * a packed weight.
void multiply_packed(const float* x, int64_t rows, int64_t depth, const Tensor& packed,
                     const char* name, int64_t width, float* out, bool add) {
  const Problem<float, float> p = problem_of(rows, width, depth, x, data<const float>(packed), 0);
  const int64_t words = words_of(p);
  STD_TORCH_CHECK(packed.is_cpu() && packed.is_contiguous() && is_fp32(packed), name,
                  ": expected float32, packed");
  STD_TORCH_CHECK(packed.numel() == words, name, ": expected ", words, " packed numbers, got ",
                  packed.numel());
  if (rows == 0) return;
  const auto store = [&](const Block& block, float* sums, int64_t stride) {
    store_block(block, sums, stride, out, width, add);
  };
  multiply<Vectors>(p, store, 0, data<const uint32_t>(packed));
}

// RMSNorm of every row.
Tensor normed(const Tensor& x, const Tensor& weight, const char* name, double eps) {
  const int64_t rows = x.size(0), columns = x.size(1);
  const float *from = data<const float>(x), *w = checked_vector<float>(weight, columns, name);
  const Tensor y = torch::stable::new_empty(x, {rows, columns});
  for_each_row(rows, columns, [&](int64_t i) {
    float scale;
    norm_row(from + i * columns, w, static_cast<float>(eps), columns,
             data<float>(y) + i * columns, &scale);
  });
  return y;
}

// x (B, hidden) contiguous, in place. qkv: of queries, keys and values, side by side; gate_up: of
// gate and up, `inner` columns each. q_norm and k_norm: RMSNorm of every head. cos, sin (B, D).
void decode_layer_(Tensor x, Tensor norm, Tensor qkv, std::optional<Tensor> bias,
                   std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, Tensor out_weight,
                   Tensor post_norm, Tensor gate_up, Tensor down, int64_t heads, int64_t inner,
                   double eps, Tensor cos, Tensor sin, Tensor prompt_k, Tensor prompt_v,
                   Tensor own_k, Tensor own_v, Tensor lengths, Tensor counts, int64_t time,
                   double scale, std::optional<int64_t> window) {
  check_matrix(x, "x");
  STD_TORCH_CHECK(is_fp32(x) && x.is_contiguous(), "x: expected contiguous float32 rows");
  const int64_t rows = x.size(0), hidden = x.size(1);
  Held held =
      checked_held(prompt_k, prompt_v, own_k, own_v, lengths, counts, rows, time, window);
  const int64_t depth = held.depth, keys = held.heads, width = (heads + 2 * keys) * depth;
  STD_TORCH_CHECK(heads > 0 && heads % keys == 0, "heads: expected a multiple of ", keys,
                  ", got ", heads);
  STD_TORCH_CHECK(inner > 0 && depth % 2 == 0, "inner, D: expected some columns, an even number");
  check_lying(cos, "cos", {rows, depth}), check_lying(sin, "sin", {rows, depth});
  const float* added = checked_vector(bias, width, "bias");
  const float *q_scales = checked_vector(q_norm, depth, "q_norm"),
              *k_scales = checked_vector(k_norm, depth, "k_norm");

  const Tensor projected = torch::stable::new_empty(x, {rows, width});
  float* numbers = data<float>(projected);
  multiply_packed(data<const float>(normed(x, norm, "norm", eps)), rows, hidden, qkv, "qkv", width,
                  numbers, false);
  for_each_row(rows, width, [&](int64_t i) {
    float* row = numbers + i * width;
    if (added) add_scaled(added, 1.0f, width, row);
    for (int64_t head = 0; head < heads + keys; ++head) {
      const float* scales = head < heads ? q_scales : k_scales;
      float *at = row + head * depth, unused;
      if (scales) norm_row(at, scales, static_cast<float>(eps), depth, at, &unused);
      rotate<false>(at, data<const float>(cos) + i * depth, data<const float>(sin) + i * depth,
                    depth / 2, at);
    }
  });
  const Tensor found = torch::stable::new_empty(x, {rows, heads * depth});
  const float *k = numbers + heads * depth, *v = k + keys * depth;
  attend({std::move(held), numbers, k, v, depth, width, depth, width, depth, width, heads / keys,
          static_cast<float>(scale), data<float>(found)});
  multiply_packed(data<const float>(found), rows, heads * depth, out_weight, "out_weight", hidden,
                  data<float>(x), true);

  const Tensor both = torch::stable::new_empty(x, {rows, 2 * inner});
  const Tensor gated = torch::stable::new_empty(x, {rows, inner});
  multiply_packed(data<const float>(normed(x, post_norm, "post_norm", eps)), rows, hidden, gate_up,
                  "gate_up", 2 * inner, data<float>(both), false);
  for_each_row(rows, inner, [&](int64_t i) {
    const float* gate = data<const float>(both) + i * 2 * inner;
    swiglu_row(gate, gate + inner, inner, data<float>(gated) + i * inner);
  });
  multiply_packed(data<const float>(gated), rows, inner, down, "down", hidden, data<float>(x),
                  true);
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(grpo_fast_decoder, library) {
  library.def("pack(Tensor weight) -> Tensor");
  library.def(
      "decode_layer_(Tensor(a!) x, Tensor norm, Tensor qkv, Tensor? bias, Tensor? q_norm,"
      " Tensor? k_norm, Tensor out_weight, Tensor post_norm, Tensor gate_up, Tensor down,"
      " int heads, int inner, float eps, Tensor cos, Tensor sin, Tensor prompt_k, Tensor prompt_v,"
      " Tensor(b!) own_k, Tensor(c!) own_v, Tensor lengths, Tensor counts, int time, float scale,"
      " int? window) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_decoder, CPU, library) {
  library.impl("pack", TORCH_BOX(&grpo_fast::pack));
  library.impl("decode_layer_", TORCH_BOX(&grpo_fast::decode_layer_));
}
