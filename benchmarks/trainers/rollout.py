"""Tokens per second of our `generate`, compared with the `generate` of transformers.

    python -m benchmarks.trainers.rollout [--quick] [--batch 16] [--new-tokens 32]
    [--json FILE]

Our `generate` also returns the logps of the sampler. The model has random weights, a realistic
vocabulary and only 4 layers, so that the decoding loop and the sampler take most of the time. All
times are compared with the greedy mode of transformers' `generate`, which does not sample and
stores no logps. The logps of each candidate are first compared with those of a new forward pass
over prompt and completion.
"""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import measure
from benchmarks.options import positive
from benchmarks.report.tables import text_table
from benchmarks.trainers.options import Defaults, new_parser, parsed, save

VOCABULARY = 151936
SYMBOLS = [str(digit) for digit in range(10)]
PROMPT = " ".join(SYMBOLS)
# Maximum error of a logp in nats. The new forward pass has a different batch size. This changes the
# order of additions, and therefore the rounding.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15}


def build(vocab: int, device: str) -> Any:
    """Return a `Policy` with a Llama model of 4 layers and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpo_fast.data.tokenizer import build_symbol_tokenizer
    from grpo_fast.train.models.policy import Policy

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=1,
        pad_token_id=0, initializer_range=0.06,
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return Policy(LlamaForCausalLM(config).to(device, dtype), build_symbol_tokenizer(SYMBOLS))


def our_rollout(policy: Any, texts: list[str], group: int, new_tokens: int) -> Callable[[], list]:
    """Return a function that samples `group` completions of each prompt with our `generate`.

    The function returns a list with (prompt ids, completion ids, logps) for each completion.
    """
    from grpo_fast.rollout import Sampling, generate

    options = Sampling(max_new_tokens=new_tokens)

    def rollout() -> list:
        found = generate(policy, texts, options, group_size=group, seed=0)
        return list(zip(found.prompt_ids, found.completion_ids, found.sampling_logps, strict=True))

    return rollout


def library_rollout(
    policy: Any, texts: list[str], group: int, new_tokens: int, logps: bool = False,
    **arguments: Any,
) -> Callable[[], list]:  # fmt: skip
    """Return a function like that of `our_rollout`, for the `generate` of transformers.

    The returned function gives None in place of the logps, unless `logps` is True. `arguments` are
    passed to transformers' `generate`.
    """
    repeated = [text for text in texts for _ in range(group)]
    encoded = policy.tokenizer(repeated, padding=True, return_tensors="pt")
    inputs = {name: encoded[name].to(policy.device) for name in ("input_ids", "attention_mask")}
    ids = inputs["input_ids"]

    def rollout() -> list:
        with policy.generation():
            output = policy.lm.generate(
                **inputs, max_new_tokens=new_tokens, pad_token_id=policy.pad_id,
                return_dict_in_generate=True, output_logits=logps, **arguments,
            )  # fmt: skip
        tokens = output.sequences[:, ids.shape[1] :]
        values: Any = [None] * len(ids)
        if logps:
            logits = torch.stack(output.logits, 1).float()
            values = logits.gather(-1, tokens[..., None])[..., 0] - logits.logsumexp(-1)
        return list(zip(ids.tolist(), tokens.tolist(), values, strict=True))

    return rollout


def candidates(
    policy: Any, batch: int, new_tokens: int
) -> dict[str, tuple[str, Callable[[], list]]]:
    """Return a dict from the name of each candidate to its role and its rollout function."""
    sizes = policy, [PROMPT], batch, new_tokens

    def library(**options: Any) -> Callable[[], list]:
        return library_rollout(*sizes, eos_token_id=None, **options)

    sampling: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0}
    return {
        "greedy loop": ("limit", library(do_sample=False)),
        "grpo_fast": ("ours", our_rollout(*sizes)),
        "transformers": ("peer", library(**sampling)),
        "transformers, with logps": ("peer", library(logps=True, **sampling)),
    }


@torch.no_grad()
def error_of(policy: Any, rows: list) -> float | None:
    """Compare the logps of a rollout with those of a new forward pass.

    Returns:
        The largest absolute difference in nats, or None if the rollout has no logps.
    """
    worst = torch.zeros(())
    for prompt, completion, logps in rows:
        if logps is None:
            return None
        with policy.generation():
            ids = torch.tensor([prompt + completion], device=policy.device)
            logits = policy.lm(ids).logits[0].double()
        targets = torch.tensor(completion)[:, None].to(logits.device)
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, targets)
        difference = torch.as_tensor(logps).cpu() - expected[:, 0].cpu()
        worst = torch.maximum(worst, difference.abs().max())  # keeps NaN
    return float(worst)


def measure_all(policy: Any, options: Namespace) -> dict[str, dict[str, Any]]:
    """Verify all candidates, time those whose logps are correct, and return all results by name."""
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], Any]] = {}
    for name, (role, call) in candidates(policy, options.batch, options.new_tokens).items():
        error = error_of(policy, call())
        errors = {} if error is None else {"logps": error}
        rows[name] = {"role": role, "status": "ok", "errors": errors}
        if error is not None and not error <= TOLERANCE[policy.head.weight.dtype]:
            rows[name] |= {"status": "wrong", "reason": f"logps off by {error:.1e} nats: not timed"}
            continue
        steps[name] = call
    times = measure.interleaved(steps, options.device, options.budget, options.rounds)
    for name, found in times.items():
        rows[name] |= found
        rows[name]["tokens_per_s"] = options.batch * options.new_tokens / found["median_ms"] * 1e3
        rows[name]["ratio_to_limit"] = found["median_ms"] / times["greedy loop"]["median_ms"]
    return rows


def main() -> None:
    parser = new_parser(__doc__)
    words = "completions side by side (16; --quick: 8)"
    parser.add_argument("--batch", type=positive(int), help=words)
    parser.add_argument("--new-tokens", type=positive(int), help="tokens of each (32; --quick: 8)")
    defaults = Defaults(threads=os.cpu_count() or 1, budget=(8.0, 1.0), rounds=(9, 9))
    options = parsed(parser, defaults)
    warnings.filterwarnings("ignore")
    options.batch = options.batch or (8 if options.quick else 16)
    options.new_tokens = options.new_tokens or (8 if options.quick else 32)
    policy = build(VOCABULARY, options.device)
    case = {
        "dtype": str(policy.head.weight.dtype).removeprefix("torch."),
        "vocab": VOCABULARY,
        **{name: getattr(options, name) for name in ("batch", "new_tokens", "threads")},
        "rows": measure_all(policy, options),
    }
    case |= {"wrong": True} if case["rows"]["grpo_fast"]["status"] == "wrong" else {}
    print(table(case))
    save(options, "rollout", {}, cases=[case])


def table(case: dict[str, Any]) -> str:
    sizes = f"{case['batch']} completions of {case['new_tokens']} tokens, V={case['vocab']}"
    rows = []
    for name, row in case["rows"].items():
        error = f"{row['errors']['logps']:.0e}" if row["errors"] else ""
        if "median_ms" in row:
            times = [f"{row[key]:.1f}" for key in ("median_ms", "spread_ms")]
            speed = [f"{row['tokens_per_s']:.0f}", f"{row['ratio_to_limit']:.2f}"]
            rows.append([name, *times, *speed, error])
        else:
            rows.append([name, "", "", "", "", f"{row['status']}: {row['reason']}"])
    columns = "", "ms", "±", "tokens/s", "× greedy", "error"
    return text_table(f"rollout: {sizes}, {case['dtype']}", columns, rows)


if __name__ == "__main__":
    main()
