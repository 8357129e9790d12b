r"""Time and memory of a GRPO step without rollout: shared prompts, packed, padded, and in TRL.

    python -m benchmarks.trainers.step
    python -m benchmarks.trainers.step --device cuda --model-config qwen2.5-1.5b \
        --prompt 8192 --completion 512 --group 16

The model has random weights, and the prompt is random. Without options, the model is tiny and on a
CPU. A step computes the old logps, runs the forward and backward passes, and updates the weights
with AdamW. The provider "TRL" is TRL's fused head with the loss of `GRPOTrainer` in plain torch.

The loss, gradients and metrics of every provider are first compared with the results of the padded
provider, or of the last one if `padded` is not selected. In fp32, the tolerance is 1e-5 up to 4096
prompt tokens. It increases for longer prompts, because rounding errors accumulate. In bf16, the
tolerance starts at 5e-2, because the gradients of `shared` and of TRL differ by 2.6% and 2.7% from
the gradients in fp32 (24 layers of Qwen2.5-0.5B on a CPU). Every ratio is far from the clip bounds,
because a rounding error near a bound would change the whole gradient of a token. The results of a
single provider are not compared with anything. Such a run shows whether a long prompt fits into
memory.

All providers are timed in one process in interleaved rounds, on a CPU in fp32, and on a GPU in bf16
with gradient checkpointing. The reported memory is the peak during one step minus the memory in use
before the step. On a CPU, it is computed from the allocation events of torch.profiler, and on a GPU
from the statistics of torch's allocator. The command prints a table, and `--json` writes all
results to a file.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.linalg import vector_norm

from benchmarks import measure
from benchmarks.options import parsed, positive, save, trainer_parser
from benchmarks.report.tables import text_table
from benchmarks.trainers.step_providers import Ours, Padded, StepProblem, Trl, make_problem, step_of
from grpo_fast.train.config import LoraConfig, ModelConfig
from grpo_fast.train.plan import KNOWN_MODELS

TINY = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 1024,
    "tie_word_embeddings": True, "max_position_embeddings": 65536, "initializer_range": 0.05,
}  # fmt: skip
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}
# Default numbers of prompt tokens and of completion tokens.
SIZES = {"cpu": (2048, 64), "cuda": (4096, 256)}
BUDGET, ROUNDS = (120.0, 5.0), (5, 5)  # without --quick, with --quick
PROVIDERS: dict[str, Callable[[Any, StepProblem, Any], Any]] = {
    "shared": functools.partial(Ours, shared=True),
    "packed": functools.partial(Ours, shared=False),
    "padded": Padded,
    "TRL": Trl,
}


def main() -> None:
    print(table(run(parse_arguments())))


def parse_arguments() -> argparse.Namespace:
    parser = trainer_parser(__doc__)
    words = "default: tiny; on a GPU qwen2.5-0.5b"
    parser.add_argument("--model-config", choices=("tiny", *KNOWN_MODELS), help=words)
    count = positive(int)
    parser.add_argument("--layers", type=count, help="instead of the model's number of layers")
    words = "tokens (2048; on a GPU 4096; --quick: 512)"
    parser.add_argument("--prompt", type=count, help=words)
    words = "tokens, at most (64; on a GPU 256)"
    parser.add_argument("--completion", type=count, help=words)
    parser.add_argument("--group", type=count, default=8, help="completions")
    parser.add_argument(
        "--providers", nargs="+", default=["shared", "packed", "padded"], choices=tuple(PROVIDERS)
    )
    parser.add_argument("--lora", type=count, metavar="R", help="rank of LoRA adapters")
    options = parsed(parser, BUDGET, ROUNDS)
    gpu = options.device == "cuda"
    large = gpu and not options.quick
    options.model_config = options.model_config or ("qwen2.5-0.5b" if large else "tiny")
    prompt, completion = SIZES[options.device]
    options.prompt = options.prompt or (512 if options.quick else prompt)
    options.completion = options.completion or completion
    options.dtype = "bfloat16" if gpu else "float32"
    options.model = ModelConfig(
        path=options.model_config, dtype=options.dtype, device=options.device,
        gradient_checkpointing=gpu,
        lora=None if options.lora is None else LoraConfig(r=options.lora),
    )  # fmt: skip
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Verify and time all providers, measure their peak memory, and save and return the report."""
    model = build_model(options)
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, vocab, (1, options.prompt), generator=generator).tolist()
    problem = make_problem(prompts, options.group, options.completion, vocab)
    providers = {n: PROVIDERS[n](copy.deepcopy(model), problem, options) for n in options.providers}
    del model
    tolerance = TOLERANCE[options.dtype] * max(1.0, options.prompt / 4096)
    errors = verify(providers, problem, tolerance)
    steps = {name: step_of(provider) for name, provider in providers.items()}
    times = measure.interleaved(steps, options.device, options.budget, options.rounds)
    rows = {}
    for name, step in steps.items():
        # Measure the memory last, because the first step also allocates Adam's moments.
        peak = peak_bytes(step, options.device) / measure.MIB
        row = {"tokens": providers[name].tokens, "peak_mib": peak}
        rows[name] = {**row, **times[name], **errors[name]}
    settings = {k: v for k, v in vars(options).items() if k not in ("model", "json")}
    return save(
        options, "GRPO step without rollout", settings, prompt_tokens=[options.prompt],
        completion_tokens=problem.samples.lengths, providers=rows,
    )  # fmt: skip


def build_model(options: argparse.Namespace) -> Any:
    """Build a model with random weights on the chosen device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = getattr(torch, options.dtype)
    fields = dict(TINY if options.model_config == "tiny" else KNOWN_MODELS[options.model_config])
    fields["num_hidden_layers"] = options.layers or fields["num_hidden_layers"]
    config = AutoConfig.for_model(**fields, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def verify(
    providers: dict[str, Any], problem: StepProblem, tolerance: float
) -> dict[str, dict[str, float]]:
    """Compare the loss, gradients and metrics of every provider with those of a reference provider.

    The reference is "padded", or the last provider if "padded" was not selected. The error of the
    loss is divided by the mean absolute advantage. The error of the gradient is its relative L2
    error.

    Returns:
        The errors of the loss, the gradients and the metrics, for each provider.

    Raises:
        SystemExit: an error is larger than `tolerance`.
    """
    reference = "padded" if "padded" in providers else next(reversed(providers))
    old = [
        a + b.to(a.device) for a, b in zip(providers[reference].logps(), problem.noise, strict=True)
    ]
    outcomes, gradients = {}, {}
    for name, provider in providers.items():
        outcomes[name] = provider.gradients(old)
        found = {
            n: p.grad.float().flatten().cpu()
            for n, p in provider.model.named_parameters()
            if p.grad is not None
        }
        gradients[name] = torch.cat([found[n] for n in sorted(found)])
        provider.optimizer.zero_grad(set_to_none=True)
    scale = float(problem.samples.advantages.abs().mean())
    errors = {}
    metrics = outcomes[reference]
    exact, norm = gradients[reference], functools.partial(vector_norm, dtype=torch.float64)
    for name, outcome in outcomes.items():
        common = {k: v for k, v in outcome.items() if k in metrics and k != "skipped_rows"}
        off = [abs(value - metrics[k]) / max(1.0, abs(value)) for k, value in common.items()]
        errors[name] = {
            "error_loss": abs(outcome["loss"] - metrics["loss"]) / scale,
            "error_gradient": float(norm(gradients[name] - exact) / norm(exact)),
            "error_metrics": max(off, default=0.0),
        }
        if not all(error <= tolerance for error in errors[name].values()):  # also refuses NaN
            where = f"{name} differs from {reference}"
            raise SystemExit(f"{where} by {errors[name]} (tolerance {tolerance})")
    return errors


def peak_bytes(step: Any, device: str) -> int:
    """Return the peak memory during a warm step minus the memory before the step, in bytes."""
    if device == "cuda":
        return int(measure.peak_memory(step, device) * measure.MIB)
    return measure.allocated_peak(step)


def table(report: dict[str, Any]) -> str:
    """Return the results as text, with time and memory relative to the first provider."""
    rows, settings = report["providers"], report["settings"]
    first = next(iter(rows))
    lines = []
    for name, row in rows.items():
        numbers = [f"{row[key]:.0f}" for key in ("tokens", "median_ms", "spread_ms", "peak_mib")]
        ratios = [f"{row[key] / rows[first][key]:.2f}×" for key in ("median_ms", "peak_mib")]
        errors = [f"{row[f'error_{what}']:.1e}" for what in ("loss", "gradient", "metrics")]
        lines.append([name, *numbers, *ratios, " ".join(errors)])
    title = (
        f"GRPO step without rollout · prompts {report['prompt_tokens']} tokens · completions up to "
        f"{max(report['completion_tokens'])} · G = {settings['group']} · {settings['dtype']}"
    )
    columns = "", "tokens", "ms", "±", "peak MiB", f"time ÷ {first}", f"memory ÷ {first}"
    return text_table(title, [*columns, "errors: loss, gradient, metrics"], lines)


if __name__ == "__main__":
    main()
