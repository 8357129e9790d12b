"""Tests of the recipe `notebook` with tiny GPT-2 models.

The recipe uses prompts without answers, a separate reference model, and one importance ratio per
completion.
"""

import math

import pytest
import torch

from grpo_fast.attention import pack_groups
from grpo_fast.data.splits import Splits
from grpo_fast.rewards import build_rewards
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.models.loading import load_policy, self_check
from tests.tiny import tiny_folder
from tests.train import tiny_runs

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpt2")
    return [tiny_folder(root / name, "gpt2", seed=i) for i, name in enumerate(("policy", "other"))]


def test_learned_absolute_positions_of_the_notebook_are_packed_rightly(models):
    """Check that the positions of a completion follow those of its prompt in a packed batch.

    The log-probs must be the same with and without shared prompts.
    """
    policy = load_policy(ModelConfig(path=models[0]))
    assert self_check(policy) < 1e-4 and policy.positions == 512
    groups = [([5, 6, 7], [[8, 9], [10, 11, 12]]), ([20, 21], [[22, 23, 24], [25]])]
    one = policy.logps(pack_groups(groups, shared=True))
    torch.testing.assert_close(one, policy.logps(pack_groups(groups, shared=False)))


def test_the_notebooks_rewards_have_room(tmp_path, models):
    """Check the rewards of the recipe, which need no gold answers.

    A tiny model must increase its mean reward within 24 steps.
    """
    config = load_recipe("notebook")
    examples = Splits(config.data, 0).train
    assert len(examples) == 8 and all(e.answer is None and e.solution is None for e in examples)
    texts = ["the cat the CAT", "One two three.", "", "  "]
    found = build_rewards(config.rewards)([""] * 4, texts, [None] * 4)
    assert found.total.tolist() == [0.5, 2.0, 0.0, 0.0] and not any(found.reasons.values())
    settings = [f"model.path={models[0]}", f"reference.path={models[1]}", "steps=24",
                "optim.lr=3e-3", "rollout.max_new_tokens=8", "log.progress=false",
                "log.save_model=false"]  # fmt: skip
    rows = tiny_runs.run(tmp_path, "notebook", *settings)[1]
    # The KL is already positive in step 1, because the reference differs from the policy.
    assert rows[0]["kl"] > 0.01 and rows[0]["ratio/max"] > 1.0
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    first, last = ([row["reward"] for row in part] for part in (rows[:4], rows[-4:]))
    assert sum(last) > sum(first) + 0.8
