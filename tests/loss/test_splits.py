"""Test that a step split into 1, 2, 4 or 8 uneven micro-batches gives the same loss and gradient.

The result must be the same for every loss and for every aggregation with a global total.
"token_mean_local" divides by the tokens of one micro-batch, so its result must differ.
"""

from __future__ import annotations

import torch

from tests import oracles
from tests.loss_cases import (
    AGGREGATIONS,
    BACKENDS,
    LEVELS,
    LOSS_LEVELS,
    Case,
    make_case,
    options_for,
    relative_l2,
    run,
)
from tests.pairs import pairs

# Lengths of the twelve completions, one of which is empty. They vary enough that the micro-batches
# have different numbers of tokens.
LENGTHS = [9, 1, 4, 0, 7, 2, 9, 3, 3, 8, 1, 5]
CUTS = {1: [0, 12], 2: [0, 3, 12], 4: [0, 1, 2, 9, 12], 8: [0, 1, 2, 3, 4, 6, 7, 11, 12]}
GLOBAL = tuple(a for a in AGGREGATIONS if a != "token_mean_local")


def step(**options) -> Case:
    mask = torch.arange(9)[None, :] < torch.tensor(LENGTHS)[:, None]
    case = make_case(91, mask=mask, **options)
    return case.but(num_items=float(mask.sum()), num_completions=len(LENGTHS))


def piece(case: Case, rows: slice) -> Case:
    fields = {n: getattr(case, n) for n in
              ("hidden", "ids", "mask", "advantages", "old", "ref", "sampling")}  # fmt: skip
    return case.but(**{n: None if x is None else x[rows] for n, x in fields.items()})


def assert_split(case: Case, pieces: int, layout: str, backend: str) -> None:
    whole = run("linear", case, layout=layout, backend=backend)
    cuts = CUTS[pieces]
    parts = [
        run("linear", piece(case, slice(a, b)), layout=layout, backend=backend)
        for a, b in zip(cuts[:-1], cuts[1:], strict=True)
    ]
    assert abs(sum(p.loss.item() for p in parts) - whole.loss.item()) <= 1e-6
    for name in ("weight", "bias"):
        assert relative_l2(sum(p.grads[name] for p in parts), whole.grads[name]) <= 1e-6
    d_hidden = torch.cat([p.grads["hidden"] for p in parts])
    assert torch.equal(d_hidden, whole.grads["hidden"])  # dH of a row is independent of the split


@pairs(layout=["padded", "packed"], pieces=CUTS, loss_type__level=LOSS_LEVELS, backend=BACKENDS)
def test_splits_of_every_loss(loss_type, level, pieces, layout, backend):
    aggregation = "token_mean_global" if loss_type == "bnpo" else None
    assert_split(
        step(**options_for(loss_type, level, aggregation, beta=0.2)), pieces, layout, backend
    )


EXTRAS = dict(beta=0.2, kl_times_ratio=True, corrections=[oracles.off_policy(0.3)])
OPTIONS = {
    "extras": options_for("dapo", **EXTRAS, entropy_coef=0.1),
    **{f"{level} {x}": options_for("grpo", level, x, entropy_coef=0.1)
       for level in LEVELS for x in GLOBAL},
}  # fmt: skip


@pairs(pieces=[2, 4, 8], name=OPTIONS)
def test_splits_of_every_normaliser_and_with_extras(name, pieces):
    case = step(sampling=name == "extras", **OPTIONS[name])
    assert_split(case, pieces, "packed", "torch")


def test_totals_may_be_numbers_or_tensors():
    case = step(**options_for("dapo"))
    expected = run("linear", case)
    for kind in (lambda x: int(x), lambda x: torch.tensor(x), lambda x: torch.tensor(int(x))):
        totals = {f"num_{n}_in_batch": kind(getattr(case, f"num_{n}"))
                  for n in ("items", "completions")}  # fmt: skip
        same = run("linear", case, **totals)
        assert torch.equal(same.loss, expected.loss)


def test_the_local_mean_depends_on_the_split_by_definition():
    case = step(**options_for("bnpo"))
    whole = run("linear", case)
    parts = [run("linear", piece(case, s)) for s in (slice(0, 3), slice(3, 12))]
    assert relative_l2(sum(p.grads["weight"] for p in parts), whole.grads["weight"]) > 0.1
