"""Preparation of a run before its first step.

`load` loads the data, the rewards and the models. `build` builds the trainer and the collector.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from grpo_fast.data.splits import Splits
from grpo_fast.errors import require
from grpo_fast.rewards import RewardSet, build_rewards, check_examples
from grpo_fast.rewards.conventions import OURS
from grpo_fast.rollout import Engine, check_prompts, encode_prompts
from grpo_fast.train.collect.advantages import Advantages
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.collect.groups import PromptQueue
from grpo_fast.train.config import RunConfig
from grpo_fast.train.evaluation.asking import asking_lines
from grpo_fast.train.evaluation.evaluate import build_evaluation
from grpo_fast.train.models.loading import build_tokenizer, load_policy
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import Reference, load_another
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport, check_trackers
from grpo_fast.train.runs.fingerprints import FILES, check_ranks, check_same, fingerprints
from grpo_fast.train.runs.resume import Start, resume
from grpo_fast.train.runs.saving import Saver
from grpo_fast.train.runs.stopping import Stopping
from grpo_fast.train.update.critic import load_critic
from grpo_fast.train.update.trainer import Trainer
from grpo_fast.train.update.warm_start import warm_start

Evaluation = Callable[[Engine], dict[str, float]]


class Loaded(NamedTuple):
    """The loaded inputs and models of a run."""

    rewards: RewardSet
    questions: Splits  # the data without few-shot examples in the prompts, for a warm start
    splits: Splits  # the data with few-shot examples in the prompts
    settings: dict[str, Any]  # the configuration, and fingerprints of the files that it names
    policy: Policy
    another: Policy | None  # the reference model, or None if the policy provides the reference
    evaluate: Evaluation
    asking: list[str]  # log lines about the format of questions and the signatures of rewards


def load(start: Start) -> Loaded:
    """Load the rewards, the data and the models, and check them. All ranks must call this.

    Raises:
        ValueError: an input is invalid, differs between ranks, or has changed since the run began.
    """
    config = start.config
    _be_deterministic(config.seed)
    check_trackers(config.log.trackers)
    fits = start.warm_start is None or not config.is_sharded
    require(fits, "warm_start", "one process or distributed=ddp", config.distributed)
    # 1. Load rewards and data. They load faster than models, so their errors appear early.
    rewards, questions, settings = _load_inputs(start)
    # 2. Load the models.
    policy, another = _load_models(config, questions)
    # 3. Format the questions for the model, for example with its chat template.
    questions = questions.for_tokenizer(policy.tokenizer, encode_prompts)
    splits = questions.with_shots(policy.tokenizer)
    longest = config.rollout.max_new_tokens
    _check_shots(policy, questions, splits.train, longest)
    check_prompts(policy, [example.prompt for example in splits.listed], longest)
    evaluate = build_evaluation(config.eval, splits, policy, rewards, longest)
    asking = asking_lines(splits.data, policy.tokenizer, splits.train[0].prompt)
    asking += [
        f"reward {reward.name}: called as {reward.convention} calls it"
        for reward in rewards.rewards if reward.convention != OURS
    ]  # fmt: skip
    return Loaded(rewards, questions, splits, settings, policy, another, evaluate, asking)


def _check_shots(policy: Policy, questions: Splits, asked: Any, max_new_tokens: int) -> None:
    """Raise a ValueError if `data.shots_tokens` leaves too little room for the longest question.

    Prompts with worked examples are built when a step needs them. Without this check, a prompt that
    is too long would end the run in the middle.

    Args:
        policy: the policy.
        questions: the questions without worked examples.
        asked: the training prompts with worked examples, as `ShotPrompts`.
        max_new_tokens: largest number of sampled tokens.
    """
    shots = questions.data.shots_tokens
    if shots is None or math.isinf(policy.positions):
        return
    prompts = sorted((e.prompt for e in questions.train), key=lambda prompt: len(str(prompt)))
    ids = encode_prompts(policy.tokenizer, prompts[-64:], policy.template_kwargs)
    longest = max(map(len, ids))
    # Some tokenizers need one more token between two examples. This adds less than 1% of tokens.
    room = int((policy.positions + 1 - longest - max_new_tokens) / 1.01)
    expected = f"at most {room} with {max_new_tokens} new tokens and a question of {longest}"
    limit = f"max_position_embeddings: {policy.positions}"
    fits = shots <= room or asked.all_tokens() <= room
    require(fits, "data.shots_tokens", f"{expected} ({limit})", shots)


def _be_deterministic(seed: int) -> None:
    """Seed torch, and request deterministic operations on a GPU."""
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        # By default, deterministic mode also fills every new buffer of torch.empty. Turn this off,
        # because it costs an extra pass over memory.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _load_inputs(start: Start) -> tuple[RewardSet, Splits, dict[str, Any]]:
    """Load the rewards and the data, and check that all ranks have the same inputs.

    All ranks must call this.

    Returns:
        The rewards, the data, and the settings with fingerprints of the files that they name.
    """
    config = start.config
    with distributed.together():
        rewards = build_rewards(config.rewards, max_failures=config.max_reward_failures)
        splits = Splits(config.data, config.seed)
        check_examples(rewards, splits.listed, "training")
        prints = splits.fingerprints() | fingerprints(config)
    settings = {**config.model_dump(mode="json"), FILES: prints}
    check_ranks(settings)
    if start.state is not None:
        check_same(start.state.settings, settings, config.resume_allow)
    return rewards, splits, settings


def _load_models(config: RunConfig, questions: Splits) -> tuple[Policy, Policy | None]:
    """Load the policy and, if `reference.path` is set, the reference. All ranks must call this."""
    is_empty = config.is_sharded and not distributed.is_main()  # rank 0 sends the weights later
    with distributed.together():
        tokenizer = build_tokenizer(config.model, questions)
        policy = load_policy(config.model, tokenizer, empty=is_empty)
        policy.template_kwargs = config.data.template_kwargs
        another = load_another(config.reference, config.model, policy)
    if not config.is_sharded:
        distributed.align(policy.model)
    return policy, another


def build(
    start: Start, loaded: Loaded, engine: Engine, report: RunReport, stopping: Stopping
) -> Saver:
    """Build the trainer, collector and saver, and load the checkpoint of `start` into them.

    All ranks must call this.

    Args:
        start: the starting point of the run, with or without a checkpoint.
        loaded: the inputs and models of the run.
        engine: the engine that samples completions.
        report: the writer of the logs.
        stopping: the signal handler.

    Returns:
        The saver. Its attributes `trainer` and `collector` are the new objects.
    """
    config = start.config
    policy = loaded.policy
    if start.warm_start is not None:
        examples = loaded.questions.train
        warm_start(policy, examples, start.warm_start, seed=config.seed, log=report.log)
    # Build the reference after the warm start. A reference without a path is a copy of the policy,
    # and the copy must include the warm start.
    reference = Reference(policy, config.reference, loaded.another)
    trainer = Trainer(config, policy, reference, load_critic(config.critic, config.model, policy))
    queue = PromptQueue(loaded.splits.train)
    weights = {reward.name: reward.weight for reward in loaded.rewards.rewards}
    size = config.rollout.group_size
    advantages = Advantages(config.advantages, config.advantage_options, size, weights)
    collector = Collector(
        config.rollout, policy, engine, loaded.rewards, queue, advantages, config.seed, config.steps
    )
    saver = Saver(config, collector, trainer, report, loaded.settings, stopping)
    resume(start, saver)
    return saver
