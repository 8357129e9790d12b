"""Schemas of the custom operators, and conversion of option containers to operator arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from grpo_fast.kernels.support import Support
from grpo_fast.loss.arguments import BatchInputs, Options, RowOptions

Argument = Any  # of an operator: a tensor, number, string, or list of bools
Row = Sequence[Argument]
SomeOptions = TypeVar("SomeOptions", Options, RowOptions)

# Schema types of the fields that can be arguments of an operator. `shard` and `divergence` are
# missing because a schema has no type for process groups or teachers. `inplace` is missing because
# autograd does not support operators that overwrite their input.
TYPES = {
    "like": "Tensor", "advantages": "Tensor", "completion_mask": "Tensor?",
    "cu_seqlens": "Tensor?", "old_logps": "Tensor?", "ref_logps": "Tensor?",
    "sampling_logps": "Tensor?", "num_items_in_batch": "Tensor?",
    "num_completions_in_batch": "Tensor?",
    "wanted": "bool[]", "backend": "str", "validate": "str", "hidden_rows": "Tensor?",
    "grad_filter": "float?", "support": "Tensor? support_ids, Tensor?",
    "target_ids": "Tensor", "temperature": "Tensor? temperatures, float",
    "softcap": "float?", "logit_scale": "float", "return_entropy": "bool", "entropy_over": "str",
}  # fmt: skip


def schema_of(kind: type[BatchInputs] | type[Options] | type[RowOptions]) -> str:
    return ", ".join(f"{TYPES[name]} {name}" for name in kind._fields if name in TYPES)


BATCH = f"{schema_of(BatchInputs)}, Tensor? temperature, str config"
OPTIONS = schema_of(Options)
ROWS = schema_of(RowOptions)
NUM_OPTIONS = OPTIONS.count(",") + 1


def graph_fields(options: Options | RowOptions) -> list[Argument]:
    """Return the option fields as arguments of an operator, in the order of its schema.

    A `support` becomes two arguments, its ids and its offsets. A `temperature` becomes a tensor and
    a number. If the temperature is a number, the tensor is None. Fields that are not in `TYPES`
    have their default values, because `call.public` runs other calls outside of graphs.
    """
    fields: list[Argument] = []
    for name in options._fields:
        value: Any = getattr(options, name)
        if name == "support":
            # List the two tensors. In torch 2.11, dynamo cannot extend a list by a NamedTuple.
            fields += (None, None) if value is None else (value.ids, value.offsets)
        elif name == "temperature":
            fields += (value, 1.0) if isinstance(value, Tensor) else (None, value)
        elif name in TYPES:
            fields.append(value)
    return fields


def from_graph(kind: type[SomeOptions], values: Row) -> SomeOptions:
    """Build Options or RowOptions from the values that `graph_fields` returned."""
    rest = iter(values)
    fields: dict[str, Any] = {}
    for name in kind._fields:
        if name == "support":
            ids, offsets = next(rest), next(rest)
            fields[name] = None if ids is None else Support(ids, offsets)
        elif name == "temperature":
            temperatures, number = next(rest), next(rest)
            fields[name] = number if temperatures is None else temperatures
        elif name in TYPES:
            fields[name] = next(rest)
    return kind(**fields)
