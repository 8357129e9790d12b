"""One GRPO step without its rollout: shared prompts against packed, padded and TRL's step.

    python -m benchmarks.trainers.step      CPU: a tiny model, k-shot GSM8K prompts
    python -m benchmarks.trainers.step --device cuda --model-config qwen2.5-1.5b \
        --prompt 8192 --completion 512 --group 16
    python -m benchmarks.trainers.step --model runs/capitals-data/model --clock process \
        --threads 1 --group 4 --completion 32 --providers shared packed TRL --padded-rows 1

A step is old logps, forward, backward, AdamW. Every provider's loss, gradients and metrics are
verified first (fp32: 1e-5 relative to the padded ones); then all are timed in one process, in
interleaved rounds. Memory is the peak of one step beyond what was there before it: on the CPU by
the allocator's own events (torch.profiler), on a GPU by the caching allocator. Prints a table;
--json writes everything to a file.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import ROOT, measure
from benchmarks.trainers.options import Defaults, add_clock, new_parser, parsed, save, set_clock
from benchmarks.trainers.step_providers import (
    PROVIDERS,
    StepProblem,
    make_problem,
    prepare,
    step_of,
)
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.planning.plan import KNOWN_MODELS

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
TINY = {
    "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 1024,
    "tie_word_embeddings": True, "max_position_embeddings": 65536, "initializer_range": 0.05,
}  # fmt: skip
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2}
DEFAULTS = Defaults(threads=2, budget=(120.0, 5.0), rounds=(5, 5))


def main() -> None:
    options = parse_arguments()
    report = run(options)
    print(table(report))
    save(options, report)


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--model-config", default="tiny", choices=("tiny", *KNOWN_MODELS))
    parser.add_argument("--model", dest="pretrained", metavar="PATH", help="a pretrained model")
    add_clock(parser)
    parser.add_argument("--layers", type=int, help="instead of the model's own number of layers")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), help="float32, on a GPU bfloat16")
    parser.add_argument("--prompt", type=int, help="tokens (2048, --quick: 512; CPU: at least)")
    parser.add_argument("--completion", type=int, default=64, help="tokens, at most")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument(
        "--providers", nargs="+", default=["shared", "packed", "padded"], choices=tuple(PROVIDERS)
    )
    parser.add_argument(
        "--checkpointing", action=argparse.BooleanOptionalAction, help="default: on a GPU only"
    )
    parser.add_argument("--tiled-mlp", type=int)
    parser.add_argument("--lora", type=int, metavar="R")
    parser.add_argument("--tokens-per-microbatch", type=int, default=1 << 40)
    parser.add_argument("--padded-rows", type=int, help="of padded and TRL; default: all at once")
    parser.add_argument("--data", default=str(GSM8K), help="folder of GSM8K (else random prompts)")
    options = parsed(parser, DEFAULTS)
    set_clock(parser, options)
    gpu = options.device == "cuda"
    options.prompt = options.prompt or (512 if options.quick else 2048)
    options.dtype = options.dtype or ("bfloat16" if gpu else "float32")
    options.checkpointing = gpu if options.checkpointing is None else options.checkpointing
    options.model = ModelConfig(
        path=options.model_config, dtype=options.dtype, device=options.device,
        tiled_mlp=options.tiled_mlp, gradient_checkpointing=options.checkpointing,
        lora=None if options.lora is None else {"r": options.lora},
    )  # fmt: skip
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Verify, weigh and time every provider."""
    model = build_model(options)
    problem = make_problem(
        build_prompts(options, model.config.vocab_size),
        options.group,
        options.completion,
        model.config.vocab_size,
    )
    providers = {name: prepare(name, model, problem, options) for name in options.providers}
    del model
    rows: dict[str, dict[str, Any]] = {
        name: {"tokens": provider.tokens} for name, provider in providers.items()
    }
    for name, errors in verify(providers, problem, TOLERANCE[options.dtype]).items():
        rows[name] |= errors
    steps: dict[str, Any] = {name: step_of(provider) for name, provider in providers.items()}
    for name, samples in measure.interleaved(
        steps, options.device, options.budget, options.rounds
    ).items():
        rows[name] |= measure.spread(samples)
    for name, step in steps.items():  # afterwards: the first step allocates Adam's moments
        rows[name]["peak_mib"] = peak_bytes(step, options.device) / measure.MIB
    table = problem.samples
    return {
        **measure.header("GRPO step without rollout", options.device),
        "settings": {
            key: value
            for key, value in vars(options).items()
            if key not in ("model", "data", "json")
        },
        "prompt_tokens": sorted({len(p) for p in table.prompt_ids}),
        "completion_tokens": table.lengths,
        "providers": rows,
    }


def build_model(options: argparse.Namespace) -> Any:
    """Return the pretrained model, or one with random weights, on its device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = getattr(torch, options.dtype)
    if options.pretrained:
        model = AutoModelForCausalLM.from_pretrained(options.pretrained, dtype=dtype)
        return model.to(options.device)
    fields = dict(TINY if options.model_config == "tiny" else KNOWN_MODELS[options.model_config])
    if options.layers:
        fields["num_hidden_layers"] = options.layers
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = AutoConfig.for_model(**fields, **special)
    torch.manual_seed(0)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def build_prompts(options: argparse.Namespace, vocab: int) -> list[list[int]]:
    """Return k-shot GSM8K prompts of at least `--prompt` tokens; random ids without the data."""
    if (options.device == "cpu" or options.pretrained) and Path(options.data).is_dir():
        encode = encoder(options, vocab)
        texts = k_shot_texts(options.data, options.prompt, lambda text: len(encode(text)))
        return list(itertools.islice(map(encode, texts), options.prompts))
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, vocab, (options.prompts, options.prompt), generator=generator).tolist()


def encoder(options: argparse.Namespace, vocab: int) -> Callable[[str], list[int]]:
    """Return a function from text to token ids: the pretrained model's, or that of a small BPE."""
    from transformers import AutoTokenizer

    from grpo_fast.data import load_examples
    from grpo_fast.data.tokenizer import build_bpe_tokenizer

    if options.pretrained:
        tokenizer = AutoTokenizer.from_pretrained(options.pretrained)
    else:
        data = SimpleNamespace(task="gsm8k", path=options.data, prompt_template="plain")
        plain = load_examples(data, split="train", seed=0)[:1000]
        tokenizer = build_bpe_tokenizer([f"{e.prompt} {e.solution}" for e in plain], vocab)
    return lambda text: tokenizer(text)["input_ids"]


def k_shot_texts(folder: str, tokens: int, count: Callable[[str], int]) -> Iterator[str]:
    """Yield GSM8K questions after worked examples, each of at least so many tokens.

    With 0 tokens there are no examples.
    """
    from grpo_fast.data import load_examples

    data = SimpleNamespace(task="gsm8k", path=folder, prompt_template="plain")
    if tokens:
        data.shots_tokens = tokens
    # The shots leave part of the budget free and the question comes on top: take those that end
    # above it.
    texts = (str(e.prompt) for e in load_examples(data, split="train", seed=0, count_tokens=count))
    return (text for text in texts if count(text) >= tokens)


def verify(
    providers: dict[str, Any], problem: StepProblem, tolerance: float
) -> dict[str, dict[str, float]]:
    """Loss, gradients and metrics of every provider against padded's (without it, the last one's).

    Raises SystemExit where they differ by more than `tolerance`, relative to the gradient's norm
    and the mean |loss|.
    """
    reference = "padded" if "padded" in providers else next(reversed(providers))
    old = [
        a + b.to(a.device) for a, b in zip(providers[reference].logps(), problem.noise, strict=True)
    ]
    outcomes, gradients = {}, {}
    for name in sorted(providers, key=lambda name: name != reference):
        outcomes[name] = providers[name].gradients(old)
        found = {
            n.removeprefix("base_model.model."): p.grad
            for n, p in providers[name].model.named_parameters()
        }
        gradients[name] = {n: g.float().cpu() for n, g in found.items() if g is not None}
        providers[name].optimizer.zero_grad(set_to_none=True)
    scale = float(problem.samples.advantages.abs().mean())
    errors = {}
    exact, metrics = gradients[reference], outcomes[reference].metrics
    for name, outcome in outcomes.items():
        assert gradients[name].keys() == exact.keys(), name
        difference = sum(
            float((gradients[name][n] - exact[n]).double().square().sum()) for n in exact
        )
        norm = sum(float(exact[n].double().square().sum()) for n in exact)
        common = {k: v for k, v in outcome.metrics.items() if k in metrics and k != "skipped_rows"}
        off = [abs(value - metrics[k]) / max(1.0, abs(value)) for k, value in common.items()]
        errors[name] = {
            "error_loss": abs(outcome.loss - outcomes[reference].loss) / scale,
            "error_gradient": (difference / norm) ** 0.5,
            "error_metrics": max(off, default=0.0),
        }
        if not max(errors[name].values()) <= tolerance:
            where = f"{name} differs from {reference}"
            raise SystemExit(f"{where} by {errors[name]} (tolerance {tolerance})")
    return errors


def peak_bytes(step: Any, device: str) -> int:
    """Return the most memory that a warm step allocates beyond what was there before it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def table(report: dict[str, Any]) -> str:
    """The figures as text, with the ratios to the first provider."""
    rows, settings = report["providers"], report["settings"]
    first = next(iter(rows))
    longest = max(report["completion_tokens"])
    lines = [
        f"GRPO step without rollout · prompts {report['prompt_tokens']} tokens · completions up to "
        f"{longest} · G = {settings['group']} · {settings['dtype']}",
        f"{'':8}{'tokens':>10}{'ms':>10}{'±':>8}{'peak MiB':>10}   "
        f"time and memory in units of {first}; errors: loss, gradient, metrics",
    ]
    for name, row in rows.items():
        time, memory = (row[key] / rows[first][key] for key in ("median_ms", "peak_mib"))
        errors = [f"{row[f'error_{what}']:.1e}" for what in ("loss", "gradient", "metrics")]
        lines.append(
            f"{name:8}{row['tokens']:>10}{row['median_ms']:>10.0f}{row['spread_ms']:>8.0f}"
            f"{row['peak_mib']:>10.0f}   {time:.2f}×  {memory:.2f}×   {' '.join(errors)}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
