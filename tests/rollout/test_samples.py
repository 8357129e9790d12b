"""Tests of the table of samples: selection, joining, saving, and checks of the columns."""

import dataclasses

import pytest
import torch
from safetensors.torch import load, save

from grpo_fast import Support
from grpo_fast.rollout import Completion, Samples
from grpo_fast.rollout.completions import table_of
from grpo_fast.rollout.engine import EOS, LENGTH

PROMPTS = [[3, 4], [5]]
COMPLETIONS = [[6, 7, 1], [8], [9, 1], [2, 2, 2]]
SUPPORTS = [
    Support(torch.tensor([6, 7, 7, 1]).int(), torch.tensor([0, 2, 3, 4])),
    None,
    Support(torch.tensor([9, 1, 2]).int(), torch.tensor([0, 1, 3])),
    None,
]
MASSES = [torch.tensor([0.9, 1, 1]), None, None, None]


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
    samples.extra = {"said": [str(i) for i in range(len(samples))]}
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
    assert samples.mass[:3].tolist() == pytest.approx([0.9, 1, 1])
    assert samples.mass[3:].isnan().all()
    samples.check(vocab_size=10)


@pytest.mark.parametrize("chosen", [[0], [3, 0], [2, 1, 0], [1, 1], [1, 3]])
def test_selecting_is_indexing(chosen):
    whole, part = table(), table()[chosen]
    assert part.completion_ids == [COMPLETIONS[i] for i in chosen]
    assert part.prompt_ids == [whole.prompt_ids[i] for i in chosen]
    assert part.texts == [f"t{i}" for i in chosen]
    assert part.rewards.tolist() == [i + 1 for i in chosen]
    assert part.scores["f"].tolist() == [i + 11 for i in chosen]
    assert part.extra["said"] == [str(i) for i in chosen]
    assert part.truncated.tolist() == [bool(whole.truncated[i]) for i in chosen]
    for name in ("logps", "values", "mass"):
        views = getattr(whole, name).split(whole.lengths)
        expected = torch.cat([views[i] for i in chosen])
        torch.testing.assert_close(getattr(part, name), expected, equal_nan=True)
    sets = [SUPPORTS[i] for i in chosen if SUPPORTS[i] is not None]
    if sets:
        assert part.support.ids.tolist() == [x for one in sets for x in one.ids.tolist()]
    assert (part.support is None) == (not sets)
    part.check(vocab_size=10)


def test_joining_restores_the_table():
    whole = table()
    joined = Samples.cat([whole[[0, 1]], None, whole[[2]], whole[[3]]])
    assert joined.texts == whole.texts and joined.completion_ids == whole.completion_ids
    ours, theirs = joined.tensors(), whole.tensors()
    assert ours.keys() == theirs.keys()
    for name, column in ours.items():
        torch.testing.assert_close(column, theirs[name], equal_nan=True, msg=name)
    one = whole[[0]]
    assert Samples.cat([None, one]) is one
    assert Samples.cat([table(values=None)[[0]], one]).values is None


def test_a_file_holds_every_column():
    whole = table()
    again = Samples.of_tensors(load(save(whole.tensors())))
    assert again.texts == []  # texts are not saved, because the ids can be decoded
    for name, column in whole.tensors().items():
        torch.testing.assert_close(again.tensors()[name], column, equal_nan=True, msg=name)
    again.check(vocab_size=10)


OFFSETS = torch.tensor([0, 2, 3, 4, 4, 5, 7, 7, 7, 7])
ATTACKS = {
    "a token beyond the vocabulary": {"ids": torch.tensor([*range(14), 10])},
    "a negative token": {"ids": torch.tensor([*range(1, 15), -1]) % 10 - 1},
    "ids that are no integers": {"ids": torch.zeros(15)},
    "too few ids": {"ids": torch.zeros(14, dtype=torch.int64)},
    "ends that fall": {"cu_seqlens": torch.tensor([0, 8, 5, 11, 15])},
    "ends that begin later": {"cu_seqlens": torch.tensor([1, 5, 8, 11, 15])},
    "an empty sample": {"cu_seqlens": torch.tensor([0, 5, 5, 11, 15])},
    "ends beyond the ids": {"cu_seqlens": torch.tensor([0, 5, 8, 11, 16])},
    "ends of two axes": {"cu_seqlens": torch.tensor([[0, 15]])},
    "another segment": {"segment": torch.full((15,), 2, dtype=torch.uint8)},
    "no completion": {"segment": torch.zeros(15, dtype=torch.uint8)},
    "a group too few": {"group": torch.tensor([5, 5, 9])},
    "a logp too many": {"logps": torch.zeros(10)},
    "values of one sample": {"values": torch.zeros(3)},
    "a 0-d column": {"truncated": torch.tensor(True)},
    "logps of half precision": {"logps": torch.zeros(9).half()},
    "a support beyond the vocabulary": {"support": Support(torch.arange(7) + 5, OFFSETS)},
    "a support of floats": {"support": Support(torch.zeros(7), OFFSETS)},
    "a support of other tokens": {"support": Support(torch.arange(7), torch.tensor([0, 7]))},
    "a support with too few ids": {"support": Support(torch.arange(6), OFFSETS)},
    "a support that falls": {
        "support": Support(torch.arange(7), torch.tensor([0, 3, 2, 4, 4, 5, 7, 7, 7, 7]))
    },
}


@pytest.mark.parametrize("name", ATTACKS)
def test_columns_that_do_not_fit_are_refused(name):
    with pytest.raises(ValueError, match=r"samples: \w+: expected"):
        table(**ATTACKS[name]).check(vocab_size=10)


@pytest.mark.parametrize(
    "change",
    [lambda x: x.pop("ids"), lambda x: x.pop("logps"), lambda x: x.update(other=torch.zeros(1)),
     lambda x: x.pop("group"), lambda x: x.update(support=torch.zeros(1))],
)  # fmt: skip
def test_a_file_with_other_names_is_refused(change):
    tensors = table().tensors()
    change(tensors)
    with pytest.raises(ValueError, match="samples: expected the columns"):
        Samples.of_tensors(tensors)


def test_writing_creates_a_column():
    samples = table(values=None)
    samples.write("values", torch.tensor([4, 2]), torch.tensor([1.5, 2.5]))
    samples.write("values", torch.tensor([0]), torch.tensor([7.0]))
    assert samples.values.tolist() == [7, 0, 2.5, 0, 1.5, 0, 0, 0, 0]
    samples.write("ref_hidden", torch.tensor([8]), torch.ones(1, 2))
    assert samples.ref_hidden.shape == (9, 2) and samples.ref_hidden.sum() == 2
