"""Process that runs the code of a completion. This code is called the answer.

The answer runs as a program, or the judge calls its functions. The judge is the process that runs
the tests. This process contains only the code of the answer. It has no tests, no expected values
and an empty environment. Even if the answer takes over this process, it can only change the plain
data that the process sends to the judge.
"""

import builtins
import operator
import os
import sys
import types

import sandbox
import wire


class Answer(wire.Peer):
    """Connection to the judge, the process that runs the tests. Executes the judge's requests."""

    def __init__(self, descriptor, names):
        super().__init__(descriptor)
        own = {"plain": plain, "lookup": names.__getitem__}
        self.operations = {**vars(operator), **vars(builtins), **own}

    def refer(self, value):
        if isinstance(value, type):
            name = value.__name__
            is_error = issubclass(value, BaseException)
            if getattr(builtins, name, None) is value and (is_error or value in wire.PLAIN):
                return ["name", name]
            if is_error:
                bases = [self.refer(base) for base in value.__bases__ if base is not object]
                return ["exception", self.number(value), name, bases]
        return ["object", self.number(value)]

    def resolve(self, tag, key, *_):
        if tag in ("own", "exception"):
            return self.objects[key]
        if tag == "name":
            return getattr(builtins, key)
        return lambda *args, **kwargs: self.call_back(key, args, kwargs)

    def call_back(self, key, args, kwargs):
        """Call a function that the tests passed as an argument. It may call the answer's code."""
        arguments = ["list", ["list", ["own", key], *map(self.encode, args)], self.encode(kwargs)]
        kind, parts = self.request("call", arguments)
        if kind == "value":
            return self.decode(parts[0])
        error, args, _ = map(self.decode, parts)
        raise error(*args)


def plain(value):
    """Convert an object to the builtin class that its class extends, such as list."""
    for kind in wire.PLAIN:
        if isinstance(value, kind):
            return str.__str__(value) if kind is str else kind(value)
    raise TypeError(f"a {type(value).__name__} is not plain data")


def module(name):
    """Create a module in sys.modules, where dataclasses look it up, and return its namespace."""
    sys.modules[name] = types.ModuleType(name)
    return sys.modules[name].__dict__


def serve(request):
    """Run the answer's code. Then execute the judge's requests until the judge exits."""
    names = module("answer")
    answer = Answer(sandbox.take(0), names)
    answer.receive()  # wait until the judge has made its memory unreadable
    sandbox.confine(request)
    try:
        exec(compile(request["code"], "<answer>", "exec"), names)
    except BaseException:
        return
    answer.send(wire.pack("defined"))
    while True:
        _, *parts = answer.receive()
        answer.serve(*parts)


def run(request):
    """Run the code as a program and return its exit status."""
    sandbox.confine(request)
    try:
        try:
            exec(compile(request["code"], "<answer>", "exec"), module("__main__"))
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                return 1
        sys.stdout.flush()
    except BaseException:
        return 1
    return 0


def main(descriptor):
    request = sandbox.request(descriptor)
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # normally defined by `site`
    status = 1
    try:
        status = run(request) if request["program"] else serve(request)
    finally:
        os._exit(status or 0)  # skips exit handlers, which the answer may have registered
