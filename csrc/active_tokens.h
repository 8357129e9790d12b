// One pass over a padded or packed batch on the host: which tokens count, to which completion each belongs, and whether
// every value is what the checks of prepare.py want. What it finds odd it does not explain: the caller does, in Python.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "tensors.h"

namespace grpo_fast {

struct TokenColumns {
  int64_t num_rows, num_completions, vocab_size;
  const int64_t* target_ids;  // (N,) or null
  const float* advantages;    // (N,) or (B,)
  bool per_completion;
  const float* floats[4];  // old_logps, ref_logps, sampling_logps, temperature: (N,) or null
};

struct ActiveTokens {
  std::vector<int64_t> index, segments, lengths;
  std::vector<float> advantages;
  bool ok = true;

  // 1 / total of every token, divided by its completion's length when by_length; total: none is the number of tokens.
  std::vector<float> weights(std::optional<double> total, bool by_length) const {
    std::vector<float> to(segments.size());
    const double all = total.value_or(static_cast<double>(segments.size()));
    for (size_t i = 0; i < to.size(); ++i)
      to[i] = static_cast<float>(1.0 / (by_length ? static_cast<double>(lengths[segments[i]]) * all : all));
    return to;
  }

  void add(const TokenColumns& from, int64_t row, int64_t completion) {
    const float advantage = from.advantages[from.per_completion ? completion : row];
    ok = ok && std::isfinite(advantage);
    if (from.target_ids) ok = ok && from.target_ids[row] >= 0 && from.target_ids[row] < from.vocab_size;
    for (int column = 0; column < 2; ++column)
      if (from.floats[column]) ok = ok && from.floats[column][row] == from.floats[column][row];
    if (from.floats[3]) ok = ok && from.floats[3][row] > 0 && std::isfinite(from.floats[3][row]);
    index.push_back(row);
    segments.push_back(completion);
    advantages.push_back(advantage);
    ++lengths[completion];
  }
};

// offset(b): where completion b starts; mask(row): 0 or 1, anything else is odd. Stops at the first oddity.
template <class Offset, class Mask>
ActiveTokens find_active_tokens(const TokenColumns& from, const Offset& offset, const Mask& mask) {
  ActiveTokens to;
  to.lengths.assign(from.num_completions, 0);
  to.index.reserve(from.num_rows);
  to.segments.reserve(from.num_rows);
  to.advantages.reserve(from.num_rows);
  to.ok = offset(0) == 0 && offset(from.num_completions) == from.num_rows;
  for (int64_t b = 0; b < from.num_completions && to.ok; ++b) {
    to.ok = offset(b) <= offset(b + 1) && offset(b + 1) <= from.num_rows;
    for (int64_t row = offset(b); to.ok && row < offset(b + 1); ++row) {
      const auto kept = mask(row);
      if (kept == 1)
        to.add(from, row, b);
      else
        to.ok = kept == 0;
    }
  }
  return to;
}

// ---- the door ----

template <class T>
Tensor copied(const Tensor& like, const std::vector<T>& values) {
  constexpr ScalarType dtype = std::is_same_v<T, float> ? ScalarType::Float : ScalarType::Long;
  Tensor out = torch::stable::new_empty(like, {static_cast<int64_t>(values.size())}, dtype);
  if (!values.empty()) std::memcpy(out.data_ptr(), values.data(), values.size() * sizeof(T));
  return out;
}

// x at the rows of `index`, or `none` where nothing is wanted.
inline Tensor gathered(const Tensor& none, const std::optional<Tensor>& x, const std::vector<int64_t>& index,
                       bool wanted) {
  if (!x || !wanted) return none;
  const int64_t count = static_cast<int64_t>(index.size());
  const bool is_long = x->scalar_type() == ScalarType::Long;
  Tensor out = torch::stable::new_empty(none, {count}, is_long ? ScalarType::Long : ScalarType::Float);
  for (int64_t i = 0; i < count; ++i)
    is_long ? void(data<int64_t>(out)[i] = data<int64_t>(*x)[index[i]])
            : void(data<float>(out)[i] = data<float>(*x)[index[i]]);
  return out;
}

// run(read) with read(i) the i-th value of a mask or of offsets; false for a dtype it does not know.
template <class F>
bool with_reader(const Tensor& x, const F& run) {
  const auto call = [&](auto* values) { return run([values](int64_t i) { return values[i]; }), true; };
  switch (x.scalar_type()) {
    case ScalarType::Bool: return call(static_cast<const uint8_t*>(x.data_ptr()));
    case ScalarType::Int: return call(data<int32_t>(x));
    case ScalarType::Long: return call(data<int64_t>(x));
    case ScalarType::Float: return call(data<float>(x));
    default: return false;
  }
}

// A caller's tensors; all but the advantages are optional.
struct TokenTensors {
  const std::optional<Tensor>& target_ids;
  const Tensor& advantages;
  const std::optional<Tensor>& cu_seqlens;
  int64_t num_completions;
  const std::optional<Tensor>&mask, &old_logps, &ref_logps, &sampling_logps, &temperature;
  int64_t num_rows, vocab_size;
};

// Not ok, and empty: something is odd, or of a dtype that is not taken here.
inline ActiveTokens find_active_tokens(const TokenTensors& x) {
  const auto takes = [](const std::optional<Tensor>& tensor, int64_t size, ScalarType dtype) {
    return !tensor || (tensor->is_cpu() && tensor->dim() == 1 && tensor->size(0) == size && tensor->is_contiguous() &&
                       tensor->scalar_type() == dtype);
  };
  TokenColumns from{x.num_rows, x.num_completions, x.vocab_size, nullptr, nullptr, false, {}};
  from.per_completion = x.advantages.size(0) == x.num_completions;
  const std::optional<Tensor>* floats[4] = {&x.old_logps, &x.ref_logps, &x.sampling_logps, &x.temperature};
  bool ok = x.num_rows > 0 && x.num_completions > 0 && takes(x.target_ids, x.num_rows, ScalarType::Long) &&
            takes(x.advantages, from.per_completion ? x.num_completions : x.num_rows, ScalarType::Float) &&
            (!x.cu_seqlens || takes(x.cu_seqlens, x.num_completions + 1, x.cu_seqlens->scalar_type())) &&
            (!x.mask || takes(x.mask, x.num_rows, x.mask->scalar_type())) &&
            (x.cu_seqlens || x.num_rows % x.num_completions == 0);
  for (int column = 0; column < 4; ++column) ok = ok && takes(*floats[column], x.num_rows, ScalarType::Float);
  ActiveTokens to;
  if (ok) {
    if (x.target_ids) from.target_ids = data<int64_t>(*x.target_ids);
    from.advantages = data<float>(x.advantages);
    for (int column = 0; column < 4; ++column)
      if (*floats[column]) from.floats[column] = data<float>(**floats[column]);
    const auto with_offsets = [&](auto offset) {
      if (!x.mask) return void(to = find_active_tokens(from, offset, [](int64_t) { return 1; }));
      ok = with_reader(*x.mask, [&](auto kept) { to = find_active_tokens(from, offset, kept); });
    };
    const int64_t length = x.num_rows / x.num_completions;
    if (x.cu_seqlens)
      ok = with_reader(*x.cu_seqlens, with_offsets) && ok;
    else
      with_offsets([length](int64_t b) { return b * length; });
    ok = ok && to.ok;
  }
  if (!ok) to = ActiveTokens{};
  to.ok = ok;
  return to;
}

// -> status, lengths (B,), segments (T,), advantages (T,), weights (T,), index (T,), then target_ids, old_logps,
// ref_logps, sampling_logps, temperature gathered by it. Status 0: something is odd, or of a dtype that is not taken
// here; nothing else is set. 1: all N rows are active; index and the gathered tensors are empty. 2: some are.
inline std::tuple<int64_t, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
active_tokens(
    std::optional<Tensor> target_ids, Tensor advantages, std::optional<Tensor> cu_seqlens, int64_t num_completions,
    std::optional<Tensor> mask, std::optional<Tensor> old_logps, std::optional<Tensor> ref_logps,
    std::optional<Tensor> sampling_logps, std::optional<Tensor> temperature, int64_t num_rows, int64_t vocab_size,
    std::optional<double> total, bool by_length) {
  const ActiveTokens to = find_active_tokens({target_ids, advantages, cu_seqlens, num_completions, mask, old_logps,
                                              ref_logps, sampling_logps, temperature, num_rows, vocab_size});
  const bool all = to.ok && static_cast<int64_t>(to.index.size()) == num_rows;
  const Tensor none = torch::stable::new_empty(advantages, {0}, ScalarType::Long);
  const auto pick = [&](const std::optional<Tensor>& x) { return gathered(none, x, to.index, to.ok && !all); };
  return {to.ok ? (all ? 1 : 2) : 0, copied(advantages, to.lengths), copied(advantages, to.segments),
          copied(advantages, to.advantages), copied(advantages, to.weights(total, by_length)),
          all ? none : copied(advantages, to.index), pick(target_ids), pick(old_logps), pick(ref_logps),
          pick(sampling_logps), pick(temperature)};
}

}  // namespace grpo_fast
