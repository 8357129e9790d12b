"""Time of a full GRPO step with rollout: our trainer, TRL's trainer, and FastGRPOTrainer in TRL.

    python -m benchmarks.trainers.loop [--quick] [--shapes short 12-shot] [--json results.json]
    python -m benchmarks.trainers.loop --model runs/capitals-data/model --threads 1 --clock process

A step samples completions, computes rewards and gradients, and updates the weights, without
logging. All trainers have the same model, prompts, lengths, reward, loss and optimizer. The default
model is that of the recipe gsm8k-tiny with V = 1024. `--model` selects a pretrained model, with
GSM8K questions as prompts. The EOS is a token that the model does not sample, so every completion
has `max_new_tokens` tokens.

The peak memory of each step is measured, too. `--rows` limits the number of completions that TRL
processes at a time; TRL needs the least memory with `--rows 1`. FastGRPOTrainer processes all
completions at a time.

Rollouts are also timed alone. Our rollout returns the sampler's logps. transformers' `generate`
runs with its defaults and returns no logps. Before the timing, our logps are compared with those of
a new forward pass over prompt and completion, with a tolerance of 1e-3 nats. All candidates are
timed alternately in one process.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks import measure
from benchmarks.trainers.options import Defaults, add_clock, new_parser, parsed, save, set_clock
from benchmarks.trainers.rollout import error_of
from benchmarks.trainers.step import GSM8K, k_shot_texts

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 1024
EOS = 1024  # This id is outside of the vocabulary, so the model never samples it.
TOLERANCE = 1e-3  # nats
DEFAULTS = Defaults(threads=2, budget=(60.0, 5.0), rounds=(7, 3))


class Shape(NamedTuple):
    """Sizes of a step.

    Attributes:
        prompts: number of prompts.
        tokens: approximate number of tokens of a prompt.
        group: number of completions for each prompt.
        length: number of tokens of a completion.
    """

    prompts: int
    tokens: int
    group: int
    length: int


SHAPES = {"short": Shape(8, 60, 8, 120), "12-shot": Shape(2, 2900, 8, 64)}
QUICK = {"short": Shape(2, 12, 4, 8), "12-shot": Shape(2, 100, 4, 8)}
# Shapes for a pretrained model. "short" prompts are single questions. "12-shot" prompts have 2048
# tokens of worked examples before the question.
PRETRAINED = {"short": Shape(2, 0, 8, 64), "12-shot": Shape(1, 2048, 8, 32)}
UNUSED_TOKEN = "<file_sep>"  # used as EOS, because SmolLM2's instruct models do not generate it


class Subject(NamedTuple):
    """Model, tokenizer, prompts and EOS token id, which are the same for all trainers."""

    model: Any
    tokenizer: Any
    texts: list[str]
    eos: int


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the fraction of distinct words in each completion."""
    return [len(set(text.split())) / max(1, len(text.split())) for text in completions]


def main() -> None:
    options = parse_arguments()
    logging.disable(logging.WARNING)
    shapes = QUICK if options.quick else PRETRAINED if options.pretrained else SHAPES
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
    parser.add_argument("--model", dest="pretrained", metavar="PATH", help="a pretrained model")
    parser.add_argument("--data", default=str(GSM8K), help="folder of GSM8K, for --model")
    parser.add_argument("--rows", type=int, help="completions that TRL takes at a time; all")
    add_clock(parser)
    options = parsed(parser, DEFAULTS, arguments)
    set_clock(parser, options)
    return options


def measure_shape(options: argparse.Namespace, name: str, shape: Shape) -> dict[str, Any]:
    """Verify our rollouts, then time all steps and all rollouts. Print and return the results."""
    subject = pretrained(options, shape) if options.pretrained else random_start(options, shape)
    policy = policy_of(copy.deepcopy(subject.model), subject.tokenizer)
    rollouts = rollout_steps(policy, subject, shape)
    error = error_of(policy, rollouts["grpo_fast"]())
    if error is None or not error <= TOLERANCE:
        raise SystemExit(f"{name}: sampler logps off by {error} nats; a wrong one is not timed")
    rows_per_pass = options.rows or shape.prompts * shape.group
    steps = {
        "grpo_fast": our_step(policy, subject.texts, shape),
        **trl_steps(subject, shape, options.device, rows_per_pass),
    }
    # Measure the memory before the times, because these calls also warm up the steps.
    memory = {who: peak_mib(step, options.device) for who, step in steps.items()}
    rounds = options.device, options.budget, options.rounds
    times = {
        "step": measure.interleaved(steps, *rounds),
        "rollout": measure.interleaved(rollouts, *rounds),
    }
    case: dict[str, Any] = {"shape": name, **shape._asdict(), "error_logps": error}
    for what, peer in (("step", "TRL"), ("rollout", "transformers")):
        rows = {who: measure.spread(samples) for who, samples in times[what].items()}
        for row in rows.values():
            row["speedup"] = rows[peer]["median_ms"] / row["median_ms"]
        case[what] = rows
    for who, mib in memory.items():
        case["step"][who]["peak_mib"] = mib
    print(table(case))
    return case


def peak_mib(step: Callable[[], Any], device: str) -> float:
    """Return the peak memory during a step minus the memory before the step, in MiB.

    The result includes gradients and, in the first step, Adam's moments. It excludes the weights.
    """

    def without_result() -> None:
        step()

    return measure.peak_memory(without_result, device)["workspace_mib"]


def random_start(options: argparse.Namespace, shape: Shape) -> Subject:
    return Subject(build_model(options.device), vocabulary(), prompts_of(shape), EOS)


def pretrained(options: argparse.Namespace, shape: Shape) -> Subject:
    """Load a pretrained model and GSM8K prompts. Long prompts begin with worked examples."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.pretrained, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.pretrained, padding_side="left")
    tokenizer.eos_token = UNUSED_TOKEN
    eos = tokenizer.eos_token_id
    model.config.eos_token_id = eos
    model.generation_config.eos_token_id = eos
    texts = k_shot_texts(options.data, shape.tokens, lambda text: len(tokenizer(text).input_ids))
    chosen = list(itertools.islice(texts, shape.prompts))
    return Subject(model.to(options.device), tokenizer, chosen, eos)


def build_model(device: str) -> Any:
    """Return the random model of the recipe gsm8k-tiny, with 4096 positions for long prompts."""
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
    """Return a tokenizer in which every word is one token.

    The id of its EOS is outside of the model's vocabulary, so the model never samples it.
    """
    from grpo_fast.data.tokenizer import build_symbol_tokenizer

    words = [f"w{i}" for i in range(2, EOS + 1)]
    tokenizer = build_symbol_tokenizer(words)
    tokenizer.eos_token = words[-1]
    return tokenizer


def prompts_of(shape: Shape) -> list[str]:
    """Return prompts of random words. Their lengths differ a little, so that padding is needed."""
    generator = torch.Generator().manual_seed(1)
    lengths = [shape.tokens - i * shape.tokens // 50 for i in range(shape.prompts)]
    rows = [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    return [" ".join(f"w{token}" for token in row) for row in rows]


def policy_of(model: Any, tokenizer: Any) -> Any:
    from grpo_fast.train.models.policy import Policy

    return Policy(model, tokenizer)


def rollout_steps(policy: Any, subject: Subject, shape: Shape) -> dict[str, Callable[[], Any]]:
    """Return our rollout with logps, and transformers' `generate` with its defaults."""
    from grpo_fast.rollout import Sampling, generate

    texts = subject.texts
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
                **inputs, do_sample=True, max_new_tokens=shape.length,
                eos_token_id=subject.eos, pad_token_id=policy.tokenizer.pad_token_id or 0,
            )  # fmt: skip

    return {"grpo_fast": ours, "transformers": theirs}


def our_step(policy: Any, texts: list[str], shape: Shape) -> Callable[[], Any]:
    """Return a full step of our trainer, including its rollout and rewards."""
    from grpo_fast.data import Example
    from grpo_fast.rewards import build_rewards
    from grpo_fast.rollout import build_engine
    from grpo_fast.train.collect.groups import PromptQueue
    from grpo_fast.train.collect.recorded import build_collector
    from grpo_fast.train.config import RewardConfig
    from grpo_fast.train.config.recipes import load_recipe
    from grpo_fast.train.loop import make_step
    from grpo_fast.train.models.reference import Reference
    from grpo_fast.train.update.trainer import Trainer

    config = load_recipe("gsm8k-tiny", [
        f"rollout.group_size={shape.group}", f"rollout.prompts_per_step={shape.prompts}",
        f"rollout.max_new_tokens={shape.length}", "optim.lr=1e-6", "optim.warmup=0",
    ])  # fmt: skip
    watched = RewardConfig(name=f"{__name__}:reward", in_process=True)
    trainer = Trainer(config, policy, Reference(policy, config.reference))
    queue = PromptQueue([Example(text, None, None) for text in texts])
    engine, rewards = build_engine(policy, config.rollout), build_rewards([watched])
    collector = build_collector(config, policy, engine, rewards, queue)
    count = 0

    def one_step() -> Any:
        nonlocal count
        count += 1
        return make_step(count, collector, trainer)[1]

    return one_step


def trl_steps(
    subject: Subject, shape: Shape, device: str, rows: int
) -> dict[str, Callable[[], Any]]:
    """Return a full step of TRL's `GRPOTrainer`, and one of `FastGRPOTrainer`.

    Args:
        subject: model, tokenizer and prompts.
        shape: sizes of the step.
        device: "cpu" or "cuda".
        rows: number of completions in one forward and backward pass of `GRPOTrainer`.
            `FastGRPOTrainer` processes all completions at a time, so that they share their prompt.
    """
    from datasets import Dataset
    from transformers.utils import logging as logging_of_transformers
    from trl import GRPOConfig, GRPOTrainer

    from grpo_fast.integrations.trl import FastGRPOTrainer

    logging_of_transformers.disable_progress_bar()
    steps = {}
    completions = shape.prompts * shape.group
    trainers = (
        ("TRL", GRPOTrainer, rows),
        ("FastGRPOTrainer in TRL", FastGRPOTrainer, completions),
    )
    for label, cls, rows_per_pass in trainers:
        passes = completions // rows_per_pass
        arguments = GRPOConfig(
            output_dir=tempfile.mkdtemp(), num_generations=shape.group, report_to=[], bf16=False,
            per_device_train_batch_size=rows_per_pass, gradient_accumulation_steps=passes,
            save_strategy="no",
            max_completion_length=shape.length, gradient_checkpointing=False, learning_rate=1e-6,
            use_cpu=device == "cpu", max_steps=1000, beta=0.0, loss_type="dapo", temperature=1.0,
        )  # fmt: skip
        trainer = cls(
            model=copy.deepcopy(subject.model), reward_funcs=reward, args=arguments,
            processing_class=subject.tokenizer,
            train_dataset=Dataset.from_dict({"prompt": subject.texts}),
        )  # fmt: skip
        steps[label] = trl_step(trainer, passes)
    return steps


def trl_step(trainer: Any, passes: int) -> Callable[[], Any]:
    """Return a function that does what TRL's `train` does in one step, without logging.

    It gets batches, samples, accumulates gradients over `passes` passes, clips them and updates.
    """
    trainer.create_optimizer_and_scheduler(1000)
    trainer.current_gradient_accumulation_steps = passes
    trainer.model.train()
    loader = trainer.get_train_dataloader()
    batches = iter(loader)

    def next_batch() -> Any:
        nonlocal batches
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        return batch

    def step() -> Any:
        for _ in range(passes):
            loss = trainer.training_step(trainer.model, next_batch(), None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad(set_to_none=True)
        trainer._metrics["train"].clear()
        return loss

    return step


def table(case: dict[str, Any]) -> str:
    """Format the times, speedups and peak memory of a case as a text table."""
    lines = [
        f"\n{case['shape']}: {case['prompts']} prompts of about {case['tokens']} tokens, "
        f"{case['group']} completions of {case['length']} tokens each; sampler logps within "
        f"{case['error_logps']:.0e}",
        f"{'':34}{'ms':>10}{'±':>8}{'speedup':>9}{'peak MiB':>10}",
    ]
    for what in ("step", "rollout"):
        for who, row in case[what].items():
            lines.append(
                f"{what:9}{who:25}{row['median_ms']:>10.0f}{row['spread_ms']:>8.0f}"
                f"{row['speedup']:>8.2f}x{row.get('peak_mib', float('nan')):>10.0f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
