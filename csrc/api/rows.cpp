// Operators on stored logits. grpo_fast/kernels/reference.py documents their results.
//
//     row_logps    reads the logits once
//     row_grad_    reads the logits once and writes the gradient once
//     row_loss_    does both and computes the loss in between, with one read and one write, because
//                  each row stays in cache
//
// Layout: logits are (C, V) fp32, bf16 or fp16 with any row stride. With offsets, they are rows of
// unequal length, stored one after another in (1, nnz).
//
// Rounding: statistics are rounded as in rows/sums.h. A 16-bit gradient is rounded once.
//
// Parallelism: threads compute different rows. The bits of a row depend on that row only.
//
// The library uses torch's stable ABI, so one build works with every torch >= 2.11 and every
// Python.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "api/chunk.h"
#include "rows/gradient.h"
#include "rows/loss.h"

namespace grpo_fast {
namespace {

// Compile-time parameters of the row functions: the element type, whether there is a soft cap, and
// whether the entropy is computed.
template <class E, bool kCapped, bool kMean>
struct Variant {
  using Element = E;
  static constexpr bool kSoftcap = kCapped, kEntropy = kMean;
};

// Calls run(Variant{}) with the variant for the dtype of the logits and for the options. The
// entropy can be left out only for fp32 rows without a soft cap, because every variant takes time
// to compile. For all other rows it is always computed, which costs little in comparison.
template <class F>
void with_variant(const Chunk& chunk, const Tensor& logits, bool has_entropy, const F& run) {
  const bool capped = chunk.softcap > 0;
  with_type<float, Bfloat16, Float16>(logits, "logits", [&](auto element) {
    using E = decltype(element);
    if constexpr (std::is_same_v<E, float>)
      if (!capped && !has_entropy) return run(Variant<float, false, false>{});
    capped ? run(Variant<E, true, true>{}) : run(Variant<E, false, true>{});
  });
}

// Checks logits and targets, and describes them as a Chunk. With offsets, the logits are (1, V) and
// contain rows of unequal length.
Chunk chunk_of(const Tensor& logits, const Tensor& target_ids, const LogitTransform& transform,
               const std::optional<Tensor>& offsets = std::nullopt) {
  check_rows(logits, "logits");
  if (!offsets) return checked_chunk(logits.size(0), logits.size(1), target_ids, transform);
  STD_TORCH_CHECK(logits.size(0) == 1, "logits: expected (1, V) with offsets");
  return checked_ragged(logits.size(1), *offsets, target_ids, transform);
}

// Checks the tensor that receives the gradient.
void check_out(const Tensor& logits, const Tensor& out) {
  check_rows(out, "out");
  check_shape(out, "out", logits.size(0), logits.size(1));
  STD_TORCH_CHECK(out.scalar_type() == logits.scalar_type(),
                  "out: expected the dtype of the logits");
}

// Output tensors for the statistics of all rows, (C,) each. entropy is (0,) unless requested.
struct Statistics {
  Tensor lse, logps, entropy;
  RowOutputs to;

  Statistics(const Tensor& like, int64_t rows, bool has_entropy)
      : lse(empty(like, rows)), logps(empty(like, rows)),
        entropy(empty(like, has_entropy ? rows : 0)),
        to{data<float>(lse), data<float>(logps), has_entropy ? data<float>(entropy) : nullptr} {}
};

// Returns lse, logps and entropy, (C,) fp32 each. A target outside [0, V) is never read, and its
// logp is NaN.
std::tuple<Tensor, Tensor, Tensor> row_logps(Tensor logits, Tensor target_ids, double logit_scale,
                                             std::optional<double> softcap, double temperature,
                                             bool return_entropy, std::optional<Tensor> offsets) {
  const LogitTransform transform{logit_scale, softcap, temperature};
  const Chunk chunk = chunk_of(logits, target_ids, transform, offsets);
  const Statistics found(logits, chunk.rows, return_entropy);
  with_variant(chunk, logits, return_entropy, [&](auto variant) {
    using V = decltype(variant);
    const auto x = matrix<typename V::Element>(logits);
    for_each_row(chunk, [&](int64_t row) {
      write_statistics<V::kSoftcap, V::kEntropy>(chunk, x, row, found.to);
    });
  });
  return {found.lse, found.logps, found.entropy};
}

// Writes the gradient with respect to the raw logits to `out`, which may be `logits`.
void row_grad_(Tensor logits, Tensor out, Tensor target_ids, Tensor lse, Tensor logps,
               std::optional<Tensor> entropy, Tensor grad_logps, std::optional<Tensor> grad_entropy,
               double logit_scale, std::optional<double> softcap, double temperature,
               std::optional<Tensor> offsets) {
  const LogitTransform transform{logit_scale, softcap, temperature};
  const Chunk chunk = chunk_of(logits, target_ids, transform, offsets);
  check_out(logits, out);
  STD_TORCH_CHECK(!grad_entropy || entropy,
                  "entropy: expected the rows' entropies, as grad_entropy is given, got None");
  const Coefficients at{checked_vector<float>(lse, chunk.rows, "lse"),
                        checked_vector<float>(logps, chunk.rows, "logps"),
                        checked_vector(entropy, chunk.rows, "entropy"),
                        checked_vector<float>(grad_logps, chunk.rows, "grad_logps"),
                        checked_vector(grad_entropy, chunk.rows, "grad_entropy")};
  with_variant(chunk, logits, true, [&](auto variant) {
    using V = decltype(variant);
    const auto x = matrix<typename V::Element>(logits), d = matrix<typename V::Element>(out);
    for_each_row(chunk, [&](int64_t row) { write_gradient<V::kSoftcap>(chunk, x, d, at, row); });
  });
}

// Checks the indices of the loss function and of the KL estimator.
void check_function(const LossFunction& function) {
  const auto check = [](const char* name, int64_t number, int64_t count) {
    STD_TORCH_CHECK(number >= 0 && number < count, name, ": expected a number below ", count,
                    ", got ", number);
  };
  check("objective", function.objective, k_objective_count);
  check("kl", function.kl, k_kl_estimator_count);
}

// The results lse, logps, entropy, losses and grad_logps, (C,) fp32 each. entropy is (0,) unless it
// is requested.
using RowLosses = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Computes statistics, loss and gradient of each row while the row is in cache.
RowLosses loss_pass(const Tensor& logits, const Tensor& out, const Chunk& chunk,
                    const RowInputs& terms, const LossFunction& function, bool return_entropy) {
  const Tensor losses = empty(logits, chunk.rows), grad_logps = empty(logits, chunk.rows);
  const Statistics found(logits, chunk.rows, return_entropy || terms.grad_entropy);
  const RowOutputs& to = found.to;
  float *losses_to = data<float>(losses), *grad_to = data<float>(grad_logps);
  const Coefficients at{to.lse, to.logps, to.entropy, grad_to, terms.grad_entropy};
  with_variant(chunk, logits, to.entropy != nullptr, [&](auto variant) {
    using V = decltype(variant);
    const auto x = matrix<typename V::Element>(logits), d = matrix<typename V::Element>(out);
    for_each_row(chunk, [&](int64_t row) {
      write_statistics<V::kSoftcap, V::kEntropy>(chunk, x, row, to);
      // A row without a target has loss and gradient 0, even if its inputs contain NaN.
      const bool counts = chunk.has_target(row);
      ValueAndSlope loss{0, 0};
      if (counts) loss = row_loss(function, terms, row, to.logps[row]);
      losses_to[row] = static_cast<float>(loss.value);
      grad_to[row] = static_cast<float>(loss.slope);
      if (!counts) return write_zeros(chunk.start(d, row), chunk.columns);
      write_gradient<V::kSoftcap>(chunk, x, d, at, row);
    });
  });
  return {found.lse, found.logps, found.entropy, losses, grad_logps};
}

// Operator row_loss_: checks the arguments and runs loss_pass.
RowLosses row_loss_(Tensor logits, Tensor out, Tensor target_ids, Tensor advantages,
                    Tensor policy_weights, std::optional<Tensor> kl_weights,
                    std::optional<Tensor> old_logps, std::optional<Tensor> ref_logps,
                    std::optional<Tensor> grad_entropy, int64_t objective, int64_t kl,
                    bool kl_times_ratio, double p0, double p1, double p2, double p3,
                    double kl_max, double kl_d_max,
                    double logit_scale, std::optional<double> softcap, double temperature,
                    bool return_entropy) {
  const LogitTransform transform{logit_scale, softcap, temperature};
  const Chunk chunk = chunk_of(logits, target_ids, transform);
  check_out(logits, out);
  const RowInputs terms{checked_vector<float>(advantages, chunk.rows, "advantages"),
                       checked_vector<float>(policy_weights, chunk.rows, "policy_weights"),
                       checked_vector(kl_weights, chunk.rows, "kl_weights"),
                       checked_vector(old_logps, chunk.rows, "old_logps"),
                       checked_vector(ref_logps, chunk.rows, "ref_logps"),
                       checked_vector(grad_entropy, chunk.rows, "grad_entropy")};
  const LossFunction function{objective, kl, kl_times_ratio, {p0, p1, p2, p3}, {kl_max, kl_d_max}};
  check_function(function);
  return loss_pass(logits, out, chunk, terms, function, return_entropy);
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(GRPO_FAST_LIBRARY, library) {
  library.def(
      "row_logps(Tensor logits, Tensor target_ids, float logit_scale, float? softcap,"
      " float temperature, bool return_entropy, Tensor? offsets)"
      " -> (Tensor, Tensor, Tensor)");
  library.def(
      "row_grad_(Tensor logits, Tensor(a!) out, Tensor target_ids, Tensor lse, Tensor logps,"
      " Tensor? entropy, Tensor grad_logps, Tensor? grad_entropy, float logit_scale,"
      " float? softcap, float temperature, Tensor? offsets) -> ()");
  library.def(
      "row_loss_(Tensor logits, Tensor(a!) out, Tensor target_ids, Tensor advantages,"
      " Tensor policy_weights, Tensor? kl_weights, Tensor? old_logps, Tensor? ref_logps,"
      " Tensor? grad_entropy, int objective, int kl, bool kl_times_ratio, float p0, float p1,"
      " float p2, float p3, float kl_max, float kl_d_max, float logit_scale, float? softcap,"
      " float temperature, bool return_entropy)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(GRPO_FAST_LIBRARY, CPU, library) {
  library.impl("row_logps", TORCH_BOX(&grpo_fast::row_logps));
  library.impl("row_grad_", TORCH_BOX(&grpo_fast::row_grad_));
  library.impl("row_loss_", TORCH_BOX(&grpo_fast::row_loss_));
}
