"""Bugs planted in what surrounds the gradient products on a GPU, and in who takes part in them."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

GRADIENTS, ROWS = (f"grpo_fast/kernels/gpu/{x}.py" for x in ("gradients", "target_rows"))
ACTIVITY, LOOP, CHUNKS, SUMS = (
    f"grpo_fast/kernels/head/{x}.py" for x in ("activity", "loop", "chunks", "gradients")
)

MUTANTS = [
    Mutant("triton-dh-target-row", GRADIENTS,
           "total += tl.where(by_target == 0.0, 0.0, w * by_target)", "total += 0.0 * w",
           "dH lacks the target's row of W", "triton_gradients"),
    Mutant("triton-scaled-poison", GRADIENTS,
           "scaled = tl.where(by_row == 0.0, 0.0, h.to(tl.float32) * by_row)\n        to", "scaled = h.to(tl.float32) * by_row * 2.0\n        to",
           "hidden is scaled by twice its coefficient", "triton_gradients"),
    Mutant("triton-times-padding", GRADIENTS,
           "inside = rows < n_padded", "inside = in_rows",
           "the coefficients of the padding stay unset", "triton_gradients"),
    Mutant("triton-targets-first", ROWS,
           "if before != vocab_row:", "if vocab_row >= 0:",
           "every occurrence of an id adds the rest of its run", "triton_gradients"),
    Mutant("triton-targets-run", ROWS,
           "range(place.to(tl.int32), end, ROWS)", "range(place.to(tl.int32), place.to(tl.int32) + 1, ROWS)",
           "a run of more than eight rows is cut", "triton_gradients"),
    Mutant("triton-targets-flag", ROWS,
           "cancels = (size > CANCELS", "cancels = (size < 0.0 * CANCELS",
           "rows that nearly cancel stay rounded twice", "triton_gradients"),
    Mutant("triton-targets-depth", ROWS,
           "depth = tl.where(tl.max(places, 0) >= 0, n_rows, 0)", "depth = tl.where(tl.max(places, 0) >= 0, BLOCK_T, 0)",
           "a row that is formed again sums its first block only", "triton_gradients"),
    Mutant("activity-weights", ACTIVITY,
           "(terms.advantages != 0) & (terms.policy_weights != 0)", "terms.policy_weights != 0",
           "rows without advantage are multiplied", "triton_gradients"),
    Mutant("activity-kl", ACTIVITY,
           "terms.kl_weights is not None or terms.grad_entropy is not None", "terms.grad_entropy is not None",
           "rows without advantage lose the gradient of their KL", "triton_gradients"),
    Mutant("activity-chunk", ACTIVITY,
           "[chunk.start // self.chunk_rows]", "[0]",
           "every chunk has as many active rows as the first", "triton_gradients"),
    Mutant("loop-spared-always", LOOP,
           "is_narrow = wants_weight and has_narrow", "is_narrow = has_narrow",
           "a frozen head takes the memory of a sum that it never has", "triton_gradients"),
    Mutant("loop-lost-nan", SUMS,
           "results[-1].view(-1)[:1] += self.lost", "pass",
           "a NaN in a row without advantage is in the loss alone", "triton_gradients"),
    Mutant("chunks-target-share", CHUNKS,
           "rows <= TARGET_SHARE * self.weight.shape[0]", "True",
           "as many columns as the vocabulary has are multiplied again", "triton_gradients"),
    Mutant("fused-order", SUMS,
           "doors.add_targets_(total, ids, order,", "doors.add_targets_(total, ids, ids,",
           "a target's row of dW gets another token's hidden", "triton_gradients"),
]  # fmt: skip
