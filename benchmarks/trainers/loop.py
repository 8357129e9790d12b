r"""Time of a GRPO step with its rollout: our trainer, TRL's trainer, and FastGRPOTrainer in TRL.

    python -m benchmarks.trainers.loop [--quick] [--shapes short 12-shot] [--json results.json]
    python -m benchmarks.trainers.loop --model runs/capitals-data/model --data path/to/gsm8k \
        --threads 1 --clock process

A step samples completions, computes rewards and gradients, and updates the weights. It does not
log. All trainers have the same model, prompts, lengths, reward, loss and optimizer. The default is
the model of the recipe gsm8k-tiny, with random weights and V = 1024. `--model` selects a pretrained
model, with GSM8K questions as prompts. The EOS is a token that the model does not sample, so every
completion has the maximum length.

The peak memory of each step is measured, too. `--rows` limits the number of completions that TRL
processes at once. TRL needs the least memory with `--rows 1`. FastGRPOTrainer always processes all
completions at once.

Rollouts are also timed alone. Our rollout returns the logps of the sampler. The `generate` of
transformers runs with its defaults and returns no logps. Our logps are first compared with those of
a new forward pass over prompt and completion. They must agree within 1e-3 nats. All candidates are
timed in interleaved rounds in one process.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from benchmarks import measure
from benchmarks.options import positive
from benchmarks.report.tables import text_table
from benchmarks.trainers.options import Defaults, add_pretrained, new_parser, parsed, save
from benchmarks.trainers.step import build_model, k_shot_texts
from benchmarks.trainers.trl import make_trainer
from grpo_fast.data import Example
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rewards import build_rewards
from grpo_fast.rollout import Sampling, build_engine, generate
from grpo_fast.train.collect import Advantages, Collector, PromptQueue
from grpo_fast.train.config import RewardConfig, RunConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.loop import make_step
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import Reference
from grpo_fast.train.run import Run

VOCABULARY = 1024
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
# Shapes for a pretrained model. A "short" prompt is a single question. A "12-shot" prompt has 2048
# tokens of worked examples before the question.
PRETRAINED = {"short": Shape(2, 0, 8, 64), "12-shot": Shape(1, 2048, 8, 32)}
UNUSED_TOKEN = "<file_sep>"  # used as EOS, because SmolLM2's instruct models do not generate it


class Subject(NamedTuple):
    """Model, tokenizer and prompts. They are the same for all trainers."""

    model: Any
    tokenizer: Any
    texts: list[str]


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the fraction of distinct words in each completion."""
    return [len(set(text.split())) / max(1, len(text.split())) for text in completions]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    add_pretrained(parser, parser)
    words = "completions that TRL takes at a time, a divisor of their number (default: all)"
    parser.add_argument("--rows", type=positive(int), help=words)
    parser.set_defaults(dtype="float32", model_config="tiny", layers=None)  # for build_model
    options = parsed(parser, DEFAULTS)
    shapes = QUICK if options.quick else PRETRAINED if options.pretrained else SHAPES
    for name in options.shapes:
        completions = shapes[name].prompts * shapes[name].group
        if options.rows and completions % options.rows:
            expected = f"a divisor of {completions}, the completions of the shape {name}"
            parser.error(f"--rows: expected {expected}, got {options.rows}")
    logging.disable(logging.WARNING)
    cases = [measure_shape(options, name, shapes[name]) for name in options.shapes]
    save(options, "whole GRPO step, rollout included", {"load": os.getloadavg()}, cases=cases)


def measure_shape(options: argparse.Namespace, name: str, shape: Shape) -> dict[str, Any]:
    """Verify our rollout, and time all steps and rollouts. Print and return the results."""
    subject = subject_of(options, shape)
    policy = Policy(copy.deepcopy(subject.model), subject.tokenizer)
    sizes = policy, subject.texts, shape.group, shape.length
    rollouts = {"grpo_fast": our_rollout(*sizes), "transformers": library_rollout(*sizes)}
    error = error_of(policy, rollouts["grpo_fast"]())
    if not error <= TOLERANCE:
        raise SystemExit(f"{name}: sampler logps off by {error} nats; a wrong one is not timed")
    steps = {
        "grpo_fast": our_step(policy, subject.texts, shape),
        **trl_steps(subject, shape, options.device, options.rows),
    }
    case: dict[str, Any] = {"shape": name, **shape._asdict(), "error_logps": error}
    # The memory of a step includes gradients and Adam's moments, because `measured` first measures
    # the memory, in calls that also warm up the steps.
    case["step"] = measure.measured(steps, options)
    rounds = options.device, options.budget, options.rounds
    case["rollout"] = measure.interleaved(rollouts, *rounds)
    for rows, peer in ((case["step"], "TRL"), (case["rollout"], "transformers")):
        for row in rows.values():
            row["speedup"] = rows[peer]["median_ms"] / row["median_ms"]
    print(table(case))
    return case


def subject_of(options: argparse.Namespace, shape: Shape) -> Subject:
    """Return a pretrained model with GSM8K prompts, or a model with random weights.

    Long GSM8K prompts begin with worked examples. The model with random weights has the
    configuration of the recipe gsm8k-tiny. Its prompts consist of random words, each of which is
    one token. The prompts differ a little in length, so they need padding.
    """
    model = build_model(options)
    if options.pretrained:
        tokenizer = AutoTokenizer.from_pretrained(options.pretrained, padding_side="left")
        tokenizer.eos_token = UNUSED_TOKEN
        texts = k_shot_texts(
            options.data, shape.tokens, lambda text: len(tokenizer(text).input_ids)
        )
        chosen = list(itertools.islice(texts, shape.prompts))
    else:
        words = [f"w{i}" for i in range(2, VOCABULARY + 1)]
        tokenizer = build_symbol_tokenizer(words)
        tokenizer.eos_token = words[-1]  # its id is outside of the vocabulary, so it is not sampled
        generator = torch.Generator().manual_seed(1)
        lengths = [shape.tokens - i * shape.tokens // 50 for i in range(shape.prompts)]
        rows = [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
        chosen = [" ".join(f"w{token}" for token in row) for row in rows]
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return Subject(model, tokenizer, chosen)


def our_rollout(
    policy: Policy, texts: list[str], group: int, new_tokens: int
) -> Callable[[], list]:
    """Return a function that samples `group` completions of each prompt with our `generate`.

    The function returns a list with (prompt ids, completion ids, logps) for each completion.
    """
    options = Sampling(max_new_tokens=new_tokens)

    def rollout() -> list:
        found = generate(policy, texts, options, group_size=group, seed=0)
        return list(zip(found.prompt_ids, found.completion_ids, found.sampling_logps, strict=True))

    return rollout


def library_rollout(
    policy: Policy, texts: list[str], group: int, new_tokens: int
) -> Callable[[], None]:
    """Return a function that samples with the `generate` of transformers."""
    repeated = [text for text in texts for _ in range(group)]
    encoded = policy.tokenizer(repeated, padding=True, return_tensors="pt")
    inputs = {name: encoded[name].to(policy.device) for name in ("input_ids", "attention_mask")}

    def rollout() -> None:
        with policy.generation():
            policy.lm.generate(
                **inputs, max_new_tokens=new_tokens, pad_token_id=policy.pad_id, do_sample=True,
                eos_token_id=policy.tokenizer.eos_token_id,
            )  # fmt: skip

    return rollout


@torch.no_grad()
def error_of(policy: Any, rows: list) -> float:
    """Return the largest difference between a rollout's logps and a forward pass, in nats."""
    worst = torch.zeros(())
    for prompt, completion, logps in rows:
        with policy.generation():
            ids = torch.tensor([prompt + completion], device=policy.device)
            logits = policy.lm(ids).logits[0].double()
        targets = torch.tensor(completion)[:, None].to(logits.device)
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, targets)
        difference = torch.as_tensor(logps).cpu() - expected[:, 0].cpu()
        worst = torch.maximum(worst, difference.abs().max())  # keeps NaN
    return float(worst)


def make_run(config: RunConfig, policy: Policy, engine: Any, examples: Sequence[Example]) -> Run:
    """Build a run of our trainer without a folder. `make_step(n, run)` makes its step n."""
    rewards = build_rewards(config.rewards)
    weights = {reward.name: reward.weight for reward in rewards.rewards}
    options = config.advantages, config.advantage_options, config.rollout.group_size, weights
    collector = Collector(
        config.rollout, policy, engine, rewards, PromptQueue(examples), Advantages(*options),
        config.seed, config.steps,
    )  # fmt: skip
    return Run(config, policy, Reference(policy, config.reference), None, collector)


def our_step(policy: Policy, texts: list[str], shape: Shape) -> Callable[[], None]:
    """Return a step of our trainer, with its rollout and rewards."""
    config = load_recipe("gsm8k-tiny", [
        f"rollout.group_size={shape.group}", f"rollout.prompts_per_step={shape.prompts}",
        f"rollout.max_new_tokens={shape.length}", "optim.lr=1e-6", "optim.warmup=0",
    ])  # fmt: skip
    config.rewards = [RewardConfig(name=f"{__name__}:reward", in_process=True)]
    examples = [Example(text, None, None) for text in texts]
    run = make_run(config, policy, build_engine(policy, config.rollout), examples)
    numbers = itertools.count(1)

    def one_step() -> None:
        make_step(next(numbers), run)

    return one_step


def trl_steps(
    subject: Subject, shape: Shape, device: str, rows: int | None
) -> dict[str, Callable[[], None]]:
    """Return a step of TRL's `GRPOTrainer`, and a step of `FastGRPOTrainer`, keyed by name.

    Args:
        subject: model, tokenizer and prompts.
        shape: sizes of the step.
        device: "cpu" or "cuda".
        rows: number of completions in one forward and backward pass of `GRPOTrainer`. None: all.
            `FastGRPOTrainer` processes all completions at once, so that they share their prompt.
    """
    from trl import GRPOTrainer

    from grpo_fast.integrations.trl import FastGRPOTrainer

    completions = shape.prompts * shape.group
    trainers = (
        ("TRL", GRPOTrainer, rows or completions),
        ("FastGRPOTrainer in TRL", FastGRPOTrainer, completions),
    )
    steps = {}
    for label, cls, rows_per_pass in trainers:
        passes = completions // rows_per_pass
        trainer = make_trainer(
            cls, subject.model, subject.tokenizer, subject.texts, reward, device,
            num_generations=shape.group, per_device_train_batch_size=rows_per_pass,
            gradient_accumulation_steps=passes, max_completion_length=shape.length,
            learning_rate=1e-6, max_steps=1000, beta=0.0, loss_type="dapo", temperature=1.0,
        )  # fmt: skip
        steps[label] = trl_step(trainer, passes)
    return steps


def trl_step(trainer: Any, passes: int) -> Callable[[], None]:
    """Return a function that does what one step of TRL's `train` does, without logging.

    It gets batches, samples completions, accumulates gradients over as many passes as `passes`
    says, clips the gradients and updates the weights.
    """
    trainer.create_optimizer_and_scheduler(1000)
    trainer.current_gradient_accumulation_steps = passes
    trainer.model.train()
    loader = trainer.get_train_dataloader()
    # Start again from the first batch at the end of the data.
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> None:
        for _ in range(passes):
            trainer.training_step(trainer.model, next(batches), None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad(set_to_none=True)
        trainer._metrics["train"].clear()

    return step


def table(case: dict[str, Any]) -> str:
    title = (
        f"{case['shape']}: {case['prompts']} prompts of about {case['tokens']} tokens, "
        f"{case['group']} completions of {case['length']} tokens each; sampler logps within "
        f"{case['error_logps']:.0e}"
    )
    rows = [
        [f"{what} {who}", f"{row['median_ms']:.0f}", f"{row['spread_ms']:.0f}",
         f"{row['speedup']:.2f}x", f"{row['workspace_mib']:.0f}" if "workspace_mib" in row else ""]
        for what in ("step", "rollout")
        for who, row in case[what].items()
    ]  # fmt: skip
    return text_table(title, ("", "ms", "±", "speedup", "peak MiB"), rows)


if __name__ == "__main__":
    main()
