"""A run: model and data, a step after the other (trainer.py), evaluations, the run's folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_fast.data import Example, load_examples
from grpo_fast.data.tokenizer import token_counter
from grpo_fast.kernels import route
from grpo_fast.rewards import build_rewards, check_examples
from grpo_fast.rollout import NonFiniteLogits, check_prompts
from grpo_fast.train.config import RunConfig
from grpo_fast.train.critic import load_critic
from grpo_fast.train.evaluate import EvalResult, build_evaluation
from grpo_fast.train.folder import check_folder
from grpo_fast.train.loading import build_tokenizer, load_policy
from grpo_fast.train.metrics import finite, is_policy_alone
from grpo_fast.train.planning.budget import host_peak
from grpo_fast.train.prompts import PromptQueue, log_prompts
from grpo_fast.train.reference import check_reference
from grpo_fast.train.report import RunReport, kernels_line, memory_line
from grpo_fast.train.trackers import check_trackers
from grpo_fast.train.trainer import Trainer
from grpo_fast.train.warm_start import warm_start

LOSS_IS_ZERO = (
    "one update per batch: the loss stays near 0 while its gradient does not; watch reward and "
    "grad_norm"
)


def train(config: RunConfig) -> dict[str, Any]:
    """Run a recipe; returns the summary that also lies in `output_dir/summary.json`.

    The same configuration on the same machine gives the same metrics bit for bit, timings apart.

    Raises:
        ValueError: a configuration, data or a model that cannot be used.
        NonFiniteLogits, NonFiniteGradient, RewardError: the run cannot go on.
    """
    started, memory_before = time.perf_counter(), host_peak()
    torch.manual_seed(config.seed)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
    check_folder(config.output_dir)
    check_trackers(config.log.trackers)
    rewards = build_rewards(config.rewards, max_failures=config.max_reward_failures)
    plain = config.data.model_copy(update={"shots_tokens": None})
    questions = load_examples(plain, split="train", seed=config.seed)
    # Of examples that are made when asked for, all alike, the first is checked.
    known = questions if isinstance(questions, list) else questions[:1]
    check_examples(rewards, known, "training")
    policy = load_policy(config.model, build_tokenizer(config, questions))
    check_reference(config.reference, config.model, policy.tokenizer)
    counted = token_counter(policy.tokenizer)
    examples = load_examples(config.data, split="train", seed=config.seed, count_tokens=counted)
    listed = examples if isinstance(examples, list) else examples[:1]
    check_prompts(policy, [example.prompt for example in listed], config.rollout.max_new_tokens)
    evaluate = build_evaluation(config, policy, rewards)
    kernels = {
        "backend": route.head_route("auto", policy.head.weight).backend,
        "backend_fallback": route.fallback_reason(policy.device.type),
    }
    with RunReport(config.output_dir, config) as report:
        report.note(kernels_line(kernels))
        if config.warm_start is not None:
            warm_start(policy, questions, config.warm_start, seed=config.seed, log=report.log)
        trainer = Trainer(config, policy, rewards, load_critic(config, policy))
        try:
            report.log(0, before := evaluate().metrics)
            after = run_steps(trainer, examples, evaluate, report) or before
        except NonFiniteLogits as error:
            when = f"at step {trainer.steps}" if trainer.steps else "before the first step"
            advice = "a lower optim.lr or a wider model.dtype may help"
            raise NonFiniteLogits(f"{error} {when}; {advice}") from None
        if config.log.save_model:
            policy.save(f"{config.output_dir}/model")
            if trainer.critic is not None:
                trainer.critic.save(f"{config.output_dir}/critic")
        summary = {"before": before, "after": after, **kernels, **trainer.summary(memory_before)}
        summary["seconds"] = time.perf_counter() - started
        report.finish(summary)
        report.note(memory_line(summary))
    return summary


def run_steps(
    trainer: Trainer,
    examples: Sequence[Example],
    evaluate: Callable[[], EvalResult],
    report: RunReport,
) -> dict[str, float] | None:
    """All steps, evaluated and reported along the way; returns the last evaluation's metrics."""
    config, after = trainer.config, None
    if trainer.updates == 1 and is_policy_alone(trainer.loss_config) and trainer.critic is None:
        report.note(LOSS_IS_ZERO)
    queue = PromptQueue(examples)
    for step in range(1, config.steps + 1):
        metrics, collected = trainer.step(step, queue)
        log_prompts(report.folder, collected.prompts)
        if step == config.steps or (config.eval.every and step % config.eval.every == 0):
            metrics |= (after := evaluate().metrics)
        for row in trainer.update_rows:
            report.log(step, row)
        report.log(step, finite(metrics))
        every = config.log.completions_every
        if every and (step in (1, config.steps) or step % every == 0):
            report.completions(step, trainer.rows(collected))
    return after
