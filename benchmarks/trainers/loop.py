"""Full GRPO step with rollout: our trainer, TRL's, and FastGRPOTrainer inside TRL.

    python -m benchmarks.trainers.loop [--quick] [--shapes short 12-shot] [--json results.json]

All trainers have the same model (gsm8k-tiny's, V = 1024), prompts, lengths, reward, loss and
optimizer. No token of the vocabulary ends a completion, so every completion has `max_new_tokens`
tokens. A step samples, scores, computes the gradient and updates, without logging. The rollouts are
also timed alone: ours with the sampler's logps, transformers' `generate` with its defaults and
without logps. Our logps are verified first, against a new pass over prompt and completion, within
1e-3 nats. Everything runs in turns in one process.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from benchmarks.trainers.options import Defaults, new_parser, parsed, save
from benchmarks.trainers.rollout import error_of

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 1024
EOS = 1024  # the EOS has no row in the head
TOLERANCE = 1e-3
DEFAULTS = Defaults(threads=2, budget=(60.0, 5.0), rounds=(7, 3))


class Shape(NamedTuple):
    """Sizes of a step.

    Attributes:
        prompts: number of prompts.
        tokens: approximate tokens of a prompt.
        group: completions of each prompt.
        length: tokens of a completion.
    """

    prompts: int
    tokens: int
    group: int
    length: int


SHAPES = {"short": Shape(8, 60, 8, 120), "12-shot": Shape(2, 2900, 8, 64)}
QUICK = {"short": Shape(2, 12, 4, 8), "12-shot": Shape(2, 100, 4, 8)}


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the fraction of different words."""
    return [len(set(text.split())) / max(1, len(text.split())) for text in completions]


def main() -> None:
    options = parse_arguments()
    logging.disable(logging.WARNING)
    shapes = QUICK if options.quick else SHAPES
    cases = [measure_shape(options, name, shapes[name]) for name in options.shapes]
    report = {
        **measure.header("whole GRPO step, rollout included", options.device),
        "threads": options.threads,
        "clock": options.clock,
        "load": os.getloadavg(),
        "cases": cases,
    }
    save(options, report)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--clock", choices=list(measure.CLOCKS), default="wall")
    options = parsed(parser, DEFAULTS, arguments)
    if options.clock == "process" and options.threads != 1:
        parser.error(f"--clock process: expected --threads 1, got {options.threads}")
    measure.clock = options.clock
    return options


def measure_shape(options: argparse.Namespace, name: str, shape: Shape) -> dict[str, Any]:
    """Verify our rollouts, then time steps and rollouts in turns."""
    tokenizer = vocabulary()
    texts = prompts_of(shape)
    model = build_model(options.device)
    policy = policy_of(copy.deepcopy(model), tokenizer)
    rollouts = rollout_steps(policy, texts, shape)
    error = error_of(policy, rollouts["grpo_fast"]())
    if error is None or not error <= TOLERANCE:
        raise SystemExit(f"{name}: sampler logps off by {error} nats; a wrong one is not timed")
    steps = trl_steps(model, tokenizer, texts, shape, options.device)
    steps = {"grpo_fast": our_step(policy, texts, shape), **steps}
    for step in steps.values():
        step()
    rounds = (options.device, options.budget, options.rounds)
    step_times = measure.interleaved(steps, *rounds)
    times = {"step": step_times, "rollout": measure.interleaved(rollouts, *rounds)}
    case: dict[str, Any] = {"shape": name, **shape._asdict(), "error_logps": error}
    for what, peer in (("step", "TRL"), ("rollout", "transformers")):
        rows = {who: measure.spread(samples) for who, samples in times[what].items()}
        for row in rows.values():
            row["speedup"] = rows[peer]["median_ms"] / row["median_ms"]
        case[what] = rows
    print(table(case))
    return case


def build_model(device: str) -> Any:
    """Return the model of the recipe gsm8k-tiny, with positions for long prompts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=4096,
        initializer_range=0.05, tie_word_embeddings=True, bos_token_id=None, eos_token_id=EOS,
        pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


def vocabulary() -> Any:
    """Return a tokenizer with one word for each token, and with an EOS that has no row in the
    model.
    """
    from grpo_fast.data.tokenizer import build_symbol_tokenizer

    words = [f"w{i}" for i in range(2, EOS + 1)]
    tokenizer = build_symbol_tokenizer(words)
    tokenizer.eos_token = words[-1]
    return tokenizer


def prompts_of(shape: Shape) -> list[str]:
    """Return prompts of random words, whose lengths differ a little."""
    generator = torch.Generator().manual_seed(1)
    lengths = [shape.tokens - i * shape.tokens // 50 for i in range(shape.prompts)]
    rows = [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [" ".join(f"w{token}" for token in row) for row in rows]


def policy_of(model: Any, tokenizer: Any) -> Any:
    from grpo_fast.train.models.policy import Policy

    return Policy(model, tokenizer)


def rollout_steps(policy: Any, texts: list[str], shape: Shape) -> dict[str, Callable[[], Any]]:
    """Return our rollout, and transformers' `generate` with its defaults and without logps."""
    from grpo_fast.rollout import Sampling, generate

    sampling = Sampling(max_new_tokens=shape.length)
    repeated = [text for text in texts for _ in range(shape.group)]
    encoded = policy.tokenizer(repeated, padding=True, return_tensors="pt")
    inputs = {name: encoded[name].to(policy.device) for name in ("input_ids", "attention_mask")}

    def ours() -> list:
        found = generate(policy, texts, sampling, group_size=shape.group, seed=0)
        return list(zip(found.prompt_ids, found.completion_ids, found.sampling_logps, strict=True))

    def theirs() -> Any:
        with policy.generation():
            policy.lm.set_attn_implementation(policy.generation_attn)
            return policy.lm.generate(
                **inputs, do_sample=True, max_new_tokens=shape.length, eos_token_id=EOS,
                pad_token_id=0,
            )  # fmt: skip

    return {"grpo_fast": ours, "transformers": theirs}


def our_step(policy: Any, texts: list[str], shape: Shape) -> Callable[[], Any]:
    """Return a step of our trainer on the same prompts."""
    from grpo_fast.data import Example
    from grpo_fast.rewards import build_rewards
    from grpo_fast.rollout import build_engine
    from grpo_fast.train.collect.groups import PromptQueue
    from grpo_fast.train.collect.recorded import build_collector
    from grpo_fast.train.config.recipes import load_recipe
    from grpo_fast.train.loop import make_step
    from grpo_fast.train.models.reference import Reference
    from grpo_fast.train.update.trainer import Trainer

    config = load_recipe("gsm8k-tiny", [
        f"rollout.group_size={shape.group}", f"rollout.prompts_per_step={shape.prompts}",
        f"rollout.max_new_tokens={shape.length}", "optim.lr=1e-6", "optim.warmup=0",
    ])  # fmt: skip
    spec = SimpleNamespace(
        name=f"{__name__}:reward", label="reward", weight=1.0, options={}, path=None, timeout=60.0,
        in_process=True,
    )  # fmt: skip
    trainer = Trainer(config, policy, Reference(policy, config.reference))
    queue = PromptQueue([Example(text, None, None) for text in texts])
    engine = build_engine(policy, config.rollout)
    rewards = build_rewards([spec])
    collector = build_collector(config, policy, engine, rewards, queue)
    count = 0

    def one_step() -> Any:
        nonlocal count
        count += 1
        return make_step(count, collector, trainer)[1]

    return one_step


def trl_steps(
    model: Any, tokenizer: Any, texts: list[str], shape: Shape, device: str
) -> dict[str, Callable[[], Any]]:
    """Return the steps of an iteration of TRL's `train`, which call the trainer's methods."""
    from datasets import Dataset
    from transformers.utils import logging as logging_of_transformers
    from trl import GRPOConfig, GRPOTrainer

    from grpo_fast.integrations.trl import FastGRPOTrainer

    logging_of_transformers.disable_progress_bar()
    steps = {}
    for label, cls in (("TRL", GRPOTrainer), ("FastGRPOTrainer in TRL", FastGRPOTrainer)):
        arguments = GRPOConfig(
            output_dir=tempfile.mkdtemp(), num_generations=shape.group, report_to=[], bf16=False,
            per_device_train_batch_size=shape.prompts * shape.group, save_strategy="no",
            max_completion_length=shape.length, gradient_checkpointing=False, learning_rate=1e-6,
            use_cpu=device == "cpu", max_steps=1000, beta=0.0, loss_type="dapo", temperature=1.0,
        )  # fmt: skip
        trainer = cls(
            model=copy.deepcopy(model), reward_funcs=reward, args=arguments,
            processing_class=tokenizer, train_dataset=Dataset.from_dict({"prompt": texts}),
        )  # fmt: skip
        steps[label] = trl_step(trainer)
    return steps


def trl_step(trainer: Any) -> Callable[[], Any]:
    """Return a step of a TRL trainer: batch, rollout, gradient, clipping and update."""
    trainer.create_optimizer_and_scheduler(1000)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loader = trainer.get_train_dataloader()
    batches = iter(loader)

    def step() -> Any:
        nonlocal batches
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        loss = trainer.training_step(trainer.model, batch, None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad(set_to_none=True)
        trainer._metrics["train"].clear()
        return loss

    return step


def table(case: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = [
        f"\n{case['shape']}: {case['prompts']} prompts of about {case['tokens']} tokens, "
        f"{case['group']} completions of {case['length']} tokens each; sampler logps within "
        f"{case['error_logps']:.0e}",
        f"{'':34}{'ms':>10}{'±':>8}{'speedup':>9}",
    ]
    for what in ("step", "rollout"):
        for who, row in case[what].items():
            times = f"{row['median_ms']:>10.0f}{row['spread_ms']:>8.0f}"
            lines.append(f"{what:9}{who:25}{times}{row['speedup']:>8.2f}x")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
