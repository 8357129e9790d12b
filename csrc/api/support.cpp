// Operators of the LM head restricted to token sets. They compute logits, statistics and slopes
// from hidden states, and dH and dW from the gradient of the logits.
// grpo_fast/kernels/support.py documents the results.
//
// Layout: the sets of all R rows are stored one after another in ids (nnz,). offsets (R + 1,)
// contains their bounds.
//
// Rounding: terms are summed in fp32, but the lanes of a dot product are added in fp64. A 16-bit dW
// is rounded once.
//
// Parallelism: threads compute the logits and dH of different rows, and different blocks of rows of
// dW, so that no two threads write to the same row.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "api/chunk.h"
#include "gemm/gather.h"
#include "rows/gradient.h"

namespace grpo_fast {
namespace {

constexpr int64_t kVocabularyBlock = 32;  // rows of dW per task

// Returns an uninitialised (rows, columns) fp32 tensor.
Tensor matrix_like(const Tensor& like, int64_t rows, int64_t columns) {
  return torch::stable::new_empty(like, {rows, columns}, ScalarType::Float);
}

// Returns a view of a matrix whose rows are read by index.
template <class T>
Gathered<T> gathered(const Tensor& x) {
  return {data<T>(x), x.stride(0), x.size(1)};
}

// The token sets of R rows. The set of row r is ids[offsets[r]] to ids[offsets[r + 1] - 1].
struct SupportSets {
  int64_t rows, numbers;  // R, nnz
  const int64_t *ids, *offsets;

  SupportSets(const Tensor& ids_, const Tensor& offsets_, int64_t vocabulary)
      : rows(offsets_.size(0) - 1), numbers(ids_.size(0)),
        ids(checked_indices(ids_, numbers, vocabulary, "ids")),
        offsets(checked_offsets<int64_t>(offsets_, numbers, "offsets")) {}

  int64_t width() const { return numbers / std::max<int64_t>(1, rows); }
  // Returns the id after position i, so that the caller can prefetch its weight row.
  int64_t next(int64_t i) const { return ids[std::min(i + 1, numbers - 1)]; }
};

// Maps each token set to its row of `hidden`.
struct Sources {
  const int64_t* index;  // null: set r uses row r of `hidden`

  Sources(const std::optional<Tensor>& x, int64_t rows, const Tensor& hidden)
      : index(x ? checked_indices(*x, rows, hidden.size(0), "index") : nullptr) {
    STD_TORCH_CHECK(x || hidden.size(0) >= rows, "hidden: expected ", rows, " rows, got ",
                    hidden.size(0));
  }

  int64_t operator[](int64_t row) const { return index ? index[row] : row; }
};

// Checks that hidden and weight have the same dtype and number of columns.
void check_head(const Tensor& hidden, const Tensor& weight) {
  check_rows(hidden, "hidden"), check_rows(weight, "weight");
  STD_TORCH_CHECK(hidden.size(1) == weight.size(1), "hidden: expected ", weight.size(1),
                  " columns as in weight, got ", hidden.size(1));
  STD_TORCH_CHECK(hidden.scalar_type() == weight.scalar_type(),
                  "hidden: expected the dtype of weight");
}

// Returns the position of each row's target in the row's set, (R,), or -1 if the set does not
// contain it. The second result, 0-d, is an id that occurs twice in a set, or -1 if there is none.
std::tuple<Tensor, Tensor> support_places(Tensor ids, Tensor offsets, Tensor target_ids,
                                          int64_t vocabulary) {
  const SupportSets sets(ids, offsets, vocabulary);
  const int64_t* targets = checked_vector<int64_t>(target_ids, sets.rows, "target_ids");
  const Tensor places = empty(ids, sets.rows, ScalarType::Long);
  const Tensor twice = torch::stable::new_empty(ids, {}, ScalarType::Long);
  // last[id] is the last row whose set contained `id`. If this is the current row, its set contains
  // the id twice.
  std::vector<int64_t> last(vocabulary, -1);
  int64_t *to = data<int64_t>(places), *repeated = data<int64_t>(twice);
  *repeated = -1;
  for (int64_t row = 0; row < sets.rows; ++row) {
    to[row] = -1;
    for (int64_t i = sets.offsets[row]; i < sets.offsets[row + 1]; ++i) {
      const int64_t id = sets.ids[i];
      if (last[id] == row) *repeated = id;
      if (id == targets[row]) to[row] = i - sets.offsets[row];
      last[id] = row;
    }
  }
  return {places, twice};
}

// The LM head, restricted to the token sets of the rows.
template <class T>
struct Head {
  Gathered<T> weight;
  const float* bias;  // (V,), or null
  const SupportSets& sets;

  // Computes the logit x . weight[id] + bias[id] of every id in a row's set. Writes them to the
  // range of `to` (nnz,) that belongs to the row.
  void logits(const T* x, int64_t row, float* to) const {
    for (int64_t i = sets.offsets[row]; i < sets.offsets[row + 1]; ++i) {
      const int64_t id = sets.ids[i];
      const T* next = weight.row(sets.next(i));
      to[i] = dot_product(x, weight.row(id), weight.columns, next) + (bias ? bias[id] : 0);
    }
  }

  // Writes dH of one row to `to` (H,). It is the sum of d[i] * weight[ids[i]] over the row's set,
  // where d (nnz,) is the gradient of the logits. Terms with d[i] = 0 are skipped, even if the
  // weight is NaN.
  void hidden(const float* d, int64_t row, float* to) const {
    std::memset(to, 0, weight.columns * sizeof(float));
    for (int64_t i = sets.offsets[row]; i < sets.offsets[row + 1]; ++i) {
      const T* next = weight.row(sets.next(i));
      if (d[i] != 0) add_row(weight.row(sets.ids[i]), d[i], weight.columns, to, next);
    }
  }
};

// The results of support_rows in fp32: raw logits (nnz,), lse, logps, entropy and slopes. entropy
// is (0,) unless it is requested. Row r of slopes (R, H) is the derivative of logps[r] with respect
// to the hidden state of the row. slopes is (0, H) unless it is requested.
using Rows = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Rows support_rows(Tensor hidden, Tensor weight, std::optional<Tensor> bias, Tensor ids,
                  Tensor offsets, Tensor places, std::optional<Tensor> index, double logit_scale,
                  std::optional<double> softcap, double temperature, bool return_entropy,
                  bool return_slopes) {
  check_head(hidden, weight);
  const SupportSets sets(ids, offsets, weight.size(0));
  const Sources sources(index, sets.rows, hidden);
  const LogitTransform transform{logit_scale, softcap, temperature};
  const Chunk chunk = checked_ragged(sets.numbers, offsets, places, transform);
  const float* added = checked_vector(bias, weight.size(0), "bias");
  const int64_t depth = weight.size(1);
  const Tensor raw = empty(weight, sets.numbers), lse = empty(weight, sets.rows);
  const Tensor logps = empty(weight, sets.rows);
  const Tensor entropy = empty(weight, return_entropy ? sets.rows : 0);
  const Tensor slopes = matrix_like(weight, return_slopes ? sets.rows : 0, depth);
  const RowOutputs to{data<float>(lse), data<float>(logps),
                      return_entropy ? data<float>(entropy) : nullptr};
  const std::vector<float> ones(return_slopes ? sets.rows : 0, 1.0f);
  std::vector<float> d(return_slopes ? sets.numbers : 0);
  const Matrix<float> z{data<float>(raw), sets.numbers}, dz{d.data(), sets.numbers};
  const Coefficients at{to.lse, to.logps, nullptr, ones.data(), nullptr};
  with_type<float, Bfloat16, Float16>(weight, "weight", [&](auto element) {
    using T = decltype(element);
    const auto h = gathered<T>(hidden);
    const Head<T> head{gathered<T>(weight), added, sets};
    for_each_row(sets.rows, sets.width() * depth, [&](int64_t row) {
      // Compute the slopes right after the logits, while the weight rows are still in cache.
      head.logits(h.row(sources[row]), row, z.data);
      softcap      ? write_statistics<true, true>(chunk, z, row, to)
      : to.entropy ? write_statistics<false, true>(chunk, z, row, to)
                   : write_statistics<false, false>(chunk, z, row, to);
      if (!return_slopes) return;
      softcap ? write_gradient<true>(chunk, z, dz, at, row)
              : write_gradient<false>(chunk, z, dz, at, row);
      head.hidden(d.data(), row, data<float>(slopes) + row * depth);
    });
  });
  return {raw, lse, logps, entropy, slopes};
}

// Returns dH, (R, H) fp32. Each row is the sum of d[i] * weight[ids[i]] over the set of the row,
// where d (nnz,) is the gradient of the logits.
Tensor support_hidden(Tensor d, Tensor weight, Tensor ids, Tensor offsets) {
  check_rows(weight, "weight");
  const SupportSets sets(ids, offsets, weight.size(0));
  const float* factors = checked_vector<float>(d, sets.numbers, "d");
  const int64_t depth = weight.size(1);
  const Tensor out = matrix_like(d, sets.rows, depth);
  with_type<float, Bfloat16, Float16>(weight, "weight", [&](auto element) {
    const Head<decltype(element)> head{gathered<decltype(element)>(weight), nullptr, sets};
    for_each_row(sets.rows, sets.width() * depth, [&](int64_t row) {
      head.hidden(factors, row, data<float>(out) + row * depth);
    });
  });
  return out;
}

// The terms of the weight gradient dW, grouped by token id. Row `id` of dW is the sum of
// terms[starts[id]] to terms[starts[id + 1] - 1]. Each term belongs to a row whose set contains the
// id. The terms of an id are in the order of these rows.
struct ById {
  std::vector<int64_t> starts;
  std::vector<Term> terms;

  ById(const SupportSets& sets, const Sources& sources, const float* d, int64_t vocabulary)
      : starts(vocabulary + 2), terms(sets.numbers) {
    // Sort the terms by id with a counting sort. It is stable, so the terms of an id stay in row
    // order.
    for (int64_t i = 0; i < sets.numbers; ++i) ++starts[sets.ids[i] + 2];
    for (int64_t id = 2; id < vocabulary + 2; ++id) starts[id] += starts[id - 1];
    for (int64_t row = 0; row < sets.rows; ++row)
      for (int64_t i = sets.offsets[row]; i < sets.offsets[row + 1]; ++i)
        terms[starts[sets.ids[i] + 1]++] = {d[i], sources[row]};
  }
};

// Computes dW (V, H), and stores it in `out` or adds it to `out`. d (nnz,) is the gradient of the
// logits. Row `id` of dW is the sum of d[i] * hidden[index[row]] over all positions i with ids[i] =
// id, where `row` is the row whose set contains position i.
void support_weight_(Tensor d, Tensor hidden, Tensor ids, Tensor offsets,
                     std::optional<Tensor> index, Tensor out, bool add) {
  check_rows(hidden, "hidden"), check_rows(out, "out");
  const int64_t vocabulary = out.size(0), depth = hidden.size(1);
  STD_TORCH_CHECK(out.size(1) == depth && out.is_contiguous(), "out: expected contiguous (V, ",
                  depth, ")");
  const SupportSets sets(ids, offsets, vocabulary);
  const Sources sources(index, sets.rows, hidden);
  const ById by(sets, sources, checked_vector<float>(d, sets.numbers, "d"), vocabulary);
  const int64_t blocks = (vocabulary + kVocabularyBlock - 1) / kVocabularyBlock;
  with_type<float, Bfloat16, Float16>(hidden, "hidden", [&](auto element) {
    with_type<float, Bfloat16, Float16>(out, "out", [&](auto stored) {
      const auto h = gathered<decltype(element)>(hidden);
      auto* to = data<decltype(stored)>(out);
      for_each_row(blocks, kVocabularyBlock * depth, [&](int64_t block) {
        const int64_t end = std::min(vocabulary, (block + 1) * kVocabularyBlock);
        for (int64_t id = block * kVocabularyBlock; id < end; ++id) {
          const int64_t first = by.starts[id], count = by.starts[id + 1] - first;
          // If no set contains the id, its row of dW is 0, so `add` has nothing to add.
          if (count > 0 || !add)
            sum_rows(h, by.terms.data() + first, count, to + id * depth, add);
        }
      });
    });
  });
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(GRPO_FAST_LIBRARY, library) {
  library.def(
      "support_places(Tensor ids, Tensor offsets, Tensor target_ids, int vocabulary)"
      " -> (Tensor, Tensor)");
  library.def(
      "support_rows(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor offsets,"
      " Tensor places, Tensor? index, float logit_scale, float? softcap, float temperature,"
      " bool return_entropy, bool return_slopes)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("support_hidden(Tensor d, Tensor weight, Tensor ids, Tensor offsets) -> Tensor");
  library.def(
      "support_weight_(Tensor d, Tensor hidden, Tensor ids, Tensor offsets, Tensor? index,"
      " Tensor(a!) out, bool add) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(GRPO_FAST_LIBRARY, CPU, library) {
  library.impl("support_places", TORCH_BOX(&grpo_fast::support_places));
  library.impl("support_rows", TORCH_BOX(&grpo_fast::support_rows));
  library.impl("support_hidden", TORCH_BOX(&grpo_fast::support_hidden));
  library.impl("support_weight_", TORCH_BOX(&grpo_fast::support_weight_));
}
