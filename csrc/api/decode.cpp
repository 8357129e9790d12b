// Operator decode_: attention of one new token of each completion (attention/decode.h).
#include <torch/csrc/stable/library.h>

#include "attention/decode.h"

namespace grpo_fast {
namespace {

// Stores k and v as token `time` of each completion. Returns the attention outputs of the queries
// q, (B, H, D) in fp32.
Tensor decode_(Tensor q, Tensor k, Tensor v, Tensor prompt_k, Tensor prompt_v, Tensor completion_k,
               Tensor completion_v, Tensor lengths, Tensor counts, int64_t time, double scale,
               std::optional<int64_t> window) {
  STD_TORCH_CHECK(q.dim() == 3, "q: expected (heads, rows, D)");
  const int64_t rows = q.size(1);
  KvCache cache = checked_cache(prompt_k, prompt_v, completion_k, completion_v, lengths, counts,
                                rows, time, window);
  const int64_t heads = cache.heads, depth = cache.depth;
  STD_TORCH_CHECK(q.size(0) % heads == 0, "q: expected a multiple of ", heads, " heads, got ",
                  q.size(0));
  check(q, "q", {q.size(0), rows, depth}), check(k, "k", {heads, rows, depth});
  check(v, "v", {heads, rows, depth});
  const Tensor out = torch::stable::new_empty(q, {rows, q.size(0), depth});
  const int64_t shares = static_cast<int64_t>(cache.shares.size());
  attend({std::move(cache), data<float>(q), data<float>(k), data<float>(v), q.stride(0),
          q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), q.size(0) / heads,
          static_cast<float>(scale), data<float>(out)},
         0, shares);
  return out;
}

}  // namespace
}  // namespace grpo_fast

STABLE_TORCH_LIBRARY(GRPO_FAST_LIBRARY, library) {
  library.def(
      "decode_(Tensor q, Tensor k, Tensor v, Tensor prompt_k, Tensor prompt_v,"
      " Tensor(a!) completion_k, Tensor(b!) completion_v, Tensor lengths, Tensor counts,"
      " int time, float scale, int? window) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(GRPO_FAST_LIBRARY, CPU, library) {
  library.impl("decode_", TORCH_BOX(&grpo_fast::decode_));
}
