"""What a run needs before its first step: rewards, data, models, and the objects that train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from grpo_fast.data.splits import Splits
from grpo_fast.rewards import RewardSet, build_rewards, check_examples
from grpo_fast.rewards.conventions import OURS
from grpo_fast.rollout import Engine, check_prompts
from grpo_fast.train.collect.groups import PromptQueue
from grpo_fast.train.collect.recorded import build_collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.evaluation.asking import asking_lines
from grpo_fast.train.evaluation.evaluate import build_evaluation
from grpo_fast.train.models.loading import build_tokenizer, load_policy
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.models.reference import Reference, load_another
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.report.trackers import check_trackers
from grpo_fast.train.runs.fingerprints import FILES, check_ranks, check_same, fingerprints
from grpo_fast.train.runs.resume import Start, resume
from grpo_fast.train.runs.saving import Saver
from grpo_fast.train.runs.stopping import Stopping
from grpo_fast.train.update.critic import load_critic
from grpo_fast.train.update.trainer import Trainer
from grpo_fast.train.update.warm_start import warm_start

Evaluation = Callable[[Engine], dict[str, float]]


class Loaded(NamedTuple):
    """What a run reads before its first step."""

    rewards: RewardSet
    questions: Splits  # without few-shot examples, for a warm start
    splits: Splits
    settings: dict[str, Any]  # and fingerprints of the files that they name
    policy: Policy
    another: Policy | None  # the reference, if it is another model
    evaluate: Evaluation
    asking: list[str]  # how questions are asked, with the first prompt, and rewards called


def load(start: Start) -> Loaded:
    config = start.config
    _be_deterministic(config.seed)
    check_trackers(config.log.trackers)
    rewards, questions, settings = _load_inputs(start)
    policy, another = _load_models(config, questions)
    questions = questions.for_tokenizer(policy.tokenizer)
    splits = questions.with_shots(policy.tokenizer)
    longest = config.rollout.max_new_tokens
    check_prompts(policy, [example.prompt for example in splits.listed], longest)
    evaluate = build_evaluation(config.eval, splits, policy, rewards, longest)
    asking = asking_lines(splits.data, policy.tokenizer, splits.train[0].prompt)
    asking += [
        f"reward {reward.name}: called as {reward.convention} calls it"
        for reward in rewards.rewards if reward.convention != OURS
    ]  # fmt: skip
    return Loaded(rewards, questions, splits, settings, policy, another, evaluate, asking)


def _be_deterministic(seed: int) -> None:
    """Make every run give the same bits.

    torch's fill of empty memory is off: it would sweep once more over each buffer of the loss.
    """
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _load_inputs(start: Start) -> tuple[RewardSet, Splits, dict[str, Any]]:
    """Return rewards, data, and all that the run depends on: settings and fingerprints."""
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
    """Return the policy, and the reference if it is another model."""
    is_dealt = config.is_sharded and not distributed.is_main()  # rank 0 sends the weights
    with distributed.together():
        tokenizer = build_tokenizer(config.model, questions)
        policy = load_policy(config.model, tokenizer, empty=is_dealt)
        policy.template_kwargs = config.data.template_kwargs
        another = load_another(config.reference, config.model, policy)
    if not config.is_sharded:
        distributed.align([policy.model])
    return policy, another


def build(
    start: Start, loaded: Loaded, engine: Engine, report: RunReport, stopping: Stopping
) -> Saver:
    """Build trainer, collector and saver, and load the checkpoint that the run starts from."""
    config = start.config
    policy = loaded.policy
    if config.warm_start is not None and start.checkpoint is None:
        warm_start(
            policy, loaded.questions.train, config.warm_start, seed=config.seed,
            is_sharded=config.is_sharded, log=report.log,
        )  # fmt: skip
    # After the warm start: a frozen reference is a copy of the policy that it led to.
    reference = Reference(policy, config.reference, loaded.another)
    trainer = Trainer(config, policy, reference, load_critic(config.critic, config.model, policy))
    queue = PromptQueue(loaded.splits.train)
    collector = build_collector(config, policy, engine, loaded.rewards, queue)
    saver = Saver(config, collector, trainer, report, loaded.settings, stopping)
    resume(start, saver)
    return saver
