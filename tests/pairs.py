"""Pairwise test parameters: `@pairs(dtype=DTYPES, backend=BACKENDS, ...)` tests every pair of
values of any two axes.

Stacked `parametrize` decorators test every combination of all axes. Pairs find the faults that
depend on two axes, with about as many tests as the product of the two longest axes.
"""

import itertools
from collections.abc import ItemsView, Iterable, Sequence
from typing import Any

import pytest
import torch


def pairs(**axes: Iterable) -> pytest.MarkDecorator:
    """Return one `parametrize` for all axes. `a__b` is an axis of tuples (a, b); `items()` of a
    dict are values with ids.
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
    """Return the values of an axis as `pytest.param`s with ids."""
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
    """Return rows of indices in which any two axes have every pair of values. Deterministic.

    The two longest axes give their product. Each further axis takes, row by row, the value that
    adds most pairs. Pairs that remain get additional rows.
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
    """Return few rows that contain the given pairs (axis a has i, axis k has j); unused entries are
    0.
    """
    rows: list[dict[int, int]] = []
    for a, i, j in sorted(missing):
        row = next((row for row in rows if row[k] == j and row.get(a, i) == i), None)
        if row is None:
            rows.append(row := {k: j})
        row[a] = i
    return [[row.get(a, 0) for a in range(k + 1)] for row in rows]
