// A batch on the host whose loss needs one chunk, from hidden states to gradients in one call: its active tokens, the
// head's product, row_loss_, and the two products with the d-logits. What linear.py does for such a batch in some sixty
// steps, from the same pieces: the same bits.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "active_tokens.h"
#include "product.h"

namespace grpo_fast {

// lse, logps, entropy ((0,) unless wanted), losses, grad_logps, each (C,); the sum of the losses, the least logp and the
// number of rows with a coefficient.
using RowLosses = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, double, double, int64_t>;

// In rows.cpp.
RowLosses row_loss_(Tensor logits, Tensor out, Tensor target_ids, Tensor advantages, Tensor policy_weights,
                    std::optional<Tensor> kl_weights, std::optional<Tensor> old_logps, std::optional<Tensor> ref_logps,
                    std::optional<Tensor> grad_entropy, int64_t objective, int64_t kl, bool kl_times_ratio, double p0,
                    double p1, double p2, double p3, double logit_scale, std::optional<double> softcap,
                    double temperature, std::optional<Tensor> temperatures, bool return_entropy);

using Index = std::vector<int64_t>;

// Rows of an fp32 matrix.
inline Tensor rows_at(const Tensor& x, const Index& index) {
  const int64_t count = static_cast<int64_t>(index.size()), columns = x.size(1);
  Tensor out = torch::stable::new_empty(x, {count, columns}, ScalarType::Float);
  copy_rows(data<float>(x), x.stride(0), index.data(), count, columns, data<float>(out));
  return out;
}

// The rows of x (T, ...), contiguous fp32, at their places among `size`, zeros elsewhere.
inline Tensor spread(const Tensor& x, const Index& index, int64_t size) {
  const int64_t columns = x.dim() == 2 ? x.size(1) : 1;
  Tensor out = x.dim() == 2 ? torch::stable::new_zeros(x, {size, columns}) : torch::stable::new_zeros(x, {size});
  for (size_t i = 0; i < index.size(); ++i)
    std::memcpy(data<float>(out) + index[i] * columns, data<float>(x) + i * columns, columns * sizeof(float));
  return out;
}

// hidden (N, H), weight (V, H), logits (N, V): where the logits go -> status, loss, least logp, logps (N,), entropy (N,),
// d_hidden (N, H), d_weight (V, H). Status 0: something is odd (active_tokens.h), or no row is active; nothing else is
// set. entropy, d_hidden and d_weight are (0,) where they are not wanted. kl_weight: beta, none without a reference.
// Rows without a coefficient are left out of the products when fewer than `gather_below` of the active ones have one.
inline std::tuple<int64_t, double, double, Tensor, Tensor, Tensor, Tensor> head_loss(
    Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor logits, bool wants_hidden, bool wants_weight,
    double gather_below, std::optional<Tensor> target_ids, Tensor advantages, std::optional<Tensor> cu_seqlens,
    int64_t num_completions, std::optional<Tensor> mask, std::optional<Tensor> old_logps,
    std::optional<Tensor> ref_logps, std::optional<Tensor> temperatures, std::optional<double> total, bool by_length,
    std::optional<double> kl_weight, int64_t objective, int64_t kl, bool kl_times_ratio, double p0, double p1,
    double p2, double p3, double logit_scale, std::optional<double> softcap, double temperature, bool return_entropy) {
  check_float_matrix(hidden, "hidden"), check_float_matrix(weight, "weight"), check_float_matrix(logits, "logits");
  const int64_t num_rows = hidden.size(0), depth = hidden.size(1), columns = weight.size(0);
  STD_TORCH_CHECK(weight.size(1) == depth, "weight: expected (V, H) with H = ", depth, ", got ", weight.size(1));
  STD_TORCH_CHECK(logits.size(0) == num_rows && logits.size(1) == columns, "logits: expected (", num_rows, ", ",
                  columns, ")");
  STD_TORCH_CHECK(target_ids, "target_ids: expected a tensor, got None");
  const float* by_column = optional_vector(bias, columns, "bias");
  const Tensor none = torch::stable::new_empty(hidden, {0}, ScalarType::Float);
  const ActiveTokens tokens = find_active_tokens({target_ids, advantages, cu_seqlens, num_completions, mask, old_logps,
                                                  ref_logps, std::nullopt, temperatures, num_rows, columns});
  Index index = tokens.index;
  const int64_t count = static_cast<int64_t>(index.size());
  if (count == 0) return {0, 0.0, 0.0, none, none, none, none};
  const bool all = count == num_rows;
  const auto pick = [&](const std::optional<Tensor>& x) {
    return x && !all ? std::optional<Tensor>(gathered(none, x, index, true)) : x;
  };
  Tensor h = all ? hidden : rows_at(hidden, index), d = all ? logits : torch::stable::narrow(logits, 0, 0, count);
  std::vector<float> weights = tokens.weights(total, by_length), kl_weights;
  if (kl_weight) {
    kl_weights = weights;
    for (float& x : kl_weights) x *= static_cast<float>(*kl_weight);
  }
  multiply_into({h}, {weight, true}, d, by_column);
  const auto [lse, logps, entropy, losses, grad_logps, loss, least_logp, active] = row_loss_(
      d, d, *pick(target_ids), copied(hidden, tokens.advantages), copied(hidden, weights),
      kl_weight ? std::optional<Tensor>(copied(hidden, kl_weights)) : std::nullopt, pick(old_logps),
      kl_weight ? pick(ref_logps) : std::nullopt, std::nullopt, objective, kl, kl_times_ratio, p0, p1, p2, p3,
      logit_scale, softcap, temperature, pick(temperatures), return_entropy);
  if (static_cast<double>(active) < gather_below * static_cast<double>(count)) {
    Index kept, places;
    for (int64_t i = 0; i < count; ++i)
      if (data<float>(grad_logps)[i] != 0) kept.push_back(i), places.push_back(index[i]);
    h = rows_at(h, kept), d = rows_at(d, kept), index = places;
  }
  const auto to_rows = [&](const Tensor& x, bool wanted) {
    return !wanted ? none : static_cast<int64_t>(index.size()) == num_rows ? x : spread(x, index, num_rows);
  };
  Tensor d_hidden = none, d_weight = none;
  if (wants_hidden) {
    d_hidden = torch::stable::new_empty(hidden, {d.size(0), depth}, ScalarType::Float);
    multiply_into({d}, {weight}, d_hidden);
  }
  if (wants_weight) {
    d_weight = torch::stable::new_empty(hidden, {columns, depth}, ScalarType::Float);
    multiply_into({d, true}, {h}, d_weight);
  }
  d_hidden = to_rows(d_hidden, wants_hidden);
  index = tokens.index;
  return {1, loss, least_logp, to_rows(logps, true), to_rows(entropy, return_entropy), d_hidden, d_weight};
}

}  // namespace grpo_fast
