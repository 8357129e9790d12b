"""Tests that must detect the planted bugs, as named suites.

The suites are quick, because they run once for every bug.
"""

# Arguments of pytest. The first word of a name is the backend: csrc (C++ kernels) or triton (Triton's
# interpreter). All other suites run the torch implementation.
SUITES = {
    "sweeps": "tests/loss/test_loss_parity.py -k sweeps",
    "grad_filter": "tests/kernels/test_grad_filter.py -k 'masses or chunk'",
    "graphs": "tests/gpu/test_cuda_graphs.py -k no_value_is_read",
    "logps": "tests/loss/test_logps.py -k 'not real_sizes'",
    "range": "tests/loss/test_gradient_range.py -k gradients",
    "shards": "tests/loss/test_vocabulary_shards.py -k '2- or chunks'",
    "support": "tests/loss/test_logps.py tests/loss/test_loss_parity.py -k 'values_and or sweeps or sizes'",
    "csrc_support": "tests/kernels/test_support_kernels.py",
    "csrc_shards": "tests/loss/test_vocabulary_shards.py -k '2- and cpu'",
    "csrc_decode": "tests/kernels/test_decode_cpu.py",
    "csrc_decoder": "tests/rollout/test_decoder.py",
    "divergence": "tests/loss/test_divergence.py",
    "csrc_divergence": "tests/loss/test_divergence.py -k cpu",
    "divergence_term": "tests/loss/test_divergence_term.py",
    "csrc": "tests/kernels/test_rows.py tests/loss/test_loss_parity.py -k 'cpu and (rows or sweeps or trap)'",
    "csrc_gemm": "tests/kernels/test_gemm_cpu.py",
    "csrc_layers": "tests/kernels/test_modules_cpu.py",
    "csrc_linear": "tests/kernels/test_head.py",
    "csrc_nan": "tests/loss/test_loss_parity.py -k 'sweeps and cpu'",
    "triton_nan": "tests/loss/test_loss_parity.py -k 'sweeps and triton and (grpo or dro)'",
    "devices": "tests/kernels/test_gpu_device.py",
    "triton_range": "tests/kernels/triton_tools/cases_tiles.py -k transposed",
    "csrc_sums": "tests/loss/test_loss_parity.py tests/kernels/test_grad_filter.py tests/loss/test_contract.py -k fused",
    "triton_linear": "tests/kernels/triton_tools/cases_tiles.py tests/kernels/test_head.py -k 'triton_tools or triton and (infinity or values)'",
    "triton_gradients": "tests/kernels/triton_tools/cases_gradients.py",
    "triton_tokens": "tests/kernels/triton_tools/cases_tokens.py",
    "triton_weights": "tests/kernels/triton_tools/cases_launches.py tests/kernels/test_head.py -k 'triton_tools or triton and (far_below or bad_row or values)'",
    "triton_support": "tests/kernels/test_support_kernels.py -k 'triton and not 1030'",
    "triton_support_public": "tests/loss/test_logps.py tests/loss/test_loss_parity.py -k 'triton and (values_and or sweeps)'",
    "triton_stride": "tests/kernels/triton_tools/cases_launches.py -k several_rows",
    "triton_scale": "tests/kernels/triton_tools/cases_gradients.py -k 'scaled or upstream'",
}  # fmt: skip
