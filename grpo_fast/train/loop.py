"""A training run from top to bottom: load, sample, score, update, log and save, in eight parts.

All ranks run this program. Rank 0 prints and writes.
"""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from typing import Any

import torch

from grpo_fast.data.splits import Splits
from grpo_fast.errors import require
from grpo_fast.kernels import route
from grpo_fast.rewards import RewardSet, build_rewards, check_examples, scorer_for
from grpo_fast.rewards.columns import usable
from grpo_fast.rollout import awake, build_engine, check_prompts, encode_prompts, prompt_texts
from grpo_fast.train import checkpoint, ranks
from grpo_fast.train.batch import StepBatch
from grpo_fast.train.collect import Advantages, Collector, PromptQueue
from grpo_fast.train.config import RunConfig
from grpo_fast.train.critic import Critic
from grpo_fast.train.evaluate import asking_lines, build_evaluation
from grpo_fast.train.folder import FILES, check_ranks, check_same, fingerprints
from grpo_fast.train.metrics import Clock, finite
from grpo_fast.train.policy import Policy, Reference, build_tokenizer, load_policy
from grpo_fast.train.report.page import rows_of
from grpo_fast.train.report.report import RunReport, closing_lines, opening_lines
from grpo_fast.train.run import Run
from grpo_fast.train.update import warm_start

log = logging.getLogger(__name__)

SHOWN = 8  # number of completions in a saved table, which is rounded up to complete groups


def train(config: RunConfig) -> dict[str, Any]:
    """Train a model with a configuration.

    The numbered comments in this file name the parts of a run. On the same machine, the same
    configuration gives bitwise identical metrics, except for timings.

    Args:
        config: the configuration, for example from `load_recipe`.

    Returns:
        The summary of the run, which is also written to `output_dir/summary.json`.

    Raises:
        ValueError: the configuration, the data or a model is invalid.
        RunError: the run cannot continue, or the disk is full or read-only.
        Stopped: a signal ended the run. This exception is a SystemExit.
    """
    started = time.perf_counter()
    launch = config.distributed, config.distributed_replicas, config.distributed_timeout
    with ranks.process_group(*launch), checkpoint.opened(config) as (found, state):
        # 1. Load rewards, data and models. Invalid input raises an error here, before any step.
        # Rewards and data load faster than models, so their errors appear early.
        _be_deterministic(config.seed)
        warm = config.warm_start if found is None else None  # a checkpoint is saved after it
        fits = warm is None or not config.is_sharded
        require(fits, "warm_start", "one process or distributed=ddp", config.distributed)
        rewards, questions, settings = _load_inputs(config, state)
        policy = _load_policy(config, questions)
        questions, splits, lines = _ask(config, questions, policy)
        longest = config.rollout.max_new_tokens
        evaluate = build_evaluation(config.eval, splits, policy, rewards, longest)
        was = (0, 0) if state is None else (state.length, state.step)
        report = RunReport(config, *was)
        stopping = ranks.Stopping()
        if found is None:
            ranks.from_main(report.begin)
        with stopping.listening(), report, build_engine(policy, config.rollout) as engine:
            if warm is not None:
                warm_start(policy, questions.train, warm, seed=config.seed, log=report.log)
            # Build the reference after the warm start, because it is a copy of the policy.
            reference = Reference(policy, config.reference)
            critic = Critic(policy, config.critic) if config.critic else None
            size = config.rollout.group_size
            advantages = Advantages(config.advantages, config.advantage_options, size)
            collector = Collector(
                config.rollout, policy, engine, rewards, PromptQueue(splits.train), advantages,
                config.seed, config.steps,
            )  # fmt: skip
            run = Run(config, policy, reference, critic, collector)
            saver = checkpoint.Checkpoints(run, report, config.checkpoint, settings)
            if found is not None and state is not None:
                saver.resume(found, state)
                ranks.from_main(report.begin)
                saver.mark()
                report.note(f"resumed from {found}")
            stopping.may_stop = lambda: not (run.has_moved or saver.is_ending)
            kernels = {
                "backend": route.head_route("auto", policy.head.weight).backend,
                "backend_fallback": route.fallback_reason(policy.device.type),
            }
            report.note(*opening_lines(config.rollout, kernels, engine.fallback), *lines)

            def evaluated(number: int) -> dict[str, float]:
                """Return the metrics of an evaluation, or {} if none is due after this step."""
                every = config.eval.every
                if not (number in (0, config.steps) or (every and number % every == 0)):
                    return {}
                with awake(engine, policy, version=number):
                    return evaluate(engine)

            def log_step(metrics: dict[str, float]) -> None:
                """Evaluate the model if due, and log the metrics of the last finished step."""
                result = evaluated(run.step)
                ranks.from_main(lambda: report.log(run.step, finite(metrics | result)))
                saver.mark(after=result or run.after, unlogged=None)

            with saver.saved_when_it_ends():
                if run.before is None:
                    before = evaluated(0)
                    ranks.from_main(lambda: report.log(0, before))
                    saver.mark(before=before, after=before)
                if run.unlogged is not None:  # a resumed run may have to log its last step
                    log_step(run.unlogged)
                for number in range(run.step + 1, config.steps + 1):
                    batch, metrics = make_step(number, run)  # parts 2 to 6
                    # 7. Record the step first, so that an error in logging or evaluation does not
                    # lose it. Then evaluate and log the step.
                    saver.mark(step=number, unlogged=finite(metrics))
                    _log_completions(report, number, batch, run)
                    log_step(metrics)
                    # 8. Save a checkpoint if one is due.
                    if saver.is_due():
                        saver.save()
                    stopping.raise_together()
                # The last step is saved, too, so that the run can be extended. The trained model of
                # a sharded run is read from this checkpoint.
                intervals = config.checkpoint.every, config.checkpoint.every_minutes
                saves_model = config.log.save_model and config.is_sharded
                last = saver.save() if saves_model or (run.step and any(intervals)) else None
                summary = run.summary() | kernels | {"seconds": time.perf_counter() - started}
                ranks.from_main(lambda: report.finish(summary))
                if config.log.save_model:
                    ranks.from_main(lambda: checkpoint.save_model(run, last))
            report.note(*closing_lines(report.folder, config.has_code))
        return summary


def make_step(number: int, run: Run) -> tuple[StepBatch, dict[str, float]]:
    """Run one training step, and return its packed samples and its metrics.

    Args:
        number: number of the step, counted from 1.
        run: the run.
    """
    clock = Clock()
    # 2. Sample G completions of each prompt. 3. Score the completions. 4. Compute advantages.
    samples, metrics = run.collector.next(number, clock)
    # 5. Pack the samples into micro-batches.
    batch = run.pack(samples)
    # 6. Update the weights: hidden states → fused loss → backward → gradient clipping → optimizer.
    return batch, metrics | run.train(number, batch, clock)


# ------------------------------------------------------------------------------ Parts of part 1
def _be_deterministic(seed: int) -> None:
    """Seed torch, and request deterministic operations on a GPU."""
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        # By default, deterministic mode also fills every new buffer of torch.empty. Turn this off,
        # because it costs an extra pass over memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _load_inputs(
    config: RunConfig, state: checkpoint.State | None
) -> tuple[RewardSet, Splits, dict[str, Any]]:
    """Load the rewards and the data, and check that all ranks and a resumed run have the same.

    Returns:
        The rewards, the data, and the settings with fingerprints of the files that they name.
    """
    rewards = build_rewards(config.rewards, max_failures=config.max_reward_failures)
    can_use = partial(usable, rewards, config.data.drop_unusable)
    splits = Splits(config.data, config.seed, usable=can_use)
    check_examples(rewards, splits.listed, "training")
    prints = splits.fingerprints() | fingerprints(config)
    settings = {**config.model_dump(mode="json"), FILES: prints}
    check_ranks(settings)
    if state is not None:
        check_same(state.settings, settings)
    return rewards, splits, settings


def _load_policy(config: RunConfig, questions: Splits) -> Policy:
    policy = load_policy(config.model, build_tokenizer(config.model, questions))
    policy.template_kwargs = config.data.template_kwargs
    ranks.align(policy.model)
    return policy


def _ask(config: RunConfig, questions: Splits, policy: Policy) -> tuple[Splits, Splits, list[str]]:
    """Format the questions for the model, for example with its chat template.

    Returns:
        The data without few-shot examples in the prompts, the data with them, and log lines about
        the format of the questions.

    Raises:
        ValueError: a prompt is too long for the model.
    """
    questions = questions.for_tokenizer(policy.tokenizer, with_shots=False)
    splits = questions
    longest = config.rollout.max_new_tokens
    # Prompts with worked examples are built when a step needs them, so check their length here.
    # Some tokenizers need one more token between two examples, which adds less than 1% of tokens.
    shots = config.data.shots_tokens
    if shots is not None:
        splits = questions.for_tokenizer(policy.tokenizer)
        prompts = sorted((e.prompt for e in questions.train), key=lambda prompt: len(str(prompt)))
        ids = encode_prompts(policy.tokenizer, prompts[-64:], policy.template_kwargs)
        question = max(map(len, ids))
        room = (policy.positions + 1 - question - longest) / 1.01
        others = f"{longest} new tokens and a question of {question} tokens"
        expected = f"at most {room:.0f} with {others} (max_position_embeddings: {policy.positions})"
        require(shots <= room, "data.shots_tokens", expected, shots)
    check_prompts(policy, [example.prompt for example in splits.listed], longest)
    lines = asking_lines(splits.data, policy.tokenizer, splits.train[0].prompt)
    return questions, splits, lines


# ------------------------------------------------------------- Table of completions (in part 7)
def _log_completions(report: RunReport, number: int, batch: StepBatch, run: Run) -> None:
    """Write the table of completions of a step if it is due."""
    config = run.config
    every = config.log.completions_every
    if not every or not (number in (1, config.steps) or number % every == 0):
        return
    size = config.rollout.group_size
    samples = batch.samples
    shown = samples[list(range(min(len(samples), math.ceil(SHOWN / size) * size)))]
    examples = run.collector.examples_of(shown)
    sent = prompt_texts(run.policy, [example.prompt for example in examples])
    rows = rows_of(
        shown, batch.used_advantages(), examples, sent, run.policy.tokenizer,
        partial(scorer_for, config.data.task), group_size=size,
    )  # fmt: skip
    ranks.from_main(lambda: report.completions(number, rows))
