"""Schemas of the custom operators, which list the options that a torch.compile graph can carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_fast.errors import argument_error
from grpo_fast.loss.arguments import BatchInputs, Options, RowOptions

Argument = Any  # of an operator: a tensor, number, string, or list of bools
Row = Sequence[Argument]

# Schema types of the fields that a graph carries. `shard` and `divergence` are missing because a
# schema has no type for process groups or teachers. `inplace` is missing because autograd does not
# support operators that overwrite their input.
TYPES = {
    "like": "Tensor", "advantages": "Tensor", "completion_mask": "Tensor?",
    "cu_seqlens": "Tensor?", "old_logps": "Tensor?", "ref_logps": "Tensor?",
    "sampling_logps": "Tensor?", "num_items_in_batch": "Tensor?",
    "num_completions_in_batch": "Tensor?",
    "wanted": "bool[]", "backend": "str", "validate": "str", "hidden_rows": "Tensor?",
    "grad_filter": "float?", "support_ids": "Tensor?", "support_offsets": "Tensor?",
    "target_ids": "Tensor", "temperatures": "Tensor?", "temperature": "float",
    "softcap": "float?", "logit_scale": "float", "return_entropy": "bool",
    "entropy_over_vocabulary": "bool",
}  # fmt: skip
Arguments = type[BatchInputs] | type[Options] | type[RowOptions]


def names_of(kind: Arguments) -> list[str]:
    """Return the names of the fields that a graph carries, in the order of the operator."""
    return [name for name in kind._fields if name in TYPES]


def schema_of(kind: Arguments) -> str:
    return ", ".join(f"{TYPES[name]} {name}" for name in names_of(kind))


BATCH = f"{schema_of(BatchInputs)}, Tensor? temperature, str config"
OPTIONS = schema_of(Options)
ROWS = schema_of(RowOptions)
NUM_OPTIONS = len(names_of(Options))


def graph_fields(options: Options | RowOptions) -> tuple[Argument, ...]:
    """Return the values of the fields that a graph carries, in the operator's argument order.

    Raises a ValueError if a field that a graph cannot carry does not have its default value.
    `call.public` runs such calls outside of graphs.
    """
    for name, value in zip(options._fields, options, strict=True):
        # Test the name before the value. The value of a field in TYPES may be a traced tensor,
        # which has no truth value.
        if name not in TYPES and value:
            raise argument_error(
                name, "its default in a graph of torch.compile", type(value).__name__
            )
    return tuple(getattr(options, name) for name in names_of(type(options)))


def options_of(values: Row) -> Options:
    """Build Options from the values that `graph_fields` returned."""
    return Options(**dict(zip(names_of(Options), values, strict=True)))


def row_options_of(values: Row) -> RowOptions:
    """Build RowOptions from the values that `graph_fields` returned."""
    return RowOptions(**dict(zip(names_of(RowOptions), values, strict=True)))
