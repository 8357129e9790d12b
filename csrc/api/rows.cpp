// The three doors of kernels/reference.py for the CPU: row_logps (one read of the logits), row_grad_ (one read, one write) and
// row_loss_ (both, with the loss between them, while the row is in cache: one read, one write).
//
// Built against torch's stable ABI, so one library serves every torch >= 2.11 and every Python. Rows are handed out one
// by one to torch's own threads; a row is computed by one thread, so results do not depend on how many there are.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>

#include "rows/chunk.h"
#include "leaves.h"  // printed from objectives.py and kl.py by grpo_fast/kernels/cpu/leaves.py
#include "rows/row_kernels.h"

namespace grpo_fast {
namespace {

constexpr int64_t kGrain = 16384;   // elements that are worth handing to a thread
constexpr int64_t kInline = 65536;  // elements below which waking other threads costs more than they give

template <class F>
void for_each_row(int64_t rows, int64_t columns, const F& body) {
  if (rows * columns <= kInline) {
    for (int64_t row = 0; row < rows; ++row) body(row);
    return;
  }
  const int64_t step = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns));
  const int64_t workers = std::min<int64_t>(torch::stable::get_num_threads(), (rows + step - 1) / step);
  std::atomic<int64_t> next{0};
  // Rows whose coefficients are 0 cost almost nothing, so equal shares would leave threads idle.
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(step)) < rows;)
      for (int64_t row = begin; row < std::min(begin + step, rows); ++row) body(row);
  });
}

// What is known of every row, (C,) each; entropy may be null.
struct RowOutputs {
  float *lse, *logps, *entropy;
};

template <class T, bool kSoftcap, bool kEntropy>
void write_statistics(const Chunk& chunk, const T* x, int64_t row, const RowOutputs& to) {
  const RowStatistics result = row_statistics<T, kSoftcap, kEntropy>(x + row * chunk.stride, chunk.columns,
                                                                     chunk.target_ids[row], chunk.rule(row));
  to.lse[row] = static_cast<float>(result.lse);
  to.logps[row] = static_cast<float>(result.logp);
  if (kEntropy && to.entropy) to.entropy[row] = static_cast<float>(result.entropy);
}

template <class T, bool kSoftcap, bool kEntropy>
void statistics(const Chunk& chunk, const Tensor& logits, const RowOutputs& to) {
  const T* x = data<T>(logits);
  for_each_row(chunk.rows, chunk.columns,
               [&](int64_t row) { write_statistics<T, kSoftcap, kEntropy>(chunk, x, row, to); });
}

// run(element, softcap?, entropy?) with types and compile-time constants. Only plain fp32 rows have a variant without
// entropy: elsewhere it is lost among the other operations, and every variant costs compile time.
template <class F>
void with_variant(ScalarType dtype, bool softcap, bool entropy, const F& run) {
  const auto pick = [&](auto element) {
    softcap ? run(element, std::true_type{}, std::true_type{}) : run(element, std::false_type{}, std::true_type{});
  };
  if (dtype == ScalarType::Float && !softcap && !entropy) return run(float{}, std::false_type{}, std::false_type{});
  if (dtype == ScalarType::Float) return pick(float{});
  if (dtype == ScalarType::BFloat16) return pick(Bfloat16{});
  STD_TORCH_CHECK(dtype == ScalarType::Half, "logits: expected float32, bfloat16 or float16");
  pick(Float16{});
}

// -> lse (C,), logps (C,), entropy (C,) or (0,). A target outside [0, V) has logp NaN and is never read.
std::tuple<Tensor, Tensor, Tensor> row_logps(Tensor logits, Tensor target_ids, double logit_scale,
                                             std::optional<double> softcap, double temperature,
                                             std::optional<Tensor> temperatures, bool return_entropy) {
  const Chunk chunk = make_chunk(logits, target_ids, logit_scale, softcap, temperature, temperatures);
  Tensor lse = torch::stable::new_empty(logits, {chunk.rows}, ScalarType::Float);
  Tensor logps = torch::stable::new_empty(logits, {chunk.rows}, ScalarType::Float);
  Tensor entropy = torch::stable::new_empty(logits, {return_entropy ? chunk.rows : 0}, ScalarType::Float);
  with_variant(logits.scalar_type(), softcap.has_value(), return_entropy, [&](auto element, auto capped, auto mean) {
    statistics<decltype(element), decltype(capped)::value, decltype(mean)::value>(
        chunk, logits, {data<float>(lse), data<float>(logps), return_entropy ? data<float>(entropy) : nullptr});
  });
  return {lse, logps, entropy};
}

struct Coefficients {
  const float *lse, *logps, *entropy, *grad_logps, *grad_entropy;  // entropy and grad_entropy may be null
};

template <class In, class Out, bool kSoftcap, bool kEntropy>
void write_gradient(const Chunk& chunk, const In* x, Out* d, int64_t row, const Coefficients& at) {
  const double grad_entropy = kEntropy && at.grad_entropy ? at.grad_entropy[row] : 0;
  // A select, not a product: a row that does not count, or without coefficients, may hold NaN.
  if (!chunk.has_target(row) || (at.grad_logps[row] == 0 && grad_entropy == 0)) {
    std::memset(static_cast<void*>(d), 0, chunk.columns * sizeof(Out));
    return;
  }
  const double entropy = grad_entropy != 0 ? at.entropy[row] : 0;
  const RowCoefficients values{at.lse[row], at.logps[row], entropy, at.grad_logps[row], grad_entropy};
  write_row_gradient<In, Out, kSoftcap, kEntropy>(x + row * chunk.stride, d, chunk.columns, chunk.target_ids[row],
                                                  chunk.rule(row), values);
}

template <class In, class Out, bool kSoftcap, bool kEntropy>
void gradients(const Chunk& chunk, const Tensor& logits, const Tensor& out, const Coefficients& at) {
  const In* x = data<In>(logits);
  Out* d = data<Out>(out);
  const int64_t stride = out.stride(0);
  for_each_row(chunk.rows, chunk.columns, [&](int64_t row) {
    write_gradient<In, Out, kSoftcap, kEntropy>(chunk, x, d + row * stride, row, at);
  });
}

void check_out(const Chunk& chunk, const Tensor& logits, const Tensor& out) {
  check_rows(out, "out");
  STD_TORCH_CHECK(out.size(0) == chunk.rows && out.size(1) == chunk.columns, "out: expected (", chunk.rows, ", ",
                  chunk.columns, "), got (", out.size(0), ", ", out.size(1), ")");
  const ScalarType from = logits.scalar_type(), to = out.scalar_type();
  STD_TORCH_CHECK(from == to || (from == ScalarType::Float && to == ScalarType::BFloat16),
                  "out: expected the dtype of the logits, or bfloat16 for float32 logits");
}

// run(element, element of out, softcap?, entropy?) for a checked pair of dtypes.
template <class F>
void with_gradient_variant(ScalarType from, ScalarType to, bool softcap, bool entropy, const F& run) {
  with_variant(from, softcap, entropy, [&](auto element, auto capped, auto mean) {
    if constexpr (std::is_same_v<decltype(element), float>)
      if (to == ScalarType::BFloat16) return run(element, Bfloat16{}, capped, std::true_type{});
    run(element, element, capped, mean);
  });
}

void row_grad_(Tensor logits, Tensor out, Tensor target_ids, Tensor lse, Tensor logps, std::optional<Tensor> entropy,
               Tensor grad_logps, std::optional<Tensor> grad_entropy, double logit_scale,
               std::optional<double> softcap, double temperature, std::optional<Tensor> temperatures) {
  const Chunk chunk = make_chunk(logits, target_ids, logit_scale, softcap, temperature, temperatures);
  check_out(chunk, logits, out);
  check_vector(lse, chunk.rows, ScalarType::Float, "lse");
  check_vector(logps, chunk.rows, ScalarType::Float, "logps");
  check_vector(grad_logps, chunk.rows, ScalarType::Float, "grad_logps");
  Coefficients at{data<float>(lse), data<float>(logps), nullptr, data<float>(grad_logps), nullptr};
  if (grad_entropy) {
    STD_TORCH_CHECK(entropy, "entropy: expected the rows' entropies, as grad_entropy is given, got None");
    check_vector(*entropy, chunk.rows, ScalarType::Float, "entropy");
    check_vector(*grad_entropy, chunk.rows, ScalarType::Float, "grad_entropy");
    at.entropy = data<float>(*entropy);
    at.grad_entropy = data<float>(*grad_entropy);
  }
  with_gradient_variant(logits.scalar_type(), out.scalar_type(), softcap.has_value(), grad_entropy.has_value(),
                        [&](auto in, auto to, auto capped, auto mean) {
                          gradients<decltype(in), decltype(to), decltype(capped)::value, decltype(mean)::value>(
                              chunk, logits, out, at);
                        });
}

// The loss between the two doors: which leaf, its parameters, and what it reads of every row ((C,), or null).
struct Loss {
  int64_t objective, kl;
  bool kl_times_ratio;
  double p[4];
  const float *advantages, *policy_weights, *kl_weights, *old_logps, *ref_logps;

  // (policy_weight l + kl_weight KL, its derivative) at the logp that the caller sees; NaN where that is: comparisons
  // inside a leaf and a weight of 0 would hide it.
  ValueAndSlope at(int64_t row, double logp) const {
    if (std::isnan(logp)) return {logp, logp};
    double log_ratio = old_logps ? logp - old_logps[row] : 0.0;
    if (log_ratio > kLogRatioMax) log_ratio = kLogRatioMax;
    ValueAndSlope sum{0, 0};
    if (policy_weights[row] != 0) {
      const ValueAndSlope loss = grpo_fast::objective(objective, logp, log_ratio, advantages[row], p);
      sum = {policy_weights[row] * loss.value, policy_weights[row] * loss.slope};
    }
    if (kl_weights && kl_weights[row] != 0) {
      ValueAndSlope term = kl_estimator(kl, ref_logps[row] - logp, p);
      if (kl_times_ratio) {
        const double ratio = std::exp(log_ratio);
        term = {term.value * ratio, (term.slope + term.value) * ratio};
      }
      sum.value += kl_weights[row] * term.value;
      sum.slope += kl_weights[row] * term.slope;
    }
    return sum;
  }
};

// lse, logps, entropy ((0,) unless wanted), losses, grad_logps, each (C,).
using RowLosses = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// d-logits to `out`.
RowLosses row_loss_(Tensor logits, Tensor out, Tensor target_ids, Tensor advantages, Tensor policy_weights,
                    std::optional<Tensor> kl_weights, std::optional<Tensor> old_logps, std::optional<Tensor> ref_logps,
                    std::optional<Tensor> grad_entropy, int64_t objective, int64_t kl, bool kl_times_ratio, double p0,
                    double p1, double p2, double p3, double logit_scale, std::optional<double> softcap,
                    double temperature, std::optional<Tensor> temperatures, bool return_entropy) {
  const Chunk chunk = make_chunk(logits, target_ids, logit_scale, softcap, temperature, temperatures);
  check_out(chunk, logits, out);
  check_vector(advantages, chunk.rows, ScalarType::Float, "advantages");
  check_vector(policy_weights, chunk.rows, ScalarType::Float, "policy_weights");
  STD_TORCH_CHECK(objective >= 0 && objective < k_objective_count, "objective: expected a number below ",
                  k_objective_count, ", got ", objective);
  STD_TORCH_CHECK(kl >= 0 && kl < k_kl_estimator_count, "kl: expected a number below ", k_kl_estimator_count, ", got ",
                  kl);
  Loss loss{objective, kl, kl_times_ratio, {p0, p1, p2, p3}, data<float>(advantages), data<float>(policy_weights),
            optional_vector(kl_weights, chunk.rows, "kl_weights"), optional_vector(old_logps, chunk.rows, "old_logps"),
            optional_vector(ref_logps, chunk.rows, "ref_logps")};
  if (loss.ref_logps == nullptr) loss.kl_weights = nullptr;
  const bool has_entropy = return_entropy || grad_entropy.has_value();
  const auto empty = [&](int64_t size) { return torch::stable::new_empty(logits, {size}, ScalarType::Float); };
  Tensor lse = empty(chunk.rows), logps = empty(chunk.rows), entropy = empty(has_entropy ? chunk.rows : 0);
  Tensor losses = empty(chunk.rows), grad_logps = empty(chunk.rows);
  float *losses_to = data<float>(losses), *grad_to = data<float>(grad_logps);
  const RowOutputs to{data<float>(lse), data<float>(logps), has_entropy ? data<float>(entropy) : nullptr};
  const Coefficients at{to.lse, to.logps, to.entropy, grad_to,
                        optional_vector(grad_entropy, chunk.rows, "grad_entropy")};
  const int64_t out_stride = out.stride(0);
  with_gradient_variant(
      logits.scalar_type(), out.scalar_type(), softcap.has_value(), has_entropy,
      [&](auto in, auto element, auto capped, auto mean) {
        using In = decltype(in);
        using Out = decltype(element);
        constexpr bool kSoftcap = decltype(capped)::value, kEntropy = decltype(mean)::value;
        const In* x = data<In>(logits);
        Out* d = data<Out>(out);
        for_each_row(chunk.rows, chunk.columns, [&](int64_t row) {
          write_statistics<In, kSoftcap, kEntropy>(chunk, x, row, to);
          const ValueAndSlope value = chunk.has_target(row) ? loss.at(row, to.logps[row]) : ValueAndSlope{0, 0};
          losses_to[row] = static_cast<float>(value.value);
          grad_to[row] = static_cast<float>(value.slope);
          write_gradient<In, Out, kSoftcap, kEntropy>(chunk, x, d + row * out_stride, row, at);
        });
      });
  return {lse, logps, entropy, losses, grad_logps};
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(grpo_fast_rows, library) {
  library.def(
      "row_logps(Tensor logits, Tensor target_ids, float logit_scale, float? softcap, float temperature,"
      " Tensor? temperatures, bool return_entropy) -> (Tensor, Tensor, Tensor)");
  library.def(
      "row_grad_(Tensor logits, Tensor(a!) out, Tensor target_ids, Tensor lse, Tensor logps, Tensor? entropy,"
      " Tensor grad_logps, Tensor? grad_entropy, float logit_scale, float? softcap, float temperature,"
      " Tensor? temperatures) -> ()");
  library.def(
      "row_loss_(Tensor logits, Tensor(a!) out, Tensor target_ids, Tensor advantages, Tensor policy_weights,"
      " Tensor? kl_weights, Tensor? old_logps, Tensor? ref_logps, Tensor? grad_entropy, int objective, int kl,"
      " bool kl_times_ratio, float p0, float p1, float p2, float p3, float logit_scale, float? softcap,"
      " float temperature, Tensor? temperatures, bool return_entropy)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_rows, CPU, library) {
  library.impl("row_logps", TORCH_BOX(&grpo_fast::row_logps));
  library.impl("row_grad_", TORCH_BOX(&grpo_fast::row_grad_));
  library.impl("row_loss_", TORCH_BOX(&grpo_fast::row_loss_));
}
