r"""Time and memory of a GRPO step with its rollout: our trainer, TRL's, and FastGRPOTrainer in TRL.

    python -m benchmarks.trainers.loop [--quick] [--shapes short 12-shot] [--json results.json]
    python -m benchmarks.trainers.loop --model runs/capitals-data/model --data path/to/gsm8k \
        --threads 1 --rows 4 --shapes short

A step samples completions, computes rewards and gradients, and updates the weights. It does not
log. All trainers have the same model, prompts, lengths, reward, loss and optimizer. The model has
random weights and V = 1024, or is a pretrained SmolLM2 whose prompts are GSM8K questions. Its EOS
is a token that it does not sample, so every completion has the maximum length. TRL needs the least
memory with `--rows 1`. All steps are timed in interleaved rounds in one process. `make race`
measures the time to an accuracy of the same trainers.
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
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import measure
from benchmarks.options import parsed, positive, save, timing_parser
from benchmarks.report.tables import text_table
from benchmarks.trainers.step import build_model
from grpo_fast.data import Example
from grpo_fast.data.splits import Splits
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rewards import build_rewards
from grpo_fast.rollout import build_engine
from grpo_fast.train.collect import Advantages, Collector, PromptQueue
from grpo_fast.train.config import DataConfig, RewardConfig, RunConfig, load_recipe
from grpo_fast.train.loop import make_step
from grpo_fast.train.policy import Policy, Reference
from grpo_fast.train.run import Run

VOCABULARY = 1024
BUDGET, ROUNDS = (60.0, 5.0), (7, 3)  # without --quick, with --quick
Step = Callable[[], object]


class Shape(NamedTuple):
    """Sizes of a step.

    Attributes:
        prompts: number of prompts.
        tokens: number of tokens of the longest prompt. With a pretrained model, it is the number of
            tokens of the worked examples before a question.
        group: number of completions for each prompt.
        length: number of tokens of a completion.
    """

    prompts: int
    tokens: int
    group: int
    length: int


SHAPES = {"short": Shape(8, 60, 8, 120), "12-shot": Shape(2, 2900, 8, 64)}
QUICK = {"short": Shape(2, 12, 4, 8), "12-shot": Shape(2, 100, 4, 8)}
PRETRAINED = {"short": Shape(2, 0, 8, 64), "12-shot": Shape(1, 2048, 8, 32)}
UNUSED_TOKEN = "<file_sep>"  # is the EOS, because SmolLM2's instruct models do not generate it


class Subject(NamedTuple):
    """Model, tokenizer and prompts. They are the same for all trainers."""

    model: Any
    tokenizer: Any
    texts: list[str]


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Return the fraction of distinct words in each completion."""
    return [len(set(text.split())) / max(1, len(text.split())) for text in completions]


def main() -> None:
    parser = timing_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--model", metavar="PATH", help="a pretrained SmolLM2; needs --data")
    parser.add_argument("--data", metavar="PATH", help="folder of GSM8K, for --model")
    words = "completions that TRL processes at once (default: all)"
    parser.add_argument("--rows", type=positive(int), help=words)
    parser.set_defaults(dtype="float32", model_config="tiny", layers=None)  # for build_model
    options = parsed(parser, BUDGET, ROUNDS)
    if (options.model is None) != (options.data is None):
        parser.error("--model and --data: expected both or neither")
    shapes = PRETRAINED if options.model else QUICK if options.quick else SHAPES
    counts = [shapes[name].prompts * shapes[name].group for name in options.shapes]
    if options.rows and any(count % options.rows for count in counts):
        parser.error(f"--rows: expected a divisor of {counts}, got {options.rows}")
    logging.disable(logging.WARNING)
    cases = [measure_shape(options, name, shapes[name]) for name in options.shapes]
    save(options, "whole GRPO step, rollout included", {"load": os.getloadavg()}, cases=cases)


def measure_shape(options: argparse.Namespace, name: str, shape: Shape) -> dict[str, Any]:
    """Measure the time and the memory of all steps. Print and return the results."""
    subject = (pretrained if options.model else subject_of)(options, shape)
    rows_of_trl = options.rows or shape.prompts * shape.group
    trl = trl_steps(subject, shape, options.device, rows_of_trl)
    steps = {"grpo_fast": our_step(subject, shape), **trl}
    # The memory of a step includes gradients and Adam's moments, because `measured` first measures
    # the memory, in calls that also warm up the steps.
    rows = measure.measured(steps, options)
    for row in rows.values():
        row["speedup"] = rows["TRL"]["median_ms"] / row["median_ms"]
    title = f"{name}: {shape.prompts} prompts of about {shape.tokens} tokens, "
    title += f"{shape.group} completions of {shape.length} tokens each"
    lines = [
        [who, f"{row['median_ms']:.0f}", f"{row['spread_ms']:.0f}", f"{row['speedup']:.2f}x",
         f"{row['workspace_mib']:.0f}"]
        for who, row in rows.items()
    ]  # fmt: skip
    print(text_table(title, ("", "ms", "±", "speedup", "peak MiB"), lines))
    return {"shape": name, **shape._asdict(), "step": rows}


def subject_of(options: argparse.Namespace, shape: Shape) -> Subject:
    """Return a model with random weights and prompts of random words, each of which is one token.

    The prompts differ a little in length, so they need padding.
    """
    model = build_model(options)
    words = [f"w{i}" for i in range(2, VOCABULARY + 1)]
    tokenizer = build_symbol_tokenizer(words)
    tokenizer.eos_token = words[-1]  # its id is outside of the vocabulary, so it is not sampled
    generator = torch.Generator().manual_seed(1)
    lengths = [shape.tokens - i * shape.tokens // 50 for i in range(shape.prompts)]
    rows = [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    texts = [" ".join(f"w{token}" for token in row) for row in rows]
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return Subject(model, tokenizer, texts)


def pretrained(options: argparse.Namespace, shape: Shape) -> Subject:
    """Return a pretrained model and GSM8K questions after `shape.tokens` tokens of examples."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    tokenizer.eos_token = UNUSED_TOKEN
    data = DataConfig(task="gsm8k", path=options.data, prompt_template="plain", chat=False)
    data.shots_tokens = shape.tokens or None
    texts = (str(example.prompt) for example in Splits(data, 0).for_tokenizer(tokenizer).train)
    filled = (text for text in texts if len(tokenizer(text).input_ids) >= shape.tokens)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    chosen = list(itertools.islice(filled, shape.prompts))
    return Subject(model.to(options.device), tokenizer, chosen)


def make_run(config: RunConfig, policy: Policy, engine: Any, examples: Sequence[Example]) -> Run:
    """Build a run of our trainer without a folder. `make_step(n, run)` makes its step n."""
    rewards = build_rewards(config.rewards)
    options = config.advantages, config.advantage_options, config.rollout.group_size
    collector = Collector(
        config.rollout, policy, engine, rewards, PromptQueue(examples), Advantages(*options),
        config.seed, config.steps,
    )  # fmt: skip
    return Run(config, policy, Reference(policy, config.reference), None, collector)


def our_step(subject: Subject, shape: Shape) -> Step:
    """Return a step of our trainer, with its rollout and rewards."""
    config = load_recipe("gsm8k-tiny", [
        f"rollout.group_size={shape.group}", f"rollout.prompts_per_step={shape.prompts}",
        f"rollout.max_new_tokens={shape.length}", "optim.lr=1e-6", "optim.warmup=0",
    ])  # fmt: skip
    config.rewards = [RewardConfig(name=f"{__name__}:reward", in_process=True)]
    policy = Policy(copy.deepcopy(subject.model), subject.tokenizer)
    examples = [Example(text, None, None) for text in subject.texts]
    run = make_run(config, policy, build_engine(policy, config.rollout), examples)
    numbers = itertools.count(1)

    def step() -> None:  # without a result, because `measure` takes a result for gradients
        make_step(next(numbers), run)

    return step


def make_trainer(
    cls: Any, model: Any, tokenizer: Any, prompts: list[str], reward: Callable[..., Any],
    device: str, **settings: Any,
) -> Any:  # fmt: skip
    """Build a trainer of TRL that does not log, with a copy of the model.

    `cls` is the class of the trainer. `settings` are further arguments of `GRPOConfig`.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from transformers.utils import logging as logging_of_transformers
    from trl import GRPOConfig

    logging_of_transformers.disable_progress_bar()
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), report_to=[], bf16=False, save_strategy="no",
        gradient_checkpointing=False, use_cpu=device == "cpu", **settings,
    )  # fmt: skip
    return cls(
        model=copy.deepcopy(model), reward_funcs=reward, args=arguments, processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip


def trl_steps(subject: Subject, shape: Shape, device: str, rows: int) -> dict[str, Step]:
    """Return a step of TRL's `GRPOTrainer`, and a step of `FastGRPOTrainer`, keyed by name.

    `GRPOTrainer` processes `rows` completions at once. `FastGRPOTrainer` processes all of them, so
    that they share their prompt.
    """
    from trl import GRPOTrainer

    from grpo_fast.integrations.trl import FastGRPOTrainer

    steps = {}
    every = shape.prompts * shape.group
    trainers = ("TRL", GRPOTrainer, rows), ("FastGRPOTrainer in TRL", FastGRPOTrainer, every)
    for label, cls, at_once in trainers:
        trainer = make_trainer(
            cls, subject.model, subject.tokenizer, subject.texts, reward, device,
            num_generations=shape.group, per_device_train_batch_size=at_once,
            gradient_accumulation_steps=every // at_once, max_completion_length=shape.length,
            learning_rate=1e-6, max_steps=1000, beta=0.0, loss_type="dapo", temperature=1.0,
        )  # fmt: skip
        steps[label] = trl_step(trainer, every // at_once)
    return steps


def trl_step(trainer: Any, passes: int) -> Step:
    """Return a function that does what one step of TRL's `train` does, without logging."""
    trainer.create_optimizer_and_scheduler(1000)
    trainer.current_gradient_accumulation_steps = passes
    trainer.model.train()
    # Start again from the first batch at the end of the data.
    batches = itertools.chain.from_iterable(itertools.repeat(trainer.get_train_dataloader()))

    def step() -> None:
        for _ in range(passes):
            trainer.training_step(trainer.model, next(batches), None)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad(set_to_none=True)
        trainer._metrics["train"].clear()

    return step


if __name__ == "__main__":
    main()
