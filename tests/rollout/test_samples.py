"""Tests of the table of samples: selection, joining and writing."""

import dataclasses

import pytest
import torch

from grpo_fast import Support
from grpo_fast.rollout import Completion, Samples
from grpo_fast.rollout.engine import EOS, LENGTH
from grpo_fast.rollout.samples import COLUMNS, table_of

PROMPTS = [[3, 4], [5]]
COMPLETIONS = [[6, 7, 1], [8], [9, 1], [2, 2, 2]]
SUPPORTS = [
    Support(torch.tensor([6, 7, 7, 1]).int(), torch.tensor([0, 2, 3, 4])),
    None,
    Support(torch.tensor([9, 1, 2]).int(), torch.tensor([0, 1, 3])),
    None,
]
MASSES = [torch.tensor(masses) for masses in ([0.9, 1, 1], [1.0], [0.4, 0.5], [1.0, 1, 1])]


def table(**changes):
    """Build a `Samples` table of two prompts with two completions each.

    Samples 0 and 2 have a support, which is the set of tokens that the sampler kept. Keyword
    arguments replace columns of the table.
    """
    completions = []
    for i, ids in enumerate(COMPLETIONS):
        logps = torch.arange(len(ids)) - 10.0 * i
        reason = EOS if 1 in ids else LENGTH
        completions.append(Completion(ids, logps, reason, i, SUPPORTS[i], MASSES[i]))
    samples = table_of(PROMPTS, completions, [f"t{i}" for i in range(4)], [5, 9])
    samples.rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    samples.scores = {"f": samples.rewards + 10}
    samples.values = torch.arange(9.0)
    return dataclasses.replace(samples, **changes)


def test_the_columns_are_flat():
    samples = table()
    assert samples.ids.tolist() == [3, 4, 6, 7, 1, 3, 4, 8, 5, 9, 1, 5, 2, 2, 2]
    assert samples.segment.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1]
    assert samples.cu_seqlens.tolist() == [0, 5, 8, 11, 15] and len(samples) == 4
    assert samples.rows.tolist() == [0, 3, 4, 6, 9] and samples.lengths == [3, 1, 2, 3]
    assert samples.group.tolist() == [5, 5, 9, 9] and samples.prompt_lengths == [2, 2, 1, 1]
    assert samples.truncated.tolist() == [False, True, False, True]
    assert samples.weight_version.tolist() == [0, 1, 2, 3]
    assert samples.prompt_ids == [[3, 4], [3, 4], [5], [5]]
    assert samples.completion_ids == COMPLETIONS
    assert samples.support.ids.tolist() == [6, 7, 7, 1, 9, 1, 2]
    assert samples.support.offsets.tolist() == [0, 2, 3, 4, 4, 5, 7, 7, 7, 7]
    assert samples.mass.tolist() == pytest.approx([0.9, 1, 1, 1, 0.4, 0.5, 1, 1, 1])
    unknown = Completion([5], torch.zeros(1), LENGTH, 0)
    assert table_of([[1]], [unknown]).mass is None


@pytest.mark.parametrize("chosen", [[0], [3, 0], [2, 1, 0], [1, 1], [1, 3]])
def test_selecting_is_indexing(chosen):
    whole, part = table(), table()[chosen]
    assert part.completion_ids == [COMPLETIONS[i] for i in chosen]
    assert part.prompt_ids == [whole.prompt_ids[i] for i in chosen]
    assert part.texts == [f"t{i}" for i in chosen]
    assert part.rewards.tolist() == [i + 1 for i in chosen]
    assert part.scores["f"].tolist() == [i + 11 for i in chosen]
    assert part.truncated.tolist() == [bool(whole.truncated[i]) for i in chosen]
    for name in ("logps", "values", "mass"):
        views = getattr(whole, name).split(whole.lengths)
        expected = torch.cat([views[i] for i in chosen])
        torch.testing.assert_close(getattr(part, name), expected, equal_nan=True)
    sets = [SUPPORTS[i] for i in chosen if SUPPORTS[i] is not None]
    if sets:
        assert part.support.ids.tolist() == [x for one in sets for x in one.ids.tolist()]
    assert (part.support is None) == (not sets)


def test_joining_restores_the_table():
    whole = table()
    joined = Samples.cat([whole[[0, 1]], None, whole[[2]], whole[[3]]])
    assert joined.texts == whole.texts and joined.completion_ids == whole.completion_ids
    for name in (*COLUMNS, "support", "scores"):
        ours, theirs = getattr(joined, name), getattr(whole, name)
        torch.testing.assert_close(ours, theirs, equal_nan=True, msg=name)
    one = whole[[0]]
    assert Samples.cat([None, one]) is one
    assert Samples.cat([table(values=None)[[0]], one]).values is None


def test_writing_creates_a_column():
    samples = table(values=None)
    samples.write("values", torch.tensor([4, 2]), torch.tensor([1.5, 2.5]))
    samples.write("values", torch.tensor([0]), torch.tensor([7.0]))
    assert samples.values.tolist() == [7, 0, 2.5, 0, 1.5, 0, 0, 0, 0]
    samples.write("ref_hidden", torch.tensor([8]), torch.ones(1, 2))
    assert samples.ref_hidden.shape == (9, 2) and samples.ref_hidden.sum() == 2
