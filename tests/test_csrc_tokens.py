"""The one-pass preparation of a batch in C++ against masks and loops written here."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_fast.kernels import csrc_loader, rows_cpu

REASON = csrc_loader.load("rows")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no C++ kernels here: {(REASON or '').splitlines()[:1]}")

LENGTHS = [3, 0, 5, 1, 7]
VECTORS = ("old_logps", "ref_logps", "sampling_logps", "temperature")


def make_batch(packed: bool, per_token: bool = False) -> dict:
    """Packed with an empty completion, or padded; 20 or 16 rows of a vocabulary of 11."""
    torch.manual_seed(0)
    rows, count = (16, 5) if packed else (20, 4)
    return {
        "target_ids": torch.randint(0, 11, (rows,)),
        "advantages": torch.randn(rows if per_token else count),
        "cu_seqlens": torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32) if packed else None,
        "num_completions": count,
        "completion_mask": torch.rand(rows) < 0.6,
        **{name: torch.rand(rows) + 0.1 for name in VECTORS},
        "num_rows": rows,
        "vocab_size": 11,
        "total": 3.0,
        "by_length": True,
    }


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_active_tokens(packed: bool, per_token: bool, mask_dtype: torch.dtype) -> None:
    x = make_batch(packed, per_token)
    keep, lengths = x["completion_mask"], torch.tensor(LENGTHS if packed else [5] * 4)
    x["completion_mask"] = keep.to(mask_dtype)
    for name in (*VECTORS, "target_ids"):  # what is masked may hold anything
        x[name][~keep] = -1 if name == "target_ids" else math.nan
    found = rows_cpu.active_tokens(**x)
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    assert found is not None and torch.equal(found.rows, keep.nonzero()[:, 0])
    assert torch.equal(found.segments, owner[keep])
    assert torch.equal(found.lengths, torch.bincount(owner[keep], minlength=len(lengths)))
    assert torch.equal(found.advantages, (x["advantages"] if per_token else x["advantages"][owner])[keep])
    for name in (*VECTORS, "target_ids"):
        assert torch.equal(getattr(found, name), x[name][keep])
    own = found.lengths[found.segments].double()
    for total, by_length, expected in (
        (3.0, True, 3 * own),
        (3.0, False, 3 * own**0),
        (None, False, keep.sum() * own**0),
    ):
        weights = rows_cpu.active_tokens(**{**x, "total": total, "by_length": by_length}).weights
        assert torch.equal(weights, (1 / expected).float())
    x = {**make_batch(packed, per_token), "completion_mask": None, "ref_logps": None}
    found = rows_cpu.active_tokens(**x)
    assert found.rows is None and found.ref_logps is None and found.old_logps is x["old_logps"]
    assert torch.equal(found.segments, owner) and torch.equal(found.lengths, lengths)


@pytest.mark.parametrize("packed", [False, True])
def test_oddities_go_the_long_way(packed: bool) -> None:
    """Bad values at active tokens and unusual dtypes: None, and nothing is read out of bounds."""
    cases = [("target_ids", 11), ("target_ids", -100), ("advantages", math.nan), ("advantages", math.inf)]
    cases += [("old_logps", math.nan), ("ref_logps", math.nan), ("temperature", 0.0), ("temperature", math.inf)]
    for name, value in cases:
        x = {**make_batch(packed), "completion_mask": None}
        x[name][2] = value
        assert rows_cpu.active_tokens(**x) is None, (name, value)
    x = make_batch(packed)
    for name, other in [
        ("completion_mask", torch.full((x["num_rows"],), 2.0)),
        ("completion_mask", x["completion_mask"].half()),
        ("target_ids", x["target_ids"].int()),
        ("old_logps", x["old_logps"].double()),
        ("ref_logps", x["ref_logps"].repeat_interleave(2)[::2]),
    ]:
        assert rows_cpu.active_tokens(**{**x, name: other}) is None, name
    for offsets in (
        ([0, 3, 2, 8, 9, 16], [1, 3, 3, 8, 9, 16], [0, 3, 3, 8, 9, 15], [0, 99, 3, 8, 9, 16]) if packed else ()
    ):
        assert rows_cpu.active_tokens(**{**x, "cu_seqlens": torch.tensor(offsets)}) is None, offsets
    empty = {name: value[:0] if isinstance(value, torch.Tensor) else value for name, value in make_batch(False).items()}
    assert rows_cpu.active_tokens(**{**empty, "num_completions": 0, "num_rows": 0}) is None
