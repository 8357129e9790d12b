"""Decorator for pairwise testing: `@pairs(dtype=DTYPES, backend=BACKENDS, ...)`.

An axis is a test parameter with its list of values. Stacked `parametrize` decorators test every
combination of all axes. `pairs` selects fewer combinations: for any two axes, each pair of their
values occurs in at least one combination. These tests find every fault that depends on at most two
axes. Their number is about the product of the lengths of the two longest axes.
"""

import itertools
from collections.abc import ItemsView, Iterable, Sequence
from typing import Any

import pytest
import torch


def pairs(**axes: Iterable) -> pytest.MarkDecorator:
    """Return one `parametrize` decorator that covers all pairs of values of the axes.

    An axis with the name `a__b` contains tuples with the values of the parameters `a` and `b`. If
    an axis is the `items()` of a dictionary, the keys become the test ids of the values.
    """
    values = [_params(names, axis) for names, axis in axes.items()]
    rows = []
    for places in covering([*map(len, values)]):
        row = [axis[i] for axis, i in zip(values, places, strict=True)]
        marks = [mark for param in row for mark in param.marks]
        name = "-".join(param.id for param in row)
        rows.append(pytest.param(*(x for param in row for x in param.values), marks=marks, id=name))
    return pytest.mark.parametrize(", ".join(axes).replace("__", ", "), rows)


def _params(names: str, axis: Iterable) -> list:
    """Return each value of the axis as a `pytest.param` with an id.

    `names` is the name of the axis, such as `a` or `a__b`.
    """
    named = axis if isinstance(axis, ItemsView) else ((None, value) for value in axis)
    params = []
    for name, value in named:
        if not hasattr(value, "marks"):
            value = pytest.param(*(value if "__" in names else (value,)), id=name)
        name = value.id or "-".join(_word(x, f"{names}{len(params)}") for x in value.values)
        params.append(value._replace(id=name))
    return params


def _word(value: Any, otherwise: str) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value) if isinstance(value, str | int | float | None) else otherwise


def covering(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return rows of indices such that any two axes have every pair of their values in some row.

    `sizes` has the number of values of each axis, and a row has one index per axis. The algorithm
    starts with all pairs of the two longest axes. It then adds the other axes one at a time, and
    gives each row the index that covers the most new pairs. Pairs that are still missing get
    additional rows. The result is deterministic.
    """
    order = sorted(range(len(sizes)), key=lambda axis: -sizes[axis])
    rows = [list(row) for row in itertools.product(*(range(sizes[axis]) for axis in order[:2]))]
    for k, axis in enumerate(order[2:], 2):
        missing = {
            (a, i, j) for a in range(k) for i in range(sizes[order[a]]) for j in range(sizes[axis])
        }
        used = [0] * sizes[axis]
        for row in rows:
            adds = [sum((a, row[a], j) in missing for a in range(k)) for j in range(sizes[axis])]
            j = max(range(sizes[axis]), key=lambda j: (adds[j], -used[j]))  # noqa: B023
            missing -= {(a, row[a], j) for a in range(k)}
            used[j] += 1
            row.append(j)
        rows += _rows_of(missing, k)
    return [tuple(row[order.index(axis)] for axis in range(len(sizes))) for row in rows]


def _rows_of(missing: set[tuple[int, int, int]], k: int) -> list[list[int]]:
    """Return a small number of rows that together contain all missing pairs.

    A row has one index for each of the axes 0 to k. A missing pair (a, i, j) requires a row with
    index i on axis a and index j on axis k. Axes that no pair of a row requires get index 0.
    """
    rows: list[dict[int, int]] = []
    for a, i, j in sorted(missing):
        row = next((row for row in rows if row[k] == j and row.get(a, i) == i), None)
        if row is None:
            rows.append(row := {k: j})
        row[a] = i
    return [[row.get(a, 0) for a in range(k + 1)] for row in rows]
