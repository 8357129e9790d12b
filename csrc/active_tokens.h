// One pass over a padded or packed batch on the host: which tokens count, to which completion each belongs, and whether
// every value is what the checks of prepare.py want. What it finds odd it does not explain: the caller does, in Python.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

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

}  // namespace grpo_fast
