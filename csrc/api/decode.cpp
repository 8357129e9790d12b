// The operator decode_: attention while sampling, one new token of each completion.
#include <torch/csrc/stable/library.h>

#include "attention/decode.h"

namespace grpo_fast {
namespace {

// Keeps k and v as token `time` of own_k and own_v; -> (B, H, D) fp32.
Tensor decode_(Tensor q, Tensor k, Tensor v, Tensor prompt_k, Tensor prompt_v, Tensor own_k,
               Tensor own_v, Tensor lengths, Tensor counts, int64_t time, double scale,
               std::optional<int64_t> window) {
  STD_TORCH_CHECK(q.dim() == 3, "q: expected (heads, rows, D)");
  const int64_t rows = q.size(1);
  Held held =
      checked_held(prompt_k, prompt_v, own_k, own_v, lengths, counts, rows, time, window);
  const int64_t heads = held.heads, depth = held.depth;
  STD_TORCH_CHECK(q.size(0) % heads == 0, "q: expected a multiple of ", heads, " heads, got ",
                  q.size(0));
  check(q, "q", {q.size(0), rows, depth}), check(k, "k", {heads, rows, depth});
  check(v, "v", {heads, rows, depth});
  const Tensor out = torch::stable::new_empty(q, {rows, q.size(0), depth});
  const int64_t shares = static_cast<int64_t>(held.shares.size());
  attend({std::move(held), data<float>(q), data<float>(k), data<float>(v), q.stride(0),
          q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), q.size(0) / heads,
          static_cast<float>(scale), data<float>(out)},
         0, shares);
  return out;
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(grpo_fast_decode, library) {
  library.def(
      "decode_(Tensor q, Tensor k, Tensor v, Tensor prompt_k, Tensor prompt_v, Tensor(a!) own_k,"
      " Tensor(b!) own_v, Tensor lengths, Tensor counts, int time, float scale, int? window)"
      " -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(grpo_fast_decode, CPU, library) {
  library.impl("decode_", TORCH_BOX(&grpo_fast::decode_));
}
