"""Bugs that only a GPU would show: another device than the current one, places beyond 32 bits."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

WORKSPACE, CAPTURE, CONFIGS, EXPONENTIALS, GRADIENTS, SUPPORT, PRODUCTS, RANGE = (
    f"grpo_fast/kernels/{x}.py"
    for x in (
        "workspace",
        "gpu/capture",
        "gpu/configs",
        "gpu/exponentials",
        "gpu/gradients",
        "gpu/support",
        "head/products",
        "head/half_range",
    )
)


def beyond(name: str, path: str, old: str, new: str, why: str) -> Mutant:
    return Mutant(f"beyond-{name}", path, old, new, why, "triton_range")


MUTANTS = [
    Mutant("device-event", WORKSPACE,
           "arrived.record(torch.cuda.current_stream(x.device))", "arrived.record()",
           "a copy to the host is waited for on another GPU's stream", "devices"),
    Mutant("device-recorded", CAPTURE,
           "with torch.cuda.device_of(x):", "with torch.cuda.device(0):",
           "the current GPU is asked whether another one's work is recorded", "devices"),
    Mutant("device-architecture", CONFIGS,
           "with torch.cuda.device(index):", "with torch.cuda.device(-1):",
           "a GPU gets the blocks of the current one's architecture", "devices"),
    Mutant("device-share", WORKSPACE,
           "default = max(1024, ", "default = max(0, ",
           "a small GPU gets a workspace of nothing", "devices"),
    Mutant("device-planned", WORKSPACE,
           "(gpu_bytes(device) if memory is None else memory)", "gpu_bytes(device)",
           "a plan for a GPU counts with the memory of the one that is here", "plan"),
    Mutant("device-product", PRODUCTS,
           "return torch.mm(d.to(weight.dtype), weight, out_dtype=torch.float32)",
           "return torch.mm(d.to(weight.dtype), weight)",
           "a GPU rounds the parts of a sum over the vocabulary", "devices"),
    Mutant("device-powers", RANGE,
           "(exponent + 127) << 23", "(exponent + 126) << 23",
           "powers of two are halves", "devices"),
    beyond("logit", EXPONENTIALS,
           "offs_h.to(tl.int64) * stride_weight_h", "offs_h * stride_weight_h",
           "the logit of a target of a large transposed head is read elsewhere"),
    beyond("target", GRADIENTS,
           "cols.to(tl.int64) * stride_weight_h", "cols * stride_weight_h",
           "dH takes the target's row of a large transposed head from elsewhere"),
    beyond("hidden", SUPPORT,
           "cols.to(tl.int64) * stride, mask", "cols * stride, mask",
           "a row of hidden with far columns is read elsewhere"),
    beyond("support", SUPPORT,
           "(cols.to(tl.int64) * stride)[None, :]", "(cols * stride)[None, :]",
           "rows of a support of a large transposed head are read elsewhere"),
    Mutant("continuous-page", "grpo_fast/rollout/own/continuous.py",
           'page = "page_size" if "page_size" in known else "block_size"', 'page = "page_size"',
           "transformers 5.17 is asked in words that it does not know", "continuous"),
    Mutant("continuous-flash", "grpo_fast/rollout/own/continuous.py",
           'keeps = "auto_switch_to_flash" in config_fields() or "flash" in attention',
           "keeps = True",
           "transformers 5.17 takes another attention than the one that was chosen", "continuous"),
]  # fmt: skip
