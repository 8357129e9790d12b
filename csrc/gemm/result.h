// Epilogue of the matrix product, for one block of the result. It scales rows, adds rows of another
// matrix, and rounds the result once.
#pragma once

#include "gemm/multiply.h"

namespace grpo_fast {

// Scaled rows that are added to a product. For each t, coefficients[t] * values[rows[t]] is added
// to row ids[t] of the result. Terms with equal ids are added in the order of t. If `ids` or `rows`
// is null, the index is t.
struct Added {
  const float* coefficients = nullptr;  // (T,)
  const int64_t *ids = nullptr, *rows = nullptr;
  const void* values = nullptr;  // fp32 or bf16
  int64_t stride = 0;
  bool is_fp32 = false;
  std::vector<int64_t> order = {};  // t sorted by id

  int64_t id(int64_t t) const { return ids ? ids[t] : t; }

  // Adds rows to the sums of a block. Only the rows that belong to this block are added.
  void add(const Block& block, float* sums, int64_t sums_stride) const {
    const auto is_before = [&](int64_t t, int64_t row) { return id(t) < row; };
    auto at = std::lower_bound(order.begin(), order.end(), block.row, is_before);
    for (; at != order.end() && id(*at) < block.row + block.rows; ++at) {
      const float factor = coefficients[*at];
      // Skip a row with coefficient 0, because its values may be NaN and 0 * NaN is NaN.
      if (factor == 0) continue;
      const int64_t start = (rows ? rows[*at] : *at) * stride + block.column;
      float* to = sums + (id(*at) - block.row) * sums_stride;
      is_fp32 ? add_scaled(static_cast<const float*>(values) + start, factor, block.columns, to)
              : add_scaled(static_cast<const Bfloat16*>(values) + start, factor, block.columns, to);
    }
  }
};

// Multiplies each row by its scale. A scale of 0 gives exact zeros, even if the row contains NaN.
inline void scale_rows(const float* scales, const Block& block, float* sums, int64_t stride) {
  for (int64_t row = 0; row < block.rows; ++row, sums += stride) {
    const float scale = scales[block.row + row];
    by_vectors(block.columns, [&](int64_t c, int64_t count) GRPO_FAST_BODY {
      const Floats scaled = scale == 0 ? Floats{} : load_up_to(sums + c, count) * scale;
      store_up_to(sums + c, scaled, count);
    });
  }
}

// Stores the sums of a block in `out`, or adds them to `out`.
template <class Out>
void store_block(const Block& block, const float* sums, int64_t stride, Out* out,
                 int64_t out_stride, bool add) {
  out += block.row * out_stride + block.column;
  for (int64_t row = 0; row < block.rows; ++row, sums += stride, out += out_stride)
    by_vectors(block.columns, [&](int64_t c, int64_t count) GRPO_FAST_BODY {
      const Floats x = load_up_to(sums + c, count);
      store_up_to(out + c, add ? load_up_to(out + c, count) + x : x, count);
    });
}

}  // namespace grpo_fast
