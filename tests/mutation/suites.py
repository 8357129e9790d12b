"""Tests that must detect the planted bugs, as named suites.

The suites are quick, because they run once for every bug.
"""

# Arguments of pytest, relative to tests/. The first word of a name is the backend: csrc (C++
# kernels) or triton (Triton's interpreter). All other suites run the torch implementation.
SUITES = {
    "sweeps": "loss/test_loss_parity.py -k sweeps",
    "whole_entropy": "loss/test_support.py -k whole_vocabulary",
    "grad_filter": "kernels/test_grad_filter.py -k 'masses or one_chunk or chunk'",
    "graphs": "gpu/test_cuda_graphs.py",
    "chunks": "loss/test_chunks.py",
    "kept": "loss/test_kept_logits.py",
    "entropy_gradient": "loss/test_loss_extras.py -k logps_functions",
    "range": "loss/test_gradient_range.py",
    "shards": "loss/test_vocabulary_shards.py -k '2- or chunks'",
    "support": "loss/test_support.py -k 'not every_loss and not threads'",
    "csrc_support": "kernels/test_support_kernels.py",
    "csrc_shards": "loss/test_vocabulary_shards.py -k '2- and cpu'",
    "csrc_attention": "attention/test_attention_csrc.py",
    "csrc_decode": "kernels/test_decode_cpu.py",
    "csrc_decoder": "rollout/test_decoder.py",
    "divergence": "loss/test_divergence.py",
    "csrc_divergence": "loss/test_divergence.py -k cpu",
    "divergence_term": "loss/test_divergence_term.py",
    "csrc": "kernels/test_rows.py",
    "csrc_gemm": "kernels/test_gemm_cpu.py",
    "csrc_layers": "kernels/test_layers_cpu.py kernels/test_modules_cpu.py",
    "csrc_linear": "kernels/test_head.py",
    "csrc_nan": "loss/test_nan_is_seen.py -k cpu",
    "triton_nan": "loss/test_nan_is_seen.py -k 'triton and every_loss and (grpo or dro)'",
    "triton_inert": "kernels/test_rows.py -k inert",
    "devices": "kernels/test_gpu_device.py -k 'not cut_off'",
    "triton_range": "kernels/triton_tools/cases_range.py -k transposed",
    "csrc_sums": "loss/test_chunks.py kernels/test_grad_filter.py loss/test_contract_accuracy.py -k fused",
    "triton_rows": "kernels/test_rows.py -k 'test_numerics and (-127- or -2051- or -5000- or offsets)'",
    "triton_kl": "kernels/test_rows.py -k every_kl",
    "triton_leaf": "kernels/test_rows.py -k every_leaf",
    "triton_linear": "kernels/triton_tools/cases_tiles.py kernels/test_head.py -k 'triton_tools or triton and (infinity or values)'",
    "triton_gradients": "kernels/triton_tools/cases_gradients.py",
    "triton_weights": "kernels/triton_tools/cases_launches.py kernels/test_head.py -k 'triton_tools or triton and (far_below or bad_row or values)'",
    "triton_support": "kernels/test_support_kernels.py -k 'triton and not 1030'",
    "triton_support_public": "loss/test_support.py -k 'triton and (every_loss and grpo or one_hidden or logps_entropies or extras or no_row_has)'",
    "triton_scale": "kernels/triton_tools/cases_scale.py",
    # Suites for bugs that `--library` generates.
    "python_objective": "objective loss/test_loss_parity.py",
    "python_loss": "loss/test_loss_parity.py loss/test_loss_traps.py loss/test_refusals.py loss/test_layout.py loss/test_loss_extras.py loss/test_splits.py loss/test_loss_autograd.py",
    "python_attention": "attention",
}  # fmt: skip
