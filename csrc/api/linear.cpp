// hidden -> log-probabilities, without logits: the head's product with the softmax statistics in its epilogue. Where
// gradients follow, the epilogue also stores weights E that turn into d-logits by a coefficient per row:
//
//   E_j = e^(z_j - s) f_j, 0 in the target column,      f = 1 - tanh^2 (1 without a soft cap)
//   d raw_j = g unit E_j,                               unit = -e^(s - lse) logit_scale / temperature
//   d raw_y = g target_unit,                            target_unit = (1 - p_y) f_y logit_scale / temperature
//
// s must be known before the row is: s = z[target], one dot product per row (lse - s = -logp), so that one exponential
// serves the weight and the sum. Rows with -logp > kFar, with NaN or without a target are summed again relative to their
// maximum, and weighed again with s = lse. Every E is finite, so that a row with g = 0 is inert. A row's statistics are
// those of slices of kSliceColumns columns, joined in their order: its bits do not depend on the other rows, on the
// threads, or on what is stored. See kernels/gpu/exponentials.py for the same on a GPU.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <functional>
#include <tuple>
#include <vector>

#include "rows/chunk.h"
#include "rows/dominant.h"
#include "gemm/multiply.h"

namespace grpo_fast {
namespace {

constexpr int64_t kSliceColumns = 256;
constexpr int64_t kGroupRows = 1024;  // rows at a time: their partial sums take 24 bytes per slice
constexpr double kFar = 20.0;         // nats between z[target] and lse
static_assert(kSliceColumns % kPanel == 0 && kSliceColumns <= kRun);

using Finish = std::function<void(const Block&, float*, int64_t)>;

struct Head {
  Tensor hidden, weight;
  const float* bias;  // (V,) or null
  bool tiles;

  // hidden * weight^T, block by block, for `count` rows from `first` on: of all, or where given of those in `rows`.
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
    const T* x = data<T>(hidden);
    std::vector<T> chosen(rows ? count * depth : 0);
    if (rows) copy_rows(x, stride, rows->data() + first, count, depth, chosen.data());
    const Operand<T> a = rows ? Operand<T>{chosen.data(), depth, false} : Operand<T>{x + first * stride, stride, false};
    const Problem<T, T> p{count, weight.size(0), depth, a, {data<T>(weight), weight.stride(0), true}};
    grpo_fast::multiply<Kernel>(
        p,
        [&](const Block& block, float* sums, int64_t sums_stride) {
          if (bias) add_bias(bias, block, sums, sums_stride);
          finish(block, sums, sums_stride);
        },
        kSliceColumns);
  }
};

// Where a sweep's results go, (T,) each; `out` (T, V) or null.
struct Results {
  float *lse, *logps, *entropy, *unit, *target_unit;
  void* out;
  int64_t out_stride;
  bool has_weights;  // out gets weights, not raw logits
  bool is_positive;  // the weights are Positive16, else fp32
};

template <bool kSoftcap, bool kEntropy>
struct Sweep {
  const Chunk& chunk;
  const Head& head;
  const Results& to;
  std::vector<float> shifts;   // s of every row
  std::vector<float> targets;  // raw logits of the targets, of the product
  DominantWeights dominant;    // where the weights are Positive16

  Sweep(const Chunk& chunk, const Head& head, const Results& to)
      : chunk(chunk), head(head), to(to), shifts(chunk.rows), targets(chunk.rows), dominant(to.is_positive ? chunk.rows : 0) {
    for (int64_t row = 0; row < chunk.rows; ++row) {
      const int64_t target = chunk.target_ids[row];
      const float raw = head.weight.scalar_type() == ScalarType::Float
                            ? head.target_logit<float>(row, target)
                            : head.target_logit<Bfloat16>(row, target);
      shifts[row] = static_cast<float>(final_logit<kSoftcap>(raw, chunk.rule(row)));
    }
  }

  bool has_target(int64_t row) const { return chunk.has_target(row); }
  bool is_far(int64_t row) const {
    return !has_target(row) || !(static_cast<double>(to.lse[row]) - shifts[row] <= kFar);
  }

  // Of the weights of every row, from its statistics.
  std::vector<double> weight_sums() const {
    std::vector<double> sums(chunk.rows);
    for (int64_t row = 0; row < chunk.rows; ++row)
      sums[row] = -std::expm1(static_cast<double>(to.logps[row])) *
                  std::exp(static_cast<double>(to.lse[row]) - shifts[row]);
    return sums;
  }

  // Of one row in one block: its sums relative to its shift, and what goes to `out`. has_sum: the row's is known.
  PartialSums summed(int64_t row, const Block& block, const float* x, int64_t target, bool has_sum) {
    const RowRule rule = chunk.rule(row);
    Floats largest = {};
    const auto sums = [&](const auto& emit) {
      return shifted_sums<kSoftcap, kEntropy>(x, block.columns, target, rule, shifts[row], emit, &largest);
    };
    const int64_t at = row * to.out_stride + block.column;
    if (to.out && !to.has_weights) std::memcpy(static_cast<float*>(to.out) + at, x, block.columns * sizeof(float));
    if (!to.has_weights) return sums(SumWeights{});
    if (!to.is_positive) return sums(WriteWeights<kSoftcap, float>{static_cast<float*>(to.out) + at});
    const PartialSums found = sums(WriteWeights<kSoftcap, Positive16>{static_cast<Positive16*>(to.out) + at});
    if (!has_sum) dominant.raise(row, found.rest);
    dominant.note<kSoftcap>(row, block.column, x, block.columns, target, rule, shifts[row], largest);
    return found;
  }

  using Rows = const std::vector<int64_t>*;  // null: all of the chunk

  // use(place among the rows, row, block, x, target in the block or -1) for every row and block of columns.
  template <class Use>
  void each(Rows rows, int64_t first, int64_t count, const Use& use) {
    head.multiply(first, rows, count, [&](const Block& block, float* sums, int64_t stride) {
      for (int64_t i = block.row; i < block.row + block.rows; ++i) {
        const int64_t row = rows ? (*rows)[first + i] : first + i, target = chunk.target_ids[row] - block.column;
        const float* x = sums + (i - block.row) * stride;
        const bool is_here = target >= 0 && target < block.columns;
        if (is_here) targets[row] = x[target];
        use(i, row, block, x, is_here ? target : -1);
      }
    });
  }

  // Statistics by sum_of(row, block, x, target).
  template <class SumOf>
  void measure(Rows rows, const SumOf& sum_of) {
    const int64_t slices = (chunk.columns + kSliceColumns - 1) / kSliceColumns;
    const int64_t all = rows ? static_cast<int64_t>(rows->size()) : chunk.rows;
    std::vector<PartialSums> partial(std::min(kGroupRows, all) * slices);
    for (int64_t first = 0; first < all; first += kGroupRows) {
      const int64_t count = std::min(kGroupRows, all - first);
      each(rows, first, count, [&](int64_t i, int64_t row, const Block& block, const float* x, int64_t target) {
        partial[i * slices + block.column / kSliceColumns] = sum_of(row, block, x, target);
      });
      for (int64_t i = 0; i < count; ++i)
        join(rows ? (*rows)[first + i] : first + i, partial.data() + i * slices, slices);
    }
  }

  void join(int64_t row, const PartialSums* slices, int64_t count) const {
    const double z_target = has_target(row) ? final_logit<kSoftcap>(targets[row], chunk.rule(row)) : 0;
    const RowStatistics found = finished<kEntropy>(joined<kEntropy>(slices, count), has_target(row), z_target);
    to.lse[row] = static_cast<float>(found.lse);
    to.logps[row] = static_cast<float>(found.logp);
    if (kEntropy && to.entropy) to.entropy[row] = static_cast<float>(found.entropy);
  }

  void weigh(Rows rows, int64_t count) {
    each(rows, 0, count, [&](int64_t, int64_t row, const Block& block, const float* x, int64_t target) {
      summed(row, block, x, target, true);
    });
  }

  std::vector<int64_t> far_rows() const {
    std::vector<int64_t> far;
    for (int64_t row = 0; row < chunk.rows; ++row)
      if (is_far(row)) far.push_back(row);
    return far;
  }

  // -> the dominant weights, where they are Positive16.
  std::vector<Dominant> run(bool is_known) {
    if (!is_known)
      measure(nullptr, [&](int64_t row, const Block& block, const float* x, int64_t target) {
        return summed(row, block, x, target, false);
      });
    const std::vector<int64_t> far = far_rows();
    if (!is_known && !far.empty())
      measure(&far, [&](int64_t row, const Block& block, const float* x, int64_t target) {
        return slice_sums<kSoftcap, kEntropy>(x, block.columns, target, chunk.rule(row));
      });
    if (!to.has_weights) return {};
    for (const int64_t row : far) shifts[row] = to.lse[row];
    if (to.is_positive) dominant.settle(weight_sums(), far);
    if (is_known)
      weigh(nullptr, chunk.rows);
    else if (!far.empty())
      weigh(&far, far.size());
    for (int64_t row = 0; row < chunk.rows; ++row) {
      const RowRule rule = chunk.rule(row);
      const double bent = kSoftcap ? std::tanh(static_cast<double>(targets[row]) * rule.inner) : 0;
      to.unit[row] = static_cast<float>(-std::exp(shifts[row] - static_cast<double>(to.lse[row])) * rule.chain);
      to.target_unit[row] = static_cast<float>(-std::expm1(to.logps[row]) * (1 - bent * bent) * rule.chain);
    }
    return to.is_positive ? dominant.finished() : std::vector<Dominant>{};
  }
};

using Columns = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// -> lse, logps, entropy, unit, target_unit, (T,) fp32 each; entropy (0,) unless wanted, the units (0,) unless weights
// are; row, column and fp32 value of the weights in 16 bits that dominate their row, by row and column. out (T, V) gets
// raw logits in fp32, or weights in fp32 or Positive16 (int16). known_lse, known_logps: of these rows from another call.
Columns linear_rows(
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
  const bool is_positive = out && out->scalar_type() == ScalarType::Short;
  if (out) {
    check_rows(*out, "out");
    const bool is_right = out->scalar_type() == ScalarType::Float || (has_weights && is_positive);
    STD_TORCH_CHECK(is_right && out->size(0) == rows && out->size(1) == chunk.columns, "out: expected float32 (", rows,
                    ", ", chunk.columns, "), or int16 for weights");
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
                   data<float>(unit), data<float>(target_unit), out ? out->data_ptr() : nullptr,
                   out ? out->stride(0) : 0,                      has_weights, is_positive};
  std::vector<Dominant> found;
  const auto run = [&](auto capped, auto mean) {
    found = Sweep<decltype(capped)::value, decltype(mean)::value>(chunk, head, to).run(is_known);
  };
  const auto with_entropy = [&](auto capped) {
    return_entropy ? run(capped, std::true_type{}) : run(capped, std::false_type{});
  };
  if (rows > 0) softcap ? with_entropy(std::true_type{}) : with_entropy(std::false_type{});
  const int64_t count = found.size();
  const auto numbers = [&] { return torch::stable::new_empty(hidden, {count}, ScalarType::Long); };
  Tensor dominant_rows = numbers(), dominant_columns = numbers(), dominant_weights = empty(count);
  for (int64_t i = 0; i < count; ++i) {
    data<int64_t>(dominant_rows)[i] = found[i].row;
    data<int64_t>(dominant_columns)[i] = found[i].column;
    data<float>(dominant_weights)[i] = found[i].weight;
  }
  return {lse, logps, entropy, unit, target_unit, dominant_rows, dominant_columns, dominant_weights};
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(grpo_fast_linear, library) {
  library.def(
      "linear_rows(Tensor hidden, Tensor weight, Tensor? bias, Tensor target_ids, Tensor(a!)? out, bool has_weights,"
      " Tensor? known_lse, Tensor? known_logps, float logit_scale, float? softcap, float temperature,"
      " Tensor? temperatures, bool return_entropy, bool tiles)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_linear, CPU, library) {
  library.impl("linear_rows", TORCH_BOX(&grpo_fast::linear_rows));
}
