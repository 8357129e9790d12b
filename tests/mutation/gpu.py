"""Bugs planted in the Triton kernels. The tests that must detect them use the Triton interpreter.

A bug that is planted in the C++ kernels and detected by the same test is not planted again.
"""

# Each entry has five fields: name, key of suites.SUITES, description of the fault, original text,
# and replacement.
PLANTS = {
    "grpo_fast/kernels/gpu/tokens.py": [
        ("triton-nan-hidden", "triton_nan", "the NaN of an active row has no gradient",
         "tl.where(lp != lp, lp, g)", "g"),
        ("triton-extremes-step", "triton_tokens", "the least step includes the end of the vector",
         "has_next = at + 1 < size", "has_next = at < size"),
        ("triton-extremes-nan", "triton_tokens", "NaN in a vector is not seen",
         "is_nan |= (inside & (x != x)).to(tl.int32)", "is_nan |= (inside & (x > x)).to(tl.int32)"),
        ("triton-tokens-search", "triton_tokens", "the first token of a completion belongs to the one before",
         "is_right = is_open & (offset <= row)", "is_right = is_open & (offset < row)"),
        ("triton-tokens-mask", "triton_tokens", "advantages per token ignore the mask",
         "at = row\n", "at = tokens\n"),
    ],
    "grpo_fast/kernels/gpu/math.py": [
        ("triton-clean-tile", "triton_linear", "a target in the right half of a tile counts as an ordinary column",
         "(target < start + COLS)", "(target < start + COLS // 2)"),
        ("triton-clean-edge", "triton_linear", "columns after the vocabulary are summed in tiles without a target",
         " | (start + COLS > V)", ""),
    ],
    "grpo_fast/kernels/gpu/linear.py": [
        ("beyond-logit", "triton_range", "the target's logit of a large transposed head is read from a wrong address",
         "offs_h.to(tl.int64) * stride_weight_h", "offs_h * stride_weight_h"),
        ("triton-join-second-block", "triton_linear", "the entropy's sum of earlier slices keeps its old maximum",
         "exp_z_sum + (row_max - new_max) * exp_sum) * rescale", "exp_z_sum + (row_max - new_max) * exp_sum)"),
        ("triton-last-group", "triton_linear", "row blocks of an incomplete group get wrong indices",
         "blocks = tl.minimum(row_blocks - first_block, group_blocks)", "blocks = group_blocks"),
        ("triton-depth-tail", "triton_linear", "one column too many at the end of hidden and W",
         "(offs_c < n_cols - col_start)", "(offs_c <= n_cols - col_start)"),
        ("triton-weights-guard", "triton_weights", "weights of an unlikely target leave the range of bf16",
         "normaliser = tl.where(high_nll, lse, normaliser)", "normaliser = normaliser"),
    ],
    "grpo_fast/kernels/gpu/gradients.py": [
        ("triton-scale-blocks", "triton_scale", "programs scale each other's elements again",
         "first = tl.program_id(0).to(tl.int64) * BLOCK", "first = tl.program_id(0).to(tl.int64)"),
    ],
    "grpo_fast/kernels/gpu/launch.py": [
        ("device-recorded", "devices", "the current GPU is queried instead of the tensor's GPU",
         "with torch.cuda.device_of(x):", "with torch.cuda.device(0):"),
        ("device-architecture", "devices", "a GPU uses the blocks for the architecture of the current GPU",
         "with torch.cuda.device(index):", "with torch.cuda.device(-1):"),
    ],
    "grpo_fast/kernels/gpu/rows.py": [
        ("triton-loss-stride", "triton_stride", "a program computes only the first of its rows",
         "range(tl.program_id(0), n_rows, tl.num_programs(0))", "range(tl.program_id(0), n_rows, n_rows)"),
        ("triton-support-ragged", "triton_support", "the target of a row is counted from the start of the first row",
         "out_ptr + first_out, tl.load(target_ptr + row), lse", "out_ptr + first_out, tl.load(target_ptr + row) + first, lse"),
    ],
    "grpo_fast/kernels/gpu/support.py": [
        ("beyond-hidden", "triton_range", "a row of hidden with a large stride is read from a wrong address",
         "cols.to(tl.int64) * stride, mask", "cols * stride, mask"),
        ("triton-support-padding", "triton_support", "elements after the last id of a row are summed",
         'z = tl.where(inside & ~is_target, z, float("-inf"))', 'z = tl.where(~is_target, z, float("-inf"))'),
        ("triton-support-shrink", "triton_support", "the slope of a tile keeps an old maximum",
         "others = others * rescale + tl.sum", "others = others + tl.sum"),
        ("triton-support-moment", "triton_support", "the entropy ignores that the target raises the maximum",
         "exp_z_sum = (exp_z_sum + (row_max - new_max) * exp_sum) * rescale\n    # 5. Compute the statistics of the row.", "exp_z_sum = exp_z_sum * rescale\n    # 5. Compute the statistics of the row."),
        ("triton-support-normaliser", "triton_support", "the slope of the other ids uses the maximum that includes the target",
         "d -= exp_fp32(row_max - lse) * others", "d -= exp_fp32(new_max - lse) * others"),
    ],
    "grpo_fast/kernels/gpu/target_rows.py": [
        ("triton-targets-stable", "triton_tokens", "equal ids are sorted in reverse",
         "(others[None, :] < rows[:, None])", "(others[None, :] > rows[:, None])"),
        ("triton-targets-first", "triton_gradients", "every occurrence of an id adds the remainder of its run",
         "if before != vocab_row:", "if vocab_row >= 0:"),
        ("triton-targets-run", "triton_gradients", "a run of more than four rows is cut",
         "> 0, first + ROWS, -1)", "> 0, -1, -1)"),
        ("triton-targets-flag", "triton_gradients", "rows that nearly cancel stay rounded twice",
         "cancels = (size > tl.sum", "cancels = (size < 0.0 * tl.sum"),
        ("triton-targets-depth", "triton_gradients", "a recomputed row sums its first block only",
         "tl.range(0, tl.where(has_flag, n_rows, 0), BLOCK_T)", "tl.range(0, tl.where(has_flag, BLOCK_T, 0), BLOCK_T)"),
    ],
}  # fmt: skip
