"""`grpo-fast doctor`: self-tests of this machine, and a rollout engine against the trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch

from grpo_fast.data import load_examples
from grpo_fast.data.tokenizer import token_counter
from grpo_fast.doctor.diagnosis import Diagnosis, diagnose
from grpo_fast.doctor.report import Report
from grpo_fast.doctor.selftest import Check, attention_checks, kernel_checks
from grpo_fast.doctor.selftest_runs import run_checks
from grpo_fast.doctor.settings import Words
from grpo_fast.rollout import build_engine
from grpo_fast.train.config import RunConfig
from grpo_fast.train.models.loading import build_tokenizer, load_policy


def examine(words: Sequence[str]) -> Report:
    """Run the self-tests and, where the words name a model, examine its engine.

    Raises:
        ValueError: words, a model, data or an engine that cannot be used.
        RuntimeError, NonFiniteLogits: an engine that answers no completions.
    """
    asked = Words(words)
    # The engine first: a typing mistake or a server that is gone is told at once.
    with _working("a rollout against the trainer"):
        diagnosis = None if asked.config is None else examine_engine(asked)
    with _working("self-tests of this machine, about a minute"):
        checks = self_checks() if asked.own.self_tests else []
    title = ""
    if asked.config is not None:
        title = f"{asked.config.rollout.engine}: {asked.model or asked.own.recipe}"
    return Report(checks, title, diagnosis)


def show(found: Report, *, as_json: bool) -> None:
    """Print a report: tables, or one JSON object."""
    if as_json:
        print(json.dumps(found.as_json()))
        return
    from rich.console import Console

    for table in found.tables():
        Console().print(table)


def _working(what: str) -> Any:
    from rich.console import Console

    return Console(stderr=True).status(what)  # nothing where stderr is no terminal


def self_checks() -> list[Check]:
    """Every self-test, on the device that training would take."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [*kernel_checks(device), *attention_checks(device), *run_checks(device)]


def examine_engine(asked: Words) -> Diagnosis:
    """Sample some prompts of the configuration with its engine, and explain the difference."""
    config, own = asked.config, asked.own
    torch.manual_seed(config.seed)
    policy, prompts = _policy_and_prompts(config, own.n)
    earlier = asked.previous_config()
    previous = None if earlier is None else load_policy(earlier, policy.tokenizer)
    with build_engine(policy, config.rollout) as engine:
        return diagnose(
            policy, engine, prompts, asked.sampling, group_size=own.samples, seed=config.seed,
            version=int(time.time()),  # no weights that a server has met before have this one
            temperature=float(config.loss_config().temperature), previous=previous,
            threshold=own.threshold, uses_kept=config.rollout.wants_kept,
        )  # fmt: skip


def _policy_and_prompts(config: RunConfig, count: int) -> tuple[Any, list[Any]]:
    plain = config.data.model_copy(update={"shots_tokens": None})
    questions = load_examples(plain, split="train", seed=config.seed)
    policy = load_policy(config.model, build_tokenizer(config, questions))
    counted = token_counter(policy.tokenizer)
    examples = load_examples(config.data, split="train", seed=config.seed, count_tokens=counted)
    return policy, [example.prompt for example in examples[:count]]
