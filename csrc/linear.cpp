// hidden -> log-probabilities, without logits: the head's product with the softmax statistics in its epilogue. Where
// gradients follow, the epilogue also stores weights E that turn into d-logits by a coefficient per row:
//
//   E_j = e^(z_j - s) f_j, 0 in the target column,      f = 1 - tanh^2 (1 without a soft cap)
//   d raw_j = g unit E_j,                               unit = -e^(s - lse) logit_scale / temperature
//   d raw_y = g target_unit,                            target_unit = (1 - p_y) f_y logit_scale / temperature
//
// s must be known before the row is: s = z[target], one dot product per row (lse - s = -logp). Rows with -logp > kFar,
// and rows with NaN, are multiplied a second time with s = lse. Every E is finite, so that a row with g = 0 is inert.
// A row's statistics are those of slices of kSliceColumns columns, joined in their order: its bits do not depend on the
// other rows, on the threads, or on what is stored. See kernels/weights_triton.py for the same on a GPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <functional>
#include <tuple>
#include <vector>

#include "chunk.h"
#include "gemm.h"

namespace grpo_fast {
namespace {

constexpr int64_t kSliceColumns = 256;
constexpr int64_t kGroupRows = 1024;  // rows at a time: their partial sums take 24 bytes per slice
constexpr double kFar = 40.0;         // nats between z[target] and lse
static_assert(kSliceColumns % kPanel == 0 && kSliceColumns <= kRun);

using Finish = std::function<void(const Block&, float*, int64_t)>;

struct Head {
  Tensor hidden, weight;
  const float* bias;  // (V,) or null
  bool tiles;

  // hidden[rows] * weight^T, block by block; `rows` null: count rows from `first` on.
  void multiply(int64_t first, const std::vector<int64_t>* rows, int64_t count, const Finish& finish) const {
    if (weight.scalar_type() == ScalarType::Float) return run<float, Vectors>(first, rows, count, finish);
    tiles ? run<Bfloat16, Tiles>(first, rows, count, finish) : run<Bfloat16, Vectors>(first, rows, count, finish);
  }

  // Raw logits of the targets, 0 for a target outside [0, V): near those of the product, not bit for bit.
  template <class T>
  float target_logit(int64_t row, int64_t target) const {
    if (target < 0 || target >= weight.size(0)) return 0;
    const int64_t depth = hidden.size(1);
    const T *h = data<T>(hidden) + row * hidden.stride(0), *w = data<T>(weight) + target * weight.stride(0);
    Floats sum = {};
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) sum = fma(load(h + k), load(w + k), sum);
    double total = sum_lanes(widen(sum));
    for (; k < depth; ++k) total += static_cast<double>(load_one(h + k)) * load_one(w + k);
    return static_cast<float>(total) + (bias ? bias[target] : 0);
  }

 private:
  template <class T, class Kernel>
  void run(int64_t first, const std::vector<int64_t>* rows, int64_t count, const Finish& finish) const {
    const int64_t depth = hidden.size(1), stride = hidden.stride(0);
    const T* x = data<T>(hidden) + first * stride;
    std::vector<T> chosen(rows ? count * depth : 0);
    if (rows)
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(chosen.data() + i * depth, data<T>(hidden) + (*rows)[i] * stride, depth * sizeof(T));
    const Operand<T> a = rows ? Operand<T>{chosen.data(), depth, false} : Operand<T>{x, stride, false};
    const Problem<T, T> p{count, weight.size(0), depth, a, {data<T>(weight), weight.stride(0), true}};
    grpo_fast::multiply<Kernel>(
        p,
        [&](const Block& block, float* sums, int64_t sums_stride) {
          if (bias)
            for (int64_t row = 0; row < block.rows; ++row)
              for (int64_t c = 0; c < block.columns; ++c) sums[row * sums_stride + c] += bias[block.column + c];
          finish(block, sums, sums_stride);
        },
        kSliceColumns);
  }
};

// Where a sweep's results go, (T,) each; `out` (T, V) fp32 or null.
struct Results {
  float *lse, *logps, *entropy, *unit, *target_unit;
  float* out;
  int64_t out_stride;
  bool has_weights;  // out gets weights, not raw logits
};

template <bool kSoftcap, bool kEntropy>
struct Sweep {
  const Chunk& chunk;
  const Head& head;
  const Results& to;
  std::vector<float> normalisers;
  std::vector<float> targets;  // raw logits of the targets, of the product

  Sweep(const Chunk& chunk, const Head& head, const Results& to)
      : chunk(chunk), head(head), to(to), normalisers(to.has_weights ? chunk.rows : 0), targets(chunk.rows) {
    for (int64_t row = 0; row < static_cast<int64_t>(normalisers.size()); ++row) {
      const int64_t target = chunk.target_ids[row];
      const float raw = head.weight.scalar_type() == ScalarType::Float
                            ? head.target_logit<float>(row, target)
                            : head.target_logit<Bfloat16>(row, target);
      normalisers[row] = static_cast<float>(final_logit<kSoftcap>(raw, chunk.rule(row)));
    }
  }

  bool is_far(int64_t row) const { return !(static_cast<double>(to.lse[row]) - normalisers[row] <= kFar); }

  void write(int64_t row, const Block& block, const float* x) const {
    float* out = to.out + row * to.out_stride + block.column;
    if (to.has_weights)
      write_weights<kSoftcap>(x, out, block.columns, chunk.target_ids[row] - block.column, chunk.rule(row),
                              normalisers[row]);
    else
      std::memcpy(out, x, block.columns * sizeof(float));
  }

  // Statistics, and `out` where there is one.
  void measure() {
    const int64_t slices = (chunk.columns + kSliceColumns - 1) / kSliceColumns;
    std::vector<PartialSums> partial(std::min(kGroupRows, chunk.rows) * slices);
    for (int64_t first = 0; first < chunk.rows; first += kGroupRows) {
      const int64_t count = std::min(kGroupRows, chunk.rows - first);
      head.multiply(first, nullptr, count, [&](const Block& block, float* sums, int64_t stride) {
        for (int64_t i = 0; i < block.rows; ++i) {
          const int64_t row = first + block.row + i, target = chunk.target_ids[row] - block.column;
          const float* x = sums + i * stride;
          const bool is_here = target >= 0 && target < block.columns;
          partial[(block.row + i) * slices + block.column / kSliceColumns] =
              slice_sums<kSoftcap, kEntropy>(x, block.columns, is_here ? target : -1, chunk.rule(row));
          if (is_here) targets[row] = x[target];
          if (to.out) write(row, block, x);
        }
      });
      for (int64_t i = 0; i < count; ++i) join(first + i, partial.data() + i * slices, slices);
    }
  }

  // The weights of rows whose lse is known; `rows` null: of all.
  void weigh(const std::vector<int64_t>* rows, int64_t count) {
    head.multiply(0, rows, count, [&](const Block& block, float* sums, int64_t stride) {
      for (int64_t i = 0; i < block.rows; ++i) {
        const int64_t row = rows ? (*rows)[block.row + i] : block.row + i, target = chunk.target_ids[row] - block.column;
        if (target >= 0 && target < block.columns) targets[row] = sums[i * stride + target];
        write(row, block, sums + i * stride);
      }
    });
  }

  void join(int64_t row, const PartialSums* slices, int64_t count) const {
    const int64_t target = chunk.target_ids[row];
    const bool has_target = target >= 0 && target < chunk.columns;
    const double z_target = has_target ? final_logit<kSoftcap>(targets[row], chunk.rule(row)) : 0;
    const RowStatistics found = finished<kEntropy>(joined<kEntropy>(slices, count), has_target, z_target);
    to.lse[row] = static_cast<float>(found.lse);
    to.logps[row] = static_cast<float>(found.logp);
    if (kEntropy && to.entropy) to.entropy[row] = static_cast<float>(found.entropy);
  }

  void run(bool is_known) {
    if (!is_known) measure();
    if (!to.has_weights) return;
    std::vector<int64_t> far;
    for (int64_t row = 0; row < chunk.rows; ++row)
      if (is_far(row)) {
        normalisers[row] = to.lse[row];
        far.push_back(row);
      }
    if (is_known)
      weigh(nullptr, chunk.rows);
    else if (!far.empty())
      weigh(&far, far.size());
    for (int64_t row = 0; row < chunk.rows; ++row) {
      const RowRule rule = chunk.rule(row);
      const double bent = kSoftcap ? std::tanh(static_cast<double>(targets[row]) * rule.inner) : 0;
      to.unit[row] = static_cast<float>(-std::exp(normalisers[row] - static_cast<double>(to.lse[row])) * rule.chain);
      to.target_unit[row] = static_cast<float>(-std::expm1(to.logps[row]) * (1 - bent * bent) * rule.chain);
    }
  }
};

// -> lse, logps, entropy, unit, target_unit, (T,) fp32 each; entropy (0,) unless wanted, the units (0,) unless weights
// are. out (T, V) gets raw logits, or weights. known_lse, known_logps: of these rows from another call.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> linear_rows(
    Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor target_ids, std::optional<Tensor> out,
    bool has_weights, std::optional<Tensor> known_lse, std::optional<Tensor> known_logps, double logit_scale,
    std::optional<double> softcap, double temperature, std::optional<Tensor> temperatures, bool return_entropy,
    bool tiles) {
  check_operand(hidden, "hidden"), check_operand(weight, "weight");
  check_rows(hidden, "hidden"), check_rows(weight, "weight");
  STD_TORCH_CHECK(hidden.scalar_type() == weight.scalar_type(), "hidden: expected the dtype of weight");
  STD_TORCH_CHECK(hidden.size(1) == weight.size(1), "hidden: expected ", weight.size(1), " columns as in weight, got ",
                  hidden.size(1));
  const int64_t rows = hidden.size(0);
  const float* bias_data = optional_vector(bias, weight.size(0), "bias");
  STD_TORCH_CHECK(!has_weights || out, "out: expected a matrix for the weights, got None");
  const Chunk chunk = make_rows(rows, weight.size(0), target_ids, logit_scale, softcap, temperature, temperatures);
  if (out) {
    check_rows(*out, "out");
    STD_TORCH_CHECK(out->scalar_type() == ScalarType::Float && out->size(0) == rows && out->size(1) == chunk.columns,
                    "out: expected float32 (", rows, ", ", chunk.columns, ")");
  }
  const auto empty = [&](int64_t size) { return torch::stable::new_empty(hidden, {size}, ScalarType::Float); };
  const bool is_known = known_lse && known_logps;
  if (is_known) {
    check_vector(*known_lse, rows, ScalarType::Float, "known_lse");
    check_vector(*known_logps, rows, ScalarType::Float, "known_logps");
  }
  Tensor lse = is_known ? *known_lse : empty(rows), logps = is_known ? *known_logps : empty(rows);
  Tensor entropy = empty(return_entropy ? rows : 0), unit = empty(has_weights ? rows : 0);
  Tensor target_unit = empty(has_weights ? rows : 0);
  const Head head{hidden, weight, bias_data, tiles};
  const Results to{data<float>(lse),  data<float>(logps),        return_entropy ? data<float>(entropy) : nullptr,
                   data<float>(unit), data<float>(target_unit), out ? data<float>(*out) : nullptr,
                   out ? out->stride(0) : 0,                      has_weights};
  const auto run = [&](auto capped, auto mean) {
    Sweep<decltype(capped)::value, decltype(mean)::value>(chunk, head, to).run(is_known);
  };
  const auto with_entropy = [&](auto capped) {
    return_entropy ? run(capped, std::true_type{}) : run(capped, std::false_type{});
  };
  if (rows > 0) softcap ? with_entropy(std::true_type{}) : with_entropy(std::false_type{});
  return {lse, logps, entropy, unit, target_unit};
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(grpo_fast_linear, library) {
  library.def(
      "linear_rows(Tensor hidden, Tensor weight, Tensor? bias, Tensor target_ids, Tensor(a!)? out, bool has_weights,"
      " Tensor? known_lse, Tensor? known_logps, float logit_scale, float? softcap, float temperature,"
      " Tensor? temperatures, bool return_entropy, bool tiles) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_linear, CPU, library) {
  library.impl("linear_rows", TORCH_BOX(&grpo_fast::linear_rows));
}
