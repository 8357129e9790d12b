"""Tests that the C++ kernels refuse indices and sizes with which they would leave their memory."""

import pytest
import torch

from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import decode, gemm, loader, rows
from grpo_fast.kernels.types import AddedRows, HeadInputs, LogitRows, LogitTransform, SupportRows

REASON = loader.unavailable("rows")
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"C++ kernels: {REASON}")

TRANSFORM, IDS, BAD = LogitTransform(), torch.arange(4), torch.arange(4) + 1
X, HIDDEN, WEIGHT = torch.zeros(4, 10), torch.zeros(4, 3), torch.zeros(10, 3)
SETS = SupportRows(
    None, None, torch.arange(8), torch.arange(5) * 2, torch.zeros(4, dtype=torch.int64)
)
KEYS, TILES = torch.zeros(2, 3, 8), decode.tiles_of(*torch.zeros(2, 1, 2, 17, 8))


def logps(target_ids=IDS, offsets=None):
    logits = X if offsets is None else X.view(1, 40)
    p = LogitRows(logits, target_ids, TRANSFORM, offsets)
    return rows.row_logps(p, return_entropy=False)


def grad(out=X, logps=X[:, 0]):
    p = LogitRows(X, IDS, TRANSFORM)
    return rows.row_grad_(p, (X[:, 0], logps, None), X[:, 0], None, out=out)


def product(values=X, **places):
    added = AddedRows(torch.ones(4), values, **places)
    return gemm.mm_(torch.zeros(4, 3), torch.zeros(3, 10), torch.zeros(4, 10), added=added)


def head(target_ids=IDS, bias=None, out=X):
    given = HeadInputs(HIDDEN, WEIGHT, bias, target_ids, TRANSFORM)
    return rows.head_logps(given, return_entropy=False, logits_out=out)


def sets(index=None, **changes):
    own = SETS._replace(hidden_index=index, **changes)
    p = HeadInputs(HIDDEN, WEIGHT, None, own.places, TRANSFORM)
    return rows.head_rows(p, own, return_entropy=False, return_slopes=False)


def sums(**changes):
    kernels = route.kernel_module("support", "cpu")
    return kernels.head_hidden(torch.ones(8), WEIGHT, SETS._replace(**changes))


def step(lengths=17, counts=3, time=0):
    own = decode.grow_tiles((), TILES, 3, 1)
    numbers = torch.tensor([lengths]), torch.tensor([counts])
    return decode.decode_(KEYS, KEYS, KEYS, TILES, own, *numbers, time, 1.0, None)


@pytest.mark.parametrize(
    ("call", "name", "bad"),
    [
        (logps, "target_ids", IDS[:3]),
        (logps, "offsets", torch.tensor([0, 10, 20, 30, 41])),
        (logps, "offsets", torch.tensor([0, 20, 10, 30, 40])),
        (grad, "out", torch.zeros(4, 9)),
        (grad, "logps", torch.zeros(3)),
        (product, "ids", BAD),
        (product, "rows", BAD),
        (head, "target_ids", IDS[:3]),
        (head, "bias", torch.zeros(9)),
        (head, "out", torch.zeros(4, 9)),
        (sets, "index", BAD),
        (sets, "ids", torch.arange(8) + 3),
        (sets, "ids", torch.arange(8) - 1),
        (sets, "offsets", torch.tensor([0, 2, 4, 6, 9])),
        (sums, "ids", torch.arange(8) + 3),
        (sums, "offsets", torch.arange(5).flip(0) * 2),
        (step, "lengths", 33),
        (step, "counts", 4),
        (step, "time", 16),
        (step, "time", -1),
    ],
)
def test_an_index_or_a_size_out_of_range_is_refused(call, name, bad):
    call()
    with pytest.raises(RuntimeError, match=rf"\b(added_)?{name}.*: expected"):
        call(**{name: bad})
