"""Test the advantages of every mode against plain loops over groups.

Groups with equal rewards must get exactly 0, and missing rewards must be excluded.
"""

import math
import statistics
import warnings

import pytest
import torch

from grpo_fast import group_advantages
from grpo_fast.objective.ppo import gae
from tests.pairs import pairs

WITHOUT_GROUPS = ("rewards", "baseline")
MODES = (
    "rewards", "baseline", "centered", "normalized", "max", "max_code", "batch", "rloo",
    "rloo_normalized", "reinforce_pp_baseline", "opo", "passk",
)  # fmt: skip
GROUPS = [[1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 1.0, 0.0], [2.0, -1.0, 2.0, 0.5]]
LENGTHS = [[10, 20, 5, 7], [3, 3, 9, 1], [8, 2, 2, 4]]
RAGGED = [[1.0, 0.0, 0.5, 0.25], [0.0, 0.0, 1.0], [2.0, -1.0, 2.0, 0.5, 0.125, 0.0]]
RAGGED_LENGTHS = [[10, 20, 5, 7], [3, 3, 9], [8, 2, 2, 4, 1, 6]]


def flat(groups):
    return torch.tensor([r for group in groups for r in group])


def options_of(mode, lengths):
    return {"value": 0.3} if mode == "baseline" else {"lengths": lengths} if mode == "opo" else {}


def group_by_group(mode, groups, lengths_of_groups=LENGTHS):
    """Compute the advantages of `mode` directly from its definition, one number at a time."""
    rewards = [r for g in groups for r in g]
    centered = [r - statistics.fmean(g) for g in groups for r in g]
    out = []
    for g, lengths in zip(groups, lengths_of_groups, strict=True):
        mean, best = statistics.fmean(g), max(g)
        for i, r in enumerate(g):
            others = g[:i] + g[i + 1 :]
            beside, spread = r - statistics.fmean(others), statistics.stdev(others)
            shifted = r - mean - statistics.fmean(centered)
            by_length = sum(n * x for n, x in zip(lengths, g, strict=True)) / sum(lengths)
            defined = {
                "rewards": r,
                "baseline": r - 0.3,
                "centered": r - mean,
                "normalized": (r - mean) / (statistics.stdev(g) + 1e-4),
                "biased": (r - mean) / (statistics.pstdev(g) + 1e-4),
                "max": r - mean if r == best else 0.0,
                "max_code": r if r == best else 0.0,
                "batch": (r - mean) / (statistics.stdev(rewards) + 1e-4),
                "rloo": beside,
                "rloo_normalized": beside / (spread + 1e-6 if spread else 1.0),
                "reinforce_pp_baseline": shifted / (statistics.pstdev(centered) + 1e-8),
                "opo": r - by_length,
                # In "passk" with k = G, the advantage of the best completion is its reward minus
                # the best reward of the other completions. All other advantages are 0.
                "passk": best - max(others) if r == best and g.index(best) == i else 0.0,
            }
            out.append(defined[mode])
    return torch.tensor(out)


@pytest.mark.parametrize("mode", [*MODES, "biased"])
def test_modes(mode):
    rewards, options = flat(GROUPS), options_of(mode, flat(LENGTHS))
    given = ("normalized", {"unbiased": False}) if mode == "biased" else (mode, options)
    own = group_advantages(rewards, given[0], group_size=4, **given[1])
    by_id = [x for x in "abc" for _ in range(4)]
    assert torch.equal(group_advantages(rewards, given[0], groups=by_id, **given[1]), own)
    assert own.dtype == torch.float32 and own.shape == (12,)
    torch.testing.assert_close(own, group_by_group(mode, GROUPS), rtol=1e-5, atol=1e-6)
    assert torch.equal(rewards, flat(GROUPS))


@pytest.mark.parametrize("ids", ["tensor", "words"])
@pytest.mark.parametrize("mode", [*MODES, "biased"])
def test_groups_of_unequal_size_in_any_order(mode, ids):
    numbers = torch.tensor([n for n, group in enumerate(RAGGED) for _ in group])
    order = torch.randperm(len(numbers))
    lengths = flat(RAGGED_LENGTHS)[order]
    given = ("normalized", {"unbiased": False}) if mode == "biased" else (mode, {})
    options = given[1] | options_of(mode, lengths)
    groups = 7 - 3 * numbers[order]
    if ids == "words":
        groups = [("prompt", str(n)) for n in groups.tolist()]
    own = group_advantages(flat(RAGGED)[order], given[0], groups=groups, **options)
    expected = group_by_group(mode, RAGGED, RAGGED_LENGTHS)[order]
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", [m for m in MODES if m not in WITHOUT_GROUPS])
def test_a_group_of_one_by_id_is_zero_and_changes_no_other_group(mode):
    """Check a group with one completion, and one in which only one completion has a reward."""
    rewards = torch.tensor([5.0, 1.0, 0.0, 0.5, 3.0, math.nan])
    groups = [1, 0, 0, 0, 2, 2]
    own = group_advantages(rewards, mode, groups=groups, **options_of(mode, torch.ones(6)))
    assert own[[0, 4, 5]].tolist() == [0, 0, 0] and own[1:4].any()
    if mode not in ("batch", "reinforce_pp_baseline"):  # these use statistics of the batch
        alone = group_advantages(
            rewards[1:4], mode, group_size=3, **options_of(mode, torch.ones(3))
        )
        torch.testing.assert_close(own[1:4], alone, rtol=1e-6, atol=0)


@pairs(mode=[m for m in MODES if m not in WITHOUT_GROUPS],
       value=[0.0, 1.0, 0.1, 1 / 3, -7.7, 1e-30, 1e30, 16777217.0], G=[2, 3, 7, 8])  # fmt: skip
def test_a_group_of_equal_rewards_is_exactly_zero(G, value, mode):
    """Check that a group of equal rewards gets advantages of exactly 0 despite rounding.

    For example, the floating-point mean of seven times 0.1 is not 0.1. A second group has either
    equal rewards or different rewards. If they differ, its advantages must not all be 0.
    """
    options = options_of(mode, torch.arange(1, 2 * G + 1))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for beside in ([value] * G, [1.0] + [0.0] * (G - 1)):
            rewards = torch.tensor([value] * G + beside, dtype=torch.float64).to(dtype)
            own = group_advantages(rewards, mode, group_size=G, **options)
            assert (own[:G] == 0).all() and own[G:].any() == (beside[0] != beside[1])


@pytest.mark.parametrize("mode", MODES)
def test_groups_of_one_are_refused_where_nothing_could_be_learnt(mode):
    """Check that a group size of 1 raises an error in a mode in which all advantages would be 0.

    Loading a recipe with these settings must raise the same error.
    """
    from grpo_fast.train.config import load_recipe

    rewards = torch.tensor([1.0, 0.0, 0.5])
    settings = ["rollout.group_size=1", f"advantages={mode}"]
    if mode in WITHOUT_GROUPS:
        assert torch.equal(group_advantages(rewards, mode, group_size=1), rewards)
        assert load_recipe("sort", settings).rollout.group_size == 1
        return
    said = f"group_size: expected at least 2 of mode '{mode}', got 1: all advantages would be 0"
    with pytest.raises(ValueError, match=said):
        group_advantages(rewards, mode, group_size=1, **options_of(mode, torch.ones(3)))
    with pytest.raises(ValueError, match=said):
        load_recipe("sort", settings)


@pytest.mark.parametrize(
    "mode", ["baseline", "centered", "normalized", "max", "max_code", "rloo", "opo", "passk"]
)
def test_a_missing_verdict_is_as_if_the_completion_were_not_there(mode):
    """Check that a completion without a reward (NaN) does not change other advantages.

    The other completions must get the advantages of a group without this completion.
    """
    rewards, lengths = torch.tensor([1.0, math.nan, 0.0, 0.4]), torch.tensor([4, 9, 2, 7])
    keep = ~rewards.isnan()
    own = group_advantages(rewards, mode, group_size=4, **options_of(mode, lengths))
    options = options_of(mode, lengths[keep])
    expected = group_advantages(rewards[keep], mode, group_size=3, **options)
    assert own[1] == 0
    torch.testing.assert_close(own[keep], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rewards", [torch.full((4,), math.nan), torch.zeros(0)], ids=len)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_without_any_verdict_is_zero_without_a_warning(mode, rewards):
    with warnings.catch_warnings(action="error"):
        options = options_of(mode, torch.ones_like(rewards))
        own = group_advantages(rewards, mode, group_size=2, **options)
    assert own.shape == rewards.shape and not own.any()


ONES = torch.ones(4)
REFUSED = [  # each entry has the expected message, and the invalid arguments
    ("rewards", {"rewards": torch.ones(2, 2)}),
    ("rewards", {"rewards": [1.0, 2.0]}),
    ("rewards", {"rewards": torch.tensor([1.0, math.inf])}),
    ("rewards: .* got torch.complex64", {"rewards": ONES * 1j}),
    ("rewards", {"rewards": torch.tensor([1e308, 0.0], dtype=torch.float64), "mode": "max"}),
    ("rewards", {"rewards": torch.tensor([3e38] * 3 + [-3e38]), "group_size": 4, "mode": "rloo"}),
    ("group_size", {"rewards": torch.ones(5)}),
    *[("group_size", {"group_size": x}) for x in (0, 2.0)],
    ("group_size: expected exactly one of group_size and groups, got neither",
     {"group_size": None}),
    ("group_size: expected exactly one .* got both", {"groups": [0, 0, 1, 1]}),
    *[("groups: expected a group for each of 4 rewards", {"group_size": None, "groups": x})
      for x in ("aabb", [1, 2], [[1]] * 4, torch.ones(4), torch.ones(2, 2, dtype=torch.int), 3)],
    ("mode", {"mode": "mean"}),
    ("eps", {"mode": "centered", "eps": 1.0}),
    *[("eps", {"eps": x}) for x in (math.nan, -1.0, "small")],
    ("unbiased", {"unbiased": "no"}),
    ("lengths", {"mode": "opo"}),
    *[("lengths", {"mode": "opo", "lengths": x})
      for x in ([1] * 4, torch.ones(3), *(torch.tensor([1, 1, 1, x]) for x in (-1.0, math.nan)))],
    ("value: expected a finite number, got nan", {"mode": "baseline", "value": math.nan}),
    ("running: expected one of", {"mode": "baseline", "running": True}),
    *[(f"{name}: expected", {name: x})
      for name, x in (("clip_low", 0.1), ("clip_high", -0.1), ("clip_high", math.nan))],
]  # fmt: skip


@pytest.mark.parametrize(("said", "changes"), REFUSED, ids=str)
def test_refusals(said, changes):
    with pytest.raises(ValueError, match=said):
        group_advantages(**{"rewards": ONES, "group_size": 2, **changes})


def test_clipping():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, math.nan, 0.0])
    found = group_advantages(rewards, group_size=4)
    bounds = {"clip_low": -0.3, "clip_high": 1.0}
    clipped = group_advantages(rewards, group_size=4, **bounds)
    assert torch.equal(clipped, found.clamp(-0.3, 1.0)) and not torch.equal(clipped, found)


ROWS = {"rewards": torch.ones(2, 6), "values": torch.ones(2, 6)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *[(ROWS | {"gamma": x}, "gamma") for x in (1.5, "a")],
        (ROWS | {"values": torch.ones(2, 3)}, "values"),
        (ROWS | {"mask": torch.ones(3)}, "mask"),
        (ROWS | {"rewards": [[1.0]]}, "rewards"),
        *[(ROWS | {"lam": x}, "lam: expected") for x in (1.1, math.nan, torch.tensor([0.5]))],
    ],
)  # fmt: skip
def test_refusals_of_gae(given, said):
    with pytest.raises(ValueError, match=said):
        gae(**given)
