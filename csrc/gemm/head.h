// Logits of an LM head, hidden * weight^T + bias. Each block of logits is passed to the caller
// while it is in cache.
#pragma once

#include <functional>

#include "gemm/multiply.h"

namespace grpo_fast {

using Finish = std::function<void(const Block&, float*, int64_t)>;

// Tensors and options of an LM head. hidden and weight have the same dtype, fp32 or bf16.
struct Head {
  const void *hidden, *weight;  // (T, depth) and (columns, depth)
  int64_t hidden_stride, weight_stride, depth, columns;
  const float* bias;  // (columns,), or null
  bool is_fp32, tiles;  // tiles: multiply with torch's AMX product

  // Calls finish(block, logits, stride) for every block of the logits of the listed rows of
  // `hidden`. `rows` lists the rows in ascending order, and block.row is a position in this list. A
  // block has at most `block_columns` columns.
  void multiply(const int64_t* rows, int64_t count, int64_t block_columns,
                const Finish& finish) const {
    if (is_fp32) return run<float, Vectors>(rows, count, block_columns, finish);
    tiles ? run<Bfloat16, Tiles>(rows, count, block_columns, finish)
          : run<Bfloat16, Vectors>(rows, count, block_columns, finish);
  }

  // Returns one logit. Its last bits may differ from those of the same logit in multiply(), which
  // adds the terms in a different order.
  float logit(int64_t row, int64_t column) const {
    const float product =
        is_fp32 ? dot_product<float>(row, column) : dot_product<Bfloat16>(row, column);
    return product + (bias ? bias[column] : 0);
  }

 private:
  template <class T>
  float dot_product(int64_t row, int64_t column) const {
    const T* h = static_cast<const T*>(hidden) + row * hidden_stride;
    const T* w = static_cast<const T*>(weight) + column * weight_stride;
    Floats sum = {};
    int64_t k = 0;
    for (; k + kLanes <= depth; k += kLanes) sum = fma(load(h + k), load(w + k), sum);
    double total = sum_lanes(widen(sum));
    for (; k < depth; ++k) total += static_cast<double>(load_one(h + k)) * load_one(w + k);
    return static_cast<float>(total);
  }

  template <class T, class Kernel>
  void run(const int64_t* rows, int64_t count, int64_t block_columns, const Finish& finish) const {
    const T* x = static_cast<const T*>(hidden);
    // Read consecutive rows of `hidden` in place. Copy other rows first, because an operand has one
    // stride for all of its rows.
    const bool is_run = rows[count - 1] - rows[0] == count - 1;
    std::vector<T> chosen(is_run ? 0 : count * depth);
    for (int64_t i = 0; !is_run && i < count; ++i)
      std::copy_n(x + rows[i] * hidden_stride, depth, chosen.data() + i * depth);
    const Operand<T> a = is_run ? Operand<T>{x + rows[0] * hidden_stride, hidden_stride, false}
                                : Operand<T>{chosen.data(), depth, false};
    const Operand<T> b{static_cast<const T*>(weight), weight_stride, false};
    const Problem<T, T> p{count, columns, depth, a, b};
    const auto add_bias = [&](const Block& block, float* sums, int64_t stride) {
      for (int64_t row = 0; bias && row < block.rows; ++row)
        add_scaled(bias + block.column, 1.0f, block.columns, sums + row * stride);
      finish(block, sums, stride);
    };
    grpo_fast::multiply<Kernel>(p, add_bias, block_columns);
  }
};

}  // namespace grpo_fast
