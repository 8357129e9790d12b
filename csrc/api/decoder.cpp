// Operators of the decoding step of a Llama-like model. decode_layer_ applies one layer to one new
// token of each of B completions. linear computes the LM head.
//
//     x += attention(rotary(norm(x) W_qkv + bias)) W_out
//     x += (silu(norm(x) W_gate) * norm(x) W_up) W_down
//
// Layout: activations are contiguous (B, columns) matrices. Weights are packed into panels once
// (gemm/pack.h). Packing them in every step would take a third of the time of a product with few
// rows.
//
// Rounding: with fp32 weights, all numbers are fp32. With bf16 weights, the numbers that autocast
// would round are rounded to bf16: the operands and results of the products, and the rotated
// queries and keys. Sums are fp32. The bits of a row do not depend on the batch or on the threads.
//
// Parallelism: if there are enough rows, each thread runs its rows through all steps of the layer
// without waiting for other threads. With fewer rows, all threads work on each product together.
#include <torch/csrc/stable/library.h>

#include "attention/decode.h"
#include "gemm/result.h"
#include "rows/layers.h"

namespace grpo_fast {
namespace {

// Each thread computes its rows separately if it has at least this number of rows. With fewer rows,
// its sums would not fill the registers of the matrix product.
constexpr int64_t kRowsAlone = 16;

// Returns the Problem of the matrix product x (rows, depth) * weight^T, for a weight (width,
// depth).
template <class T>
Problem<T, T> problem_of(int64_t rows, int64_t width, int64_t depth, const T* x, const T* weight,
                         int64_t stride) {
  return {rows, width, depth, {x, depth, false}, {weight, stride, false}};
}

// Returns the number of elements of a packed weight whose shape before packing was (width, depth).
template <class T>
int64_t packed_size(int64_t width, int64_t depth) {
  const Problem<T, T> p = problem_of<T>(0, width, depth, nullptr, nullptr, 0);
  return p.slices() * p.panels() * kPanelWords * kPerWord<T>;
}

template <class T>
Tensor packed_as(const Tensor& weight) {
  const Tensor packed =
      empty(weight, packed_size<T>(weight.size(0), weight.size(1)), weight.scalar_type());
  pack_panels(problem_of<T>(0, weight.size(0), weight.size(1), nullptr, data<const T>(weight),
                            weight.stride(0)),
              torch::stable::get_num_threads(), data<uint32_t>(packed));
  return packed;
}

// Packs a weight (N, K) into panels. Returns the panels as one vector with the dtype of the weight.
Tensor pack(Tensor weight) {
  check_operand(weight, "weight");
  STD_TORCH_CHECK(weight.numel() > 0, "weight: expected some numbers");
  return is_fp32(weight) ? packed_as<float>(weight) : packed_as<Bfloat16>(weight);
}

// Rounds `count` numbers to bf16 in place.
void round_to_bf16(float* x, int64_t count) {
  by_vectors(count, [&](int64_t j, int64_t here) GRPO_FAST_BODY {
    Bfloat16 narrow[kLanes];
    store(narrow, load_up_to(x + j, here));
    store_up_to(x + j, load(narrow), here);
  });
}

// View of a packed weight, whose shape before packing was (width, depth).
struct Packed {
  const uint32_t* panels;
  int64_t width, depth;
  bool is_fp32, tiles;  // tiles: multiply with torch's AMX product

  // Computes x (rows, depth) times the transposed weight. The result is stored in out (rows,
  // width), or added to it. With a bf16 weight and `round`, the product is first rounded to bf16.
  void multiply(const float* x, int64_t rows, float* out, bool add, bool round = true) const {
    const auto store = [&](const Block& block, float* sums, int64_t stride) {
      for (int64_t row = 0; !is_fp32 && round && row < block.rows; ++row)
        round_to_bf16(sums + row * stride, block.columns);
      store_block(block, sums, stride, out, width, add);
    };
    if (rows == 0) return;
    if (is_fp32)
      return grpo_fast::multiply<Vectors>(problem_of<float>(rows, width, depth, x, nullptr, 0),
                                          store, 0, panels);
    std::vector<Bfloat16> narrow(static_cast<size_t>(rows * depth));
    by_vectors(rows * depth, [&](int64_t j, int64_t count) GRPO_FAST_BODY {
      store_up_to(narrow.data() + j, load_up_to(x + j, count), count);
    });
    const auto p = problem_of<Bfloat16>(rows, width, depth, narrow.data(), nullptr, 0);
    tiles ? grpo_fast::multiply<Tiles>(p, store, 0, panels)
          : grpo_fast::multiply<Vectors>(p, store, 0, panels);
  }
};

// Checks the dtype and the size of a packed (width, depth) weight, and returns a view of it.
Packed checked_packed(const Tensor& x, const char* name, int64_t width, int64_t depth,
                      bool tiles) {
  const bool is_wide = is_fp32(x);
  const int64_t size =
      is_wide ? packed_size<float>(width, depth) : packed_size<Bfloat16>(width, depth);
  STD_TORCH_CHECK(x.is_cpu() && x.is_contiguous() &&
                      (is_wide || x.scalar_type() == ScalarType::BFloat16),
                  name, ": expected float32 or bfloat16, packed");
  STD_TORCH_CHECK(x.numel() == size, name, ": expected ", size, " packed numbers, got ",
                  x.numel());
  STD_TORCH_CHECK(!tiles || torch_kernel().brgemm, "tiles: expected a torch with brgemm");
  return {data<const uint32_t>(x), width, depth, is_wide, tiles};
}

// Returns x * weight^T, (B, N) fp32, for x (B, K) and a packed weight (N, K). `width` is N.
Tensor linear(Tensor x, Tensor weight, int64_t width, bool tiles) {
  check_matrix(x, "x");
  STD_TORCH_CHECK(is_fp32(x) && x.is_contiguous(), "x: expected contiguous float32 rows");
  const Packed packed = checked_packed(weight, "weight", width, x.size(1), tiles);
  const Tensor out = torch::stable::new_empty(x, {x.size(0), width});
  packed.multiply(data<const float>(x), x.size(0), data<float>(out), false, false);
  return out;
}

// One call of decode_layer_, with the weights of the layer, its inputs and its buffers.
struct Layer {
  Packed qkv, out, gate_up, down;
  const float *norm, *bias, *q_norm, *k_norm, *post_norm;
  float eps;
  const float *cos, *sin;  // (B, D)
  float* x;                // (B, hidden)
  // Buffers with one row for each completion. Threads that work separately use different rows.
  float *normed, *projected, *found, *both, *gated;
  Attention attention;

  // Writes the RMSNorm of the rows of x from `first` on to `normed`.
  void normalise(const float* weight, int64_t first, int64_t rows) const {
    const int64_t hidden = qkv.depth;
    for_each_row(rows, hidden, [&](int64_t i) {
      float unused;
      norm_row(x + (first + i) * hidden, weight, eps, hidden, normed + (first + i) * hidden,
               &unused);
    });
  }

  // Adds the bias of qkv to row i of `projected`, applies the optional norms to each head, and
  // rotates queries and keys.
  void add_bias_and_rotate(int64_t i) const {
    const int64_t depth = attention.depth, keys = attention.heads, heads = keys * attention.repeats;
    float* row = projected + i * qkv.width;
    if (bias) add_scaled(bias, 1.0f, qkv.width, row);
    if (bias && !qkv.is_fp32) round_to_bf16(row, qkv.width);
    for (int64_t head = 0; head < heads + keys; ++head) {
      const float* scales = head < heads ? q_norm : k_norm;
      float *at = row + head * depth, unused;
      if (scales) norm_row(at, scales, eps, depth, at, &unused);
      rotate<false>(at, cos + i * depth, sin + i * depth, depth / 2, at);
    }
    if (!qkv.is_fp32) round_to_bf16(row, qkv.width);
  }

  // Runs the layer for the shares [from, to). A share is a group of completions of one prompt that
  // a thread computes together (attention/decode.h).
  void run(int64_t from, int64_t to) const {
    const std::vector<Share>& shares = attention.shares;
    const int64_t first = shares[from].first;
    const int64_t rows = shares[to - 1].first + shares[to - 1].rows - first;
    const int64_t hidden = qkv.depth, wide = qkv.width, depth = out.depth, inner = down.depth;
    // 1. Compute the attention block.
    normalise(norm, first, rows);
    qkv.multiply(normed + first * hidden, rows, projected + first * wide, false, !bias);
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

  // Runs the layer for the whole batch. If there are enough rows for all threads, each thread
  // computes different completions. Otherwise, the threads work on each product together.
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

// Applies one decoder layer to the contiguous x (B, hidden) in place. qkv is the joined weight of
// queries, keys and values. gate_up is the joined weight of gate and up, which have `inner` columns
// each. q_norm and k_norm are weights of an RMSNorm that is applied to each head. cos and sin are
// (B, D).
void decode_layer_(Tensor x, Tensor norm, Tensor qkv, std::optional<Tensor> bias,
                   std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, Tensor out_weight,
                   Tensor post_norm, Tensor gate_up, Tensor down, int64_t heads, int64_t inner,
                   double eps, bool tiles, Tensor cos, Tensor sin, Tensor prompt_k, Tensor prompt_v,
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
      checked_packed(qkv, "qkv", width, hidden, tiles),
      checked_packed(out_weight, "out_weight", hidden, heads * depth, tiles),
      checked_packed(gate_up, "gate_up", 2 * inner, hidden, tiles),
      checked_packed(down, "down", hidden, inner, tiles),
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
  library.def("linear(Tensor x, Tensor weight, int width, bool tiles) -> Tensor");
  library.def(
      "decode_layer_(Tensor(a!) x, Tensor norm, Tensor qkv, Tensor? bias, Tensor? q_norm,"
      " Tensor? k_norm, Tensor out_weight, Tensor post_norm, Tensor gate_up, Tensor down,"
      " int heads, int inner, float eps, bool tiles, Tensor cos, Tensor sin, Tensor prompt_k,"
      " Tensor prompt_v,"
      " Tensor(b!) completion_k, Tensor(c!) completion_v, Tensor lengths, Tensor counts,"
      " int time, float scale, int? window) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(GRPO_FAST_LIBRARY, CPU, library) {
  library.impl("pack", TORCH_BOX(&grpo_fast::pack));
  library.impl("linear", TORCH_BOX(&grpo_fast::linear));
  library.impl("decode_layer_", TORCH_BOX(&grpo_fast::decode_layer_));
}
