"""Checks of the fields of a message in a recorded trace."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.data.example import Fields, Item
from grpo_fast.errors import FP32_MAX, LEAST_LOGP, require

MAX_IDS = 1 << 31  # token ids are less than this
DTYPES = {"int32": torch.int32, "int64": torch.int64}


class Node(NamedTuple):
    """A checked message of a trace.

    `ids` and `mask` have one entry for each token of the message. `logps` and `advantages` have one
    entry for each sampled token.
    """

    parent: int | None
    ids: list[int]
    mask: list[bool]  # True for sampled tokens
    logps: list[float]
    advantages: list[float] | None
    support: tuple[Tensor, Tensor] | None
    routes: int


def read_node(name: str, node: Fields) -> Node:
    """Check all fields of a message in a trace, and return them as a `Node`.

    Args:
        name: location of the message, for error messages.
        node: fields of the message in the format of verifiers.

    Raises:
        ValueError: a field has a wrong type, length or value.
    """
    # 1. Check the tokens, and find the sampled tokens.
    ids = node.get("token_ids") or []
    mask = node.get("mask") or []
    require(ids, f"{name}.token_ids", "the tokens of the message", "none: it cannot be trained on")
    expected = f"integers from 0 to {MAX_IDS - 1}"
    _each(f"{name}.token_ids", ids, expected, lambda x: type(x) is int and 0 <= x < MAX_IDS)
    require(len(mask) == len(ids), f"{name}.mask", f"{len(ids)} bools, as token_ids", len(mask))
    _each(f"{name}.mask", mask, "true or false", lambda x: type(x) is bool)
    sampled = [i for i, is_sampled in zip(ids, mask, strict=True) if is_sampled]
    # 2. Check the log-probabilities and advantages of the sampled tokens.
    logps = node.get("logprobs") or []
    advantages = node.get("advantages")
    for field, values in (("logprobs", logps), ("advantages", advantages)):
        fits = values is None or len(values) == len(sampled)
        require(fits, f"{name}.{field}", f"{len(sampled)} numbers, one for each sampled token",
             None if values is None else len(values))  # fmt: skip
    expected = f"log-probabilities of sampled tokens, above {LEAST_LOGP:g} and at most 0"
    _each(f"{name}.logprobs", logps, expected, lambda x: is_number(x) and LEAST_LOGP < x <= 0)
    _each(f"{name}.advantages", advantages or (), "numbers that fp32 holds", is_number)
    # 3. Read the support of each sampled token. Replace the recorded experts with a hash, because
    # experts are only compared for equality.
    support = node.get("sampling_mask")
    if support is not None:
        sampled_ids = torch.tensor(sampled, dtype=torch.int64)
        support = _support(f"{name}.sampling_mask", support, sampled_ids)
    routes = node.get("routed_experts")
    if routes is not None:
        data = routes["data"] if isinstance(routes, Mapping) else routes.tobytes()
        # Use a hash of 7 bytes, because 8 bytes might not fit into a signed int64.
        routes = int.from_bytes(blake2b(data, digest_size=7).digest(), "big")
    return Node(node.get("parent"), list(ids), list(mask), list(logps),
                 advantages, support, routes or 0)  # fmt: skip


def is_number(x: Any) -> bool:
    """Return whether x is an int or float (not a bool) that is finite in fp32."""
    return type(x) in (int, float) and abs(x) <= FP32_MAX


def _each(name: str, values: Sequence[Item], expected: str, holds: Callable[[Item], bool]) -> None:
    """Raise a ValueError for the first value that does not satisfy `holds`."""
    for x in values:
        if not holds(x):
            raise ValueError(f"{name}: expected {expected}, got {reprlib.repr(x)}")


def _support(name: str, value: Fields, sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Check the recorded supports of a message's sampled tokens.

    The support of a token is the set of ids that top_k and top_p kept when it was sampled.

    Returns:
        The ids of all supports, (nnz,) int32, and the number of ids of each support, int64. The
        number is 0 for a token that was sampled without truncation.
    """
    # 1. Read the ids and counts, which must be vectors of integers.
    parts = []
    for field in ("ids", "counts"):
        x = _array(value[field])
        is_integer = x.dim() == 1 and not (x.is_floating_point() or x.is_complex())
        fits = not x.numel() or (is_integer and x.dtype != torch.bool)
        x = x.long() if fits else x
        fits = fits and bool(((x >= 0) & (x < MAX_IDS)).all())
        require(fits, f"{name}.{field}", f"integers from 0 to {MAX_IDS - 1}", "others")
        parts.append(x.reshape(-1))
    # 2. Check that each support contains the sampled token exactly once.
    ids, counts = parts
    fits = len(counts) == len(sampled) and int(counts.sum()) == len(ids)
    require(fits, name, f"{len(sampled)} counts of its ids", len(counts))
    tokens = torch.arange(len(counts)).repeat_interleave(counts)
    hits = torch.bincount(tokens[ids == sampled[tokens]], minlength=len(counts))
    fits = bool(((hits == 1) | (counts == 0)).all())
    require(fits, name, "each sampled token once among its ids", "others")
    return ids.int(), counts


def _array(value: object) -> Tensor:
    """Convert an array to a tensor. The array may be a dict with the keys `dtype` and `data`."""
    if isinstance(value, Mapping):
        return torch.frombuffer(bytearray(value["data"]), dtype=DTYPES[value["dtype"]])
    return torch.as_tensor(value)
