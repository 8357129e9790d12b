"""Test that invalid values in GPU tensors raise an error in a later call.

Reading a value on the host would wait for the GPU, so the check is delayed. Until the error is
raised, kernels must clamp invalid values, and no error may be lost. The tests need no GPU, because
they treat CPU tensors like GPU tensors and replace CUDA events by a fake class.
"""

import pytest
import torch

import grpo_fast
from grpo_fast.loss import checks as value_checks
from grpo_fast.loss.call import Call
from grpo_fast.loss.checks import ValueChecks, check_offsets
from tests.pairs import pairs

T, B = 9, 3
HUGE = 2**62
BAD_OFFSETS = [
    [0, 4, 6, 8],  # the last offset is less than T
    [0, 4, 6, 12],  # the last offset is greater than T
    [2, 4, 6, 9],  # does not start at 0
    [0, 6, 4, 9],  # decreases
    [0, -5, 20, 9],
    [9, 9, 0, 0],
    [5, 2, 1, 0],
    [-HUGE, HUGE, -HUGE, HUGE],
    [0, 2**63 - 1, -HUGE - 1, 9],  # differences wrap around to positive numbers
]


class Event:
    """Replacement for a CUDA event. If `is_busy`, the copy that it waits for has not arrived."""

    is_busy = False

    def query(self) -> bool:
        return not self.is_busy


@pytest.fixture
def late(monkeypatch):
    """Delay the checks of CPU tensors as on a GPU, and return the list of pending checks."""
    waiting: list = []
    monkeypatch.setattr(ValueChecks, "are_late", lambda checks, x: checks.validate == "auto")
    monkeypatch.setattr(value_checks, "copy_to_host_async", lambda x: (x.clone(), Event()))
    monkeypatch.setattr(value_checks, "_pending", waiting)
    return waiting


def tokens_of(cu, mask=None, validate="auto"):
    """Build the batch of a call with T logps of 0, and return its tokens."""
    like = torch.zeros(T)
    call = Call(
        tensors=(like, None), like=like, config=grpo_fast.LossConfig(), validate=validate,
        advantages=torch.ones(len(cu) - 1), completion_mask=mask, cu_seqlens=cu,
    )  # fmt: skip
    call.find_tokens().checks.send()
    return call.tokens


@pairs(offsets=BAD_OFFSETS, dtype=[torch.int64, torch.int32], has_mask=[False, True])
def test_bad_offsets_become_lengths_and_segments_in_range(late, offsets, dtype, has_mask):
    """Check that segments and sums over completions stay in range if the offsets are invalid."""
    cu = torch.tensor(offsets).clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)
    mask = torch.arange(T) % 2 == 0 if has_mask else None
    tokens, active = tokens_of(cu, mask), T if mask is None else int(mask.sum())
    assert (tokens.lengths() >= 0).all() and tokens.lengths().sum() <= active
    assert (tokens.segments >= 0).all() and (tokens.segments < B).all()
    assert (tokens.segments.diff() >= 0).all()  # `lengths_of` relies on it
    assert tokens.completion_sum(torch.ones(active)).sum() == tokens.lengths().sum()
    assert tokens.to_tokens(torch.ones(B)).shape == (active,)
    message = "cu_seqlens: expected non-decreasing offsets from 0 to T = 9, got offsets from "
    with pytest.raises(ValueError, match=message):
        value_checks.raise_pending()
    with pytest.raises(ValueError, match="cu_seqlens: expected .*, got "):
        tokens_of(cu, mask, "full")


NAN, INF = float("nan"), float("inf")
BAD_NUMBERS = {
    "advantages": (NAN, INF, -INF),
    "old_logps": (NAN, 0.5, INF),
    "ref_logps": (NAN, 0.5, -INF),
    "sampling_logps": (0.5, INF),
    "completion_mask": (0.5, -1.0, 2.0, NAN),
    "num_items_in_batch": (-1.0, NAN, INF),
    "num_completions_in_batch": (-1.0, NAN),
    "target_ids": (-1, 5),
    "cu_seqlens": (-3, 12),
}


def late_call(loss_type="dapo", **changes):
    """Call `linear_grpo_loss` with valid arguments, or with one bad number in some of them.

    old_logps always contains -inf, and sampling_logps NaN, to check that these values are allowed.
    """
    given = {name: torch.full((T,), -0.5) for name in ("old_logps", "ref_logps", "sampling_logps")}
    given |= {name: torch.ones(T) for name in ("advantages", "completion_mask")}
    given |= {name: torch.tensor(3.0) for name in BAD_NUMBERS if name.startswith("num_")}
    given["target_ids"] = torch.arange(T) % 5
    # Use strided offsets.
    given["cu_seqlens"] = torch.tensor([0, 7, 4, 7, 6, 7, 9])[::2]
    given["old_logps"][0], given["sampling_logps"][1] = -INF, NAN
    for name, number in changes.items():
        given[name].view(-1)[-1] = number
    config = grpo_fast.LossConfig(loss_type, beta=0.1)
    return grpo_fast.linear_grpo_loss(
        torch.ones(T, 2), torch.ones(5, 2), config=config, backend="torch", **given
    )


@pytest.mark.parametrize("largest", [value_checks.LARGE, 4])
@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
@pytest.mark.parametrize(("name", "number"), [(k, x) for k, v in BAD_NUMBERS.items() for x in v])
def test_every_check_arrives_in_a_later_call(late, name, number, loss_type, largest, monkeypatch):
    monkeypatch.setattr(value_checks, "LARGE", largest)
    late_call(loss_type, **{name: number})
    with pytest.raises(ValueError, match=rf"^{name}: expected [^;]* \(in an earlier call"):
        late_call(loss_type)


def test_a_call_sends_its_checks_once(late):
    late_call()
    assert len(late) == 1
    value_checks.raise_pending()
    late_call(advantages=NAN, target_ids=7, num_items_in_batch=-1.0)
    assert len(late) == 1
    with pytest.raises(ValueError, match="^num_items_in_batch: .*; advantages: .*; target_ids: "):
        value_checks.raise_pending()


def test_a_second_backward_does_not_repeat_the_checks_of_its_call(late):
    logps = torch.zeros(T, requires_grad=True)
    given = logps, torch.full((T,), NAN), grpo_fast.LossConfig()
    loss = grpo_fast.grpo_loss(*given, cu_seqlens=torch.tensor([0, T])).loss
    loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="^advantages: "):
        value_checks.raise_pending()
    loss.backward()
    assert [len(x.judges) for x in late] == [1]  # the check of the logps that were computed again
    value_checks.raise_pending()


@pytest.mark.parametrize(("position", "offset"), [(0, 1), (700, 3), (19999, 20001), (-1, 19999)])
def test_the_message_about_many_offsets_is_short(position, offset):
    cu = torch.arange(20001)
    cu[position] = offset
    message = r"^cu_seqlens: .* to T = 20000, got \[\d, '...', \d{5}\]$"
    with pytest.raises(ValueError, match=message):
        check_offsets(cu, 20000, ValueChecks("auto"))


def test_offsets_of_no_completion_are_refused_at_once(late):
    """Check that the error is not deferred, because the call could index no completion."""
    config, cu = grpo_fast.LossConfig(), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets from 0 to T = 4, got only"):
        grpo_fast.grpo_loss(torch.zeros(4), torch.zeros(0), config, cu_seqlens=cu)


def test_each_error_is_raised_once_when_it_has_arrived(late, monkeypatch):
    monkeypatch.setattr(Event, "is_busy", True)
    for name, number in (("advantages", NAN), ("target_ids", 7), ("num_items_in_batch", -1.0)):
        late_call(**{name: number})
    late[0].ready.is_busy = late[2].ready.is_busy = False
    with pytest.raises(ValueError, match="^advantages: .*; num_items_in_batch: .* .in an earlier"):
        late_call()
    monkeypatch.setattr(Event, "is_busy", False)
    with pytest.raises(ValueError, match="^target_ids: "):
        late_call()
    late_call()
