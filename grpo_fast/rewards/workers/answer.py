"""Process that runs the code of a completion. This code is called the answer.

The answer runs as a program, or the judge calls its functions. The judge is the process that runs
the tests. This process contains only the code of the answer. It has no tests, no expected values
and an empty environment. Even if the answer takes over this process, it can only change the plain
data that the process sends to the judge.

A message between the two processes is a line of JSON. Decoding builds only values of the types in a
fixed table.
"""

import builtins
import contextlib
import importlib
import json
import os
import sys
import types
from collections.abc import Iterator, MappingView
from itertools import islice

import sandbox

MOST_BYTES = 16 << 20  # of a message
MOST_ITEMS = 4096  # of an iterator
# Types that are sent as `{type: arguments of the constructor}`, with their modules. A module is
# imported when a value needs it, because importing all of them would take a fifth of the time of a
# small answer.
MODULES = {
    **dict.fromkeys("tuple set frozenset dict bytes bytearray complex".split(), "builtins"),
    "deque": "collections", "Decimal": "decimal", "Fraction": "fractions",
}  # fmt: skip
NUMBERS = ("complex", "Decimal", "Fraction")  # their constructors read them from a text


class NotPlain(BaseException):
    """Exception for a value that is not plain data. No `except` of a test catches it."""


def encode(value):
    """Return a value as a JSON tree. A value of a subclass is sent as one of its plain base class.

    Raises:
        NotPlain: the value is not plain data.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Iterator, MappingView)):
        return {"iterator": [encode(list(islice(value, MOST_ITEMS)))]}
    for kind in type(value).__mro__:
        name = kind.__name__
        if kind is list:
            return [encode(item) for item in value]
        if MODULES.get(name) == kind.__module__:
            if name in NUMBERS:
                return {name: [str(value)]}
            items = [[*pair] for pair in value.items()] if name == "dict" else [*value]
            return {name: [encode(items)]}
    raise NotPlain(f"a {type(value).__name__}")


def decode(line):
    """Return the value that a line of JSON encodes. A wrong line raises an error of any class."""

    def build(tree):
        [(name, parts)] = tree.items()
        if name == "iterator":
            return iter(*parts)
        return getattr(importlib.import_module(MODULES[name]), name)(*parts)

    return json.loads(line, object_hook=build)


class Channel:
    """One end of the connection between the judge and the answer, over a socket."""

    def __init__(self, descriptor):
        self.reader = open(descriptor, "rb")
        self.writer = open(descriptor, "wb", closefd=False)

    def send(self, message):
        self.writer.write(json.dumps(message).encode() + b"\n")
        self.writer.flush()

    def receive(self):
        return decode(self.reader.readline(MOST_BYTES))


def reply(names, objects, target, method, args, kwargs):
    """Call a function, or a method of an object, and return the message with its result.

    The message has the changed arguments, too, or None if they have not changed.

    Args:
        names: the global names of the answer.
        objects: the objects that calls have returned.
        target: name of a function, or number of an object.
        method: name of a method, or "".
        args: positional arguments.
        kwargs: keyword arguments.
    """
    if isinstance(target, str) and target not in names:
        return ["missing", ["NameError"], [f"the answer defines no {target}"]]
    try:
        before = encode([args, kwargs])
        function = names[target] if isinstance(target, str) else objects[target]
        result = (getattr(function, method) if method else function)(*args, **kwargs)
        after = encode([args, kwargs])
        after = None if after == before else after
        try:
            return ["value", encode(result), after]
        except NotPlain:
            objects.append(result)
            return ["object", len(objects) - 1, after]
    except BaseException as error:  # the judge raises the same error
        plain = (int, float, str)
        args = [x if isinstance(x, plain) else str(x) for x in error.args]
        return ["error", [kind.__name__ for kind in type(error).__mro__], args]


def execute(blocks, name):
    """Run blocks of code in a new module and return its namespace.

    An error in a block before the last one is ignored, because the block may be a draft.
    """
    sys.modules[name] = types.ModuleType(name)  # where dataclasses look it up
    names = vars(sys.modules[name])
    for block in blocks[:-1]:
        with contextlib.suppress(Exception):
            exec(compile(block, "<answer>", "exec"), names)
    exec(compile(blocks[-1], "<answer>", "exec"), names)
    return names


def serve(request):
    """Run the answer's code. Then execute the judge's requests until the judge exits."""
    channel = Channel(sandbox.take(0))
    channel.receive()  # wait until the judge has made its memory unreadable
    sandbox.confine(request)
    names = execute(request["blocks"], "answer")
    errors = [x for x in names if isinstance(names[x], type) and issubclass(names[x], Exception)]
    channel.send(errors)
    objects = []
    while True:
        channel.send(reply(names, objects, *channel.receive()))


def main(descriptor):
    request = sandbox.request(descriptor)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # normally defined by `site`
    status = 1
    try:
        if not request["program"]:
            serve(request)
        sandbox.confine(request)
        execute(request["blocks"], "__main__")
        status = 0
    except SystemExit as leaving:
        status = leaving.code not in (None, 0)
    finally:
        sys.stdout.flush()
        os._exit(status)  # skips exit handlers, which the answer may have registered
