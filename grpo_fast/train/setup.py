"""What a run is made of, built from its configuration before the first step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from grpo_fast.data import Example, load_examples, task_symbols
from grpo_fast.data.tokenizer import build_bpe_tokenizer, build_symbol_tokenizer
from grpo_fast.rewards import RewardSet, scorer_for
from grpo_fast.rollout.hf import encode_for
from grpo_fast.train.config import RunConfig
from grpo_fast.train.evaluate import EvalResult, evaluate, policy_generate
from grpo_fast.train.policy import Policy, load_policy

BPE_TEXTS = 4000  # training examples a BPE tokenizer is trained on


def build_policy(config: RunConfig, questions: Sequence[Example]) -> Policy:
    """The policy, with a tokenizer built from the training questions where the configuration asks for one."""
    tokenizer: Any = None
    if config.model.tokenizer == "symbols":
        tokenizer = build_symbol_tokenizer(task_symbols(config.data))
    elif config.model.tokenizer == "bpe":
        texts = [f"{e.prompt} {e.solution or e.answer}" for e in itertools.islice(questions, BPE_TEXTS)]
        tokenizer = build_bpe_tokenizer(texts, config.model.vocab_size)
    return load_policy(config.model, tokenizer)


def plain_examples(config: RunConfig) -> Sequence[Example]:
    """The training set without worked examples of a token budget."""
    return load_examples(config.data.model_copy(update={"shots_tokens": None}), split="train", seed=config.seed)


def examples_for(config: RunConfig, policy: Policy, split: str) -> Sequence[Example]:
    """The examples of a split as the policy sees them."""
    return load_examples(config.data, split=split, seed=config.seed, count_tokens=token_counter(policy.tokenizer))


def check_prompts(policy: Policy, examples: Sequence[Example]) -> None:
    """Refuse at the start the prompts that `generate` would refuse in the middle of a run.

    Only those that may be too long are encoded: a token has at least one byte, and a chat template
    adds less than half of what a model has room for. Of examples that are made when asked for (they
    are all alike) it is the first.
    """
    chosen = examples if isinstance(examples, list) else examples[:1]
    prompts = [example.prompt for example in chosen]
    encode_for(policy, [p for p in prompts if 2 * len(str(p).encode()) > policy.positions])


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """A function that counts the tokens of a text, special ones apart."""
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def build_evaluation(config: RunConfig, policy: Policy, rewards: RewardSet) -> Callable[[], EvalResult]:
    """A function that evaluates the policy as it is on the held-out prompts: the same prompts and seed each time."""
    test_set = examples_for(config, policy, "test")
    examples = [test_set[i] for i in range(min(len(test_set), config.eval.n or len(test_set)))]
    check_prompts(policy, examples)
    scorer = scorer_for(config.data.task, [e.answer for e in examples])
    answer = policy_generate(
        policy, max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens, top_p=config.eval.top_p,
        top_k=config.eval.top_k,
    )  # fmt: skip
    options: dict[str, Any] = dict(
        samples=config.eval.samples, temperature=config.eval.temperature, k=config.eval.k,
        batch_size=config.eval.batch_size, seed=config.seed,
    )  # fmt: skip
    return lambda: evaluate(answer, examples, rewards, scorer, **options)


def prompts_of(train_set: Sequence[Example], step: int, count: int) -> list[Example]:
    """The prompts of a step (from 1): the training set in its order, round and round."""
    first = (step - 1) * count
    return [train_set[i % len(train_set)] for i in range(first, first + count)]
