"""Rollouts: tokens per second of our generate (sampler logps included) against transformers' own sampling.

    python benchmarks/bench_rollout.py [--quick] [--batch 16] [--new-tokens 32] [--vocab 151936] [--json FILE]

A random model of 4 layers under a real vocabulary, so that what is measured is the loop and the sampler rather than one
model's matrix products. The limit is the same loop in greedy mode: it draws no token and keeps no log-probability.
Before a candidate is timed its log-probabilities are compared with a fresh forward pass over prompt and completion.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  (the path above makes the script runnable without installation)
from torch import Tensor  # noqa: E402

from benchmarks import measure  # noqa: E402
from benchmarks.providers import Step, versions  # noqa: E402
from benchmarks.runner import write  # noqa: E402

SYMBOLS = [str(digit) for digit in range(10)]
PROMPT = " ".join(SYMBOLS)
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}  # nats: another batch shape, another order of sums


def build(vocab: int, device: str) -> Any:
    """A `Policy` around a random Llama of 4 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpo_fast.data.tokenizer import build_symbol_tokenizer
    from grpo_fast.train.policy import Policy

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.06,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    return Policy(model.to(torch.bfloat16) if device == "cuda" else model, build_symbol_tokenizer(SYMBOLS))


def candidates(policy: Any, batch: int, new_tokens: int) -> dict[str, tuple[str, Callable[[], list]]]:
    """name -> (role, call); a call returns (prompt ids, completion ids, logps or None) of every row."""
    from grpo_fast.rollout import Sampling, generate

    options = Sampling(max_new_tokens=new_tokens)
    ids = torch.tensor([policy.tokenizer(PROMPT)["input_ids"]] * batch, device=policy.device)
    length = ids.shape[1]

    def ours() -> list:
        found = generate(policy, [PROMPT], options, group_size=batch, seed=0)
        return list(zip(found.prompt_ids, found.completion_ids, found.sampling_logps, strict=True))

    def library(logps: bool, **arguments: Any) -> Callable[[], list]:
        def call() -> list:
            with policy.generation():
                output = policy.lm.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
                    pad_token_id=policy.pad_id, eos_token_id=None, return_dict_in_generate=True, output_logits=logps,
                    **arguments,
                )  # fmt: skip
            tokens = output.sequences[:, length:]
            values: Any = [None] * batch
            if logps:
                logits = torch.stack(output.logits, 1).float()
                values = logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)
            return list(zip(ids.tolist(), tokens.tolist(), values, strict=True))

        return call

    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    return {
        "greedy loop": ("limit", library(False, do_sample=False)),
        "grpo_fast": ("ours", ours),
        "transformers": ("peer", library(False, **sampling)),
        "transformers, with logps": ("peer", library(True, **sampling)),
    }


@torch.no_grad()
def error_of(policy: Any, rows: list) -> float | None:
    """Largest difference (nats) between the logps a rollout gave and those of a fresh pass; None: it gave none."""
    worst = 0.0
    for prompt, completion, logps in rows:
        if logps is None:
            return None
        with policy.generation():
            logits = policy.lm(torch.tensor([prompt + completion], device=policy.device)).logits[0].double()
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(
            -1, torch.tensor(completion)[:, None].to(logits.device)
        )
        worst = max(worst, float((torch.as_tensor(logps).cpu() - expected[:, 0].cpu()).abs().max()))
    return worst


def measure_all(policy: Any, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """A row for every candidate: verified, then timed in interleaved rounds."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name, (role, call) in candidates(policy, options.batch, options.new_tokens).items():
        error = error_of(policy, call())
        rows[name] = {"role": role, "status": "ok", "errors": {} if error is None else {"logps": error}}
        if error is not None and not error <= TOLERANCE[policy.head.weight.dtype]:
            rows[name] |= {"status": "wrong", "reason": f"logps off by {error:.1e} nats: not timed"}
            continue
        steps[name] = Step(as_step(call))
    for name, samples in measure.interleaved(steps, options.device, options.budget, options.rounds).items():
        rows[name] |= measure.spread(samples) | {"samples_ms": [round(s * 1e3, 3) for s in samples]}
    limit = rows["greedy loop"]["median_ms"]
    for row in rows.values():
        if "median_ms" in row:
            row["tokens_per_s"] = options.batch * options.new_tokens / row["median_ms"] * 1e3
            row["ratio_to_limit"], row["fraction_of_limit"] = row["median_ms"] / limit, limit / row["median_ms"]
    return rows


def as_step(call: Callable[[], list]) -> Callable[[], dict[str, Tensor]]:
    def run() -> dict[str, Tensor]:
        call()
        return {}

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a batch of 8, 8 new tokens")
    parser.add_argument("--batch", type=int, help="completions side by side (default 16)")
    parser.add_argument("--new-tokens", type=int, help="tokens of each (default 32)")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of timing for each candidate")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="where the JSON goes")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    options.batch = options.batch or (8 if options.quick else 16)
    options.new_tokens = options.new_tokens or (8 if options.quick else 32)
    options.budget = 1.0 if options.quick else options.budget
    torch.set_num_threads(options.threads)
    policy = build(options.vocab, options.device)
    rows = measure_all(policy, options)
    case = {
        "operation": "rollout", "allocator": "cuda" if options.device == "cuda" else "default",
        "batch": options.batch, "new_tokens": options.new_tokens, "vocab": options.vocab,
        "dtype": str(policy.head.weight.dtype).removeprefix("torch."), "threads": options.threads, "rows": rows,
    }  # fmt: skip
    created = datetime.datetime.now(datetime.UTC)
    report = {
        "benchmark": "rollout", "created": created.isoformat(timespec="seconds"), "commit": measure.commit(),
        "hardware": measure.hardware(options.device), "versions": {"python": platform.python_version(), **versions()},
        "cases": [case],
    }  # fmt: skip
    print(table(case))
    quick = "quick-" if options.quick else ""
    path = Path(
        options.json or ROOT / "benchmarks" / "results" / f"{quick}rollout-{options.device}-{created:%Y%m%d}.json"
    )
    write(path, report)
    print(f"written: {os.path.relpath(path)}")
    return 0


def table(case: dict[str, Any]) -> str:
    lines = [
        f"\nrollout: {case['batch']} completions of {case['new_tokens']} tokens, V={case['vocab']}, {case['dtype']}",
        f"{'':28}{'ms':>10}{'±':>8}{'tokens/s':>10}{'× greedy':>10}{'error':>9}",
    ]
    for name, row in case["rows"].items():
        error = f"{row['errors']['logps']:.0e}" if row["errors"] else ""
        if "median_ms" not in row:
            lines.append(f"{name:28}  {row['status']}: {row['reason']}")
            continue
        lines.append(
            f"{name:28}{row['median_ms']:>10.1f}{row['spread_ms']:>8.1f}{row['tokens_per_s']:>10.0f}"
            f"{row['ratio_to_limit']:>10.2f}{error:>9}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
