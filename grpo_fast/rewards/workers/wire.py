"""Messages between two processes: the judge, which runs tests, and the code under test.

A message is a line of JSON. Decoding builds only values of builtin types and of a few
standard-library types from a fixed table, never of a class that a message names. Both sides limit
the size of a message. Python's recursion limit bounds its nesting depth.
"""

import importlib
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque

MOST_BYTES = 16 << 20
# Builtin classes whose values are sent as data. Both processes have these classes.
PLAIN = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
# A value of a class in FROM_ITEMS is sent as a list of its items. A value of a class in FROM_PAIRS
# is sent as a list of alternating keys and values.
FROM_ITEMS = (list, tuple, set, frozenset, deque, bytes, bytearray)
FROM_PAIRS = (dict, Counter, OrderedDict)
TAGS: dict[type, str] = {kind: kind.__name__ for kind in (*FROM_ITEMS, *FROM_PAIRS, range)}
KINDS = {tag: kind for kind, tag in TAGS.items()}
TAGS[defaultdict] = "dict"  # the default factory is lost
# Types whose values are sent as text, and the modules that define them. Importing the modules here
# would cost a fifth of the processor time of a small answer.
FROM_TEXT = {
    "complex": "builtins",
    "Fraction": "fractions",
    "Decimal": "decimal",
    "date": "datetime",
    "datetime": "datetime",
}


class Malformed(Exception):
    """Exception for a message with an invalid format, or for a message that ends early."""


def encode(value, refer):
    """Return a value as a JSON tree. `refer` encodes the values that are not plain data."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:  # send in hex, because Python refuses to parse very long decimal numbers
        return value if value.bit_length() < 64 else ["int", hex(value)]
    if kind in TAGS:
        tag = TAGS[kind]
        parts = value
        if kind is range:
            parts = (value.start, value.stop, value.step)
        elif KINDS[tag] in FROM_PAIRS:
            parts = [part for pair in value.items() for part in pair]
        return [tag, *(encode(part, refer) for part in parts)]
    # If the module of the type is not imported, no value of the type can exist.
    module = sys.modules.get(FROM_TEXT.get(kind.__name__, ""))
    if module is not None and getattr(module, kind.__name__, None) is kind:
        return [kind.__name__, str(value)]
    return refer(value)


def decode(tree, resolve):
    """Decode a value from its JSON tree, which is a scalar or `[tag, *parts]`.

    `resolve(tag, *parts)` decodes the tags that this module does not define.

    Raises:
        Malformed: the JSON encodes no Python value. For example, a set cannot contain lists.
    """
    if not isinstance(tree, (list, dict)):
        return tree
    try:
        tag, *parts = tree if isinstance(tree, list) else ()
        if tag == "int":
            return int(parts[0], 16)
        if tag in FROM_TEXT:
            kind = getattr(importlib.import_module(FROM_TEXT[tag]), tag)
            return getattr(kind, "fromisoformat", kind)(parts[0])
        if tag not in KINDS:
            return resolve(tag, *parts)
        parts = [decode(part, resolve) for part in parts]
        kind = KINDS[tag]
        if kind is range:
            return range(*parts)
        if kind in FROM_PAIRS:
            return kind(dict(zip(parts[::2], parts[1::2], strict=True)))
        return kind(parts)
    except Exception as error:
        raise Malformed(f"expected a value, got {tree!r:.60}: {error!r:.200}") from None


class Peer:
    """One end of the connection between the judge, which runs tests, and the code under test.

    Each end can call the other. An object that is not plain data stays in its process, and the
    other process refers to it by a number.

    A subclass defines an attribute and two methods. `operations` maps the names of the operations
    that the other process may request to functions. `refer(value)` encodes a value that is not
    plain data as a JSON tree `[tag, *parts]`. `resolve(tag, *parts)` decodes a tree that `refer`
    built in the other process.

    Args:
        descriptor: file descriptor of a connected socket.
    """

    def __init__(self, descriptor):
        self.reader = open(descriptor, "rb")
        self.writer = open(descriptor, "wb", closefd=False)
        self.objects = []
        # Numbers by id(object). `objects` keeps every object alive, so that no id is used twice.
        self.numbers = {}

    def encode(self, value):
        return encode(value, self.refer)

    def decode(self, tree):
        return decode(tree, self.resolve)

    def number(self, value):
        """Return the number by which the other process refers to an object of this process."""
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return number

    def request(self, operation, args):
        """Send a request, and return its reply: "value" or "error", and a list of JSON trees.

        Until the reply comes, execute the requests of the other process.

        Args:
            operation: name of the operation.
            args: JSON tree of the list [positional arguments, keyword arguments].
        """
        self.send(pack(["call", operation, args]))
        while True:
            kind, *parts = self.receive()
            if kind != "call":
                return kind, parts
            self.serve(*parts)

    def serve(self, operation, args):
        """Execute a request. Reply with its result and its changed arguments, or with its error."""
        try:
            call = self.operations[operation]
            args = self.decode(args)
            before = self.encode(args)
            result = self.encode(call(*args[0], **args[1]))
            after = self.encode(args)
            reply = pack(["value", result, None if after == before else after])
        except BaseException as error:  # the other process raises the same error
            reply = self.failure(error)
        self.send(reply)

    def failure(self, error):
        """Return the reply for an exception: its type, arguments and attributes."""
        try:
            return pack(["error", *map(self.encode, (type(error), [*error.args], vars(error)))])
        except Exception:  # an argument that cannot be sent
            return pack(["error", ["name", "RuntimeError"], ["list"], ["dict"]])

    def send(self, data):
        self.writer.write(data)
        self.writer.flush()

    def receive(self):
        line = self.reader.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise Malformed(f"expected a line of at most {MOST_BYTES} bytes, got {line!r:.60}")
        return json.loads(line)


def pack(message):
    data = json.dumps(message).encode() + b"\n"
    if len(data) > MOST_BYTES:
        raise ValueError(f"expected data of at most {MOST_BYTES} bytes, got {len(data)}")
    return data
