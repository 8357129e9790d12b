"""The format in which an answer's process and its judge exchange plain data.

A message is its length in 4 bytes, then JSON. Decoding builds exact builtin types, and a few types
of the standard library from a closed table, never a class that the message names. Size and depth
are bounded on both sides.
"""

import importlib
import json
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque

MOST_BYTES = 16 << 20
MOST_DEPTH = 100
EXACT = 1 << 53  # JSON's readers agree on integers up to here; longer ones travel in base 16

SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
MAPPINGS = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
BYTES = {"bytes": bytes, "bytearray": bytearray}
NUMBERS = {"complex": complex, "range": range}
TEXTS = {  # name → module, the constructor's name
    "Fraction": ("fractions", None),
    "Decimal": ("decimal", None),
    "date": ("datetime", "fromisoformat"),
    "datetime": ("datetime", "fromisoformat"),
}
NAMES = {kind: name for table in (SEQUENCES, MAPPINGS, BYTES) for name, kind in table.items()}
NAMES[defaultdict] = "dict"  # its factory stays behind


class Malformed(Exception):
    """A message that is not of this format, or that has no end."""


class Channel:
    """Two pipe ends: messages out and messages in."""

    def __init__(self, source: int, sink: int) -> None:
        self.source = source
        self.sink = sink

    def send(self, message: object) -> None:
        data = json.dumps(message).encode()
        if len(data) > MOST_BYTES:
            raise ValueError(f"expected data of at most {MOST_BYTES} bytes, got {len(data)}")
        left = memoryview(len(data).to_bytes(4, "big") + data)
        while left:
            left = left[os.write(self.sink, left) :]

    def receive(self) -> object:
        size = int.from_bytes(self._read(4), "big")
        if size > MOST_BYTES:
            raise Malformed(f"expected a message of at most {MOST_BYTES} bytes, got {size}")
        try:
            return json.loads(self._read(size))
        except (ValueError, RecursionError) as error:
            raise Malformed(f"expected JSON, got {error}") from None

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = os.read(self.source, min(size - len(data), 1 << 20))
            if not part:
                raise Malformed("the other process has closed its end")
            data += part
        return bytes(data)


def encode(value, refer, depth=0):
    """Return the JSON tree of plain data; `refer` encodes everything else."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -EXACT < value < EXACT else ["int", hex(value)]
    if depth > MOST_DEPTH:
        raise ValueError(f"expected data nested at most {MOST_DEPTH} deep")
    name = NAMES.get(kind)
    if name in SEQUENCES:
        return [name, *(encode(item, refer, depth + 1) for item in value)]
    if name in MAPPINGS:
        pairs = [part for pair in value.items() for part in pair]
        return [name, *(encode(part, refer, depth + 1) for part in pairs)]
    if name in BYTES:
        return [name, value.hex()]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind is range:
        return ["range", *(encode(part, refer) for part in (value.start, value.stop, value.step))]
    name = kind.__name__
    module = sys.modules.get(TEXTS[name][0]) if name in TEXTS else None
    if module is not None and getattr(module, name, None) is kind:
        return [name, str(value)]
    return refer(value)


def decode(tree, resolve, depth=0):
    """Return the value of a JSON tree; `resolve` decodes what `refer` encoded.

    Raises Malformed for anything else, also for a set of lists or a date of nonsense.
    """
    if not isinstance(tree, list):
        if isinstance(tree, dict):
            raise Malformed("expected a value, got a JSON object")
        return tree
    if depth > MOST_DEPTH or not tree or type(tree[0]) is not str:
        raise Malformed("expected a tagged value")
    name = tree[0]
    try:
        if name in SEQUENCES:
            return SEQUENCES[name](decode(item, resolve, depth + 1) for item in tree[1:])
        if name in MAPPINGS:
            parts = [decode(item, resolve, depth + 1) for item in tree[1:]]
            return MAPPINGS[name](dict(zip(parts[::2], parts[1::2], strict=True)))
        if name == "int":
            return int(tree[1], 16)
        if name in BYTES:
            return BYTES[name].fromhex(tree[1])
        if name in NUMBERS:
            return NUMBERS[name](*(decode(part, resolve, depth + 1) for part in tree[1:]))
        if name in TEXTS and type(tree[1]) is str:
            module, constructor = TEXTS[name]
            kind = getattr(importlib.import_module(module), name)
            return getattr(kind, constructor)(tree[1]) if constructor else kind(tree[1])
        return resolve(*tree)
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"expected a {name}, got {error}") from None
