"""The process that runs an answer: it serves the answer's names to a judge, or is a program.

It holds the answer's code and nothing else: no tests, no expected values, an empty environment.
What the answer does to this process can only change what it sends: plain data, to the judge.
"""

import builtins
import operator
import os
import sys
import types

import sandbox
import wire

PLAIN = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
# Types that the judge has as well.
SHARED = {kind.__name__: kind for kind in PLAIN}


class Server:
    """Carries out the judge's calls. Objects stay here; the judge gets their numbers."""

    def __init__(self, channel: wire.Channel, names: dict) -> None:
        self.channel = channel
        self.names = names
        self.objects: list = []
        self.numbers: dict = {}  # id → number; `objects` keeps each alive, so that no id returns

    def serve(self) -> None:
        while True:
            self.carry_out(self.channel.receive())

    def carry_out(self, request) -> None:
        _, function, args, kwargs = request
        try:
            call = self.value(function)
            args = [self.value(tree) for tree in args]
            kwargs = {name: self.value(tree) for name, tree in kwargs.items()}
            given = [*args, *kwargs.values()]
            before = [self.tree(value) for value in given]
            result = self.tree(call(*args, **kwargs))
            after = [self.tree(value) for value in given]
            reply = ["value", result, after if after != before else None]
        except BaseException as error:  # the judge raises the same
            reply = self.failure(error)
        try:
            self.channel.send(reply)
        except ValueError as error:  # too long
            self.channel.send(self.failure(error))

    def failure(self, error: BaseException) -> list:
        try:
            args = [self.tree(arg) for arg in error.args]
            return ["error", self.tree(type(error)), args, self.refer(error)]
        except Exception:
            return ["error", ["name", "RuntimeError"], [], None]

    def tree(self, value):
        return wire.encode(value, self.refer)

    def value(self, tree):
        return wire.decode(tree, self.resolve)

    def refer(self, value) -> list:
        if isinstance(value, type):
            name = value.__name__
            is_error = issubclass(value, BaseException)
            if getattr(builtins, name, None) is value and (is_error or name in SHARED):
                return ["name", name]
            if is_error:
                bases = [self.refer(base) for base in value.__bases__ if base is not object]
                return ["exception", self.number(value), name, bases]
        return ["object", self.number(value)]

    def number(self, value) -> int:
        number = self.numbers.setdefault(id(value), len(self.objects))
        if number == len(self.objects):
            self.objects.append(value)
        return number

    def resolve(self, kind, key, *_):
        if kind in ("object", "exception"):
            return self.objects[key]
        if kind == "name":
            own = {"lookup": self.lookup, "plain": plain}.get(key)
            return own or getattr(builtins, key, None) or getattr(operator, key)
        return lambda *args, **kwargs: self.call_back(key, args, kwargs)

    def lookup(self, name: str):
        if name not in self.names:
            raise NameError(f"name {name!r} is not defined")
        return self.names[name]

    def call_back(self, key: int, args, kwargs):
        """Call a function of the tests, which may call functions of the answer in turn."""
        trees = {name: self.tree(value) for name, value in kwargs.items()}
        self.channel.send(["back", key, [self.tree(value) for value in args], trees])
        while True:
            message = self.channel.receive()
            if message[0] == "call":
                self.carry_out(message)
            elif message[0] == "value":
                return self.value(message[1])
            else:
                raise getattr(builtins, message[1], RuntimeError)(*message[2:])


def plain(value):
    """Return the builtin value of an object whose class extends a builtin one."""
    for kind in PLAIN:
        if isinstance(value, kind):
            return str.__str__(value) if kind is str else kind(value)
    raise TypeError(f"a {type(value).__name__} is no plain data")


def module(name: str) -> dict:
    """Return the namespace of a new module, which dataclasses and enums look up by its name."""
    sys.modules[name] = types.ModuleType(name)
    return sys.modules[name].__dict__


def serve(code: str, source: int, sink: int) -> None:
    channel = wire.Channel(source, sink)
    names = module("answer")
    channel.send("ready")
    server = Server(channel, names)
    try:
        exec(compile(code, "<answer>", "exec"), names)
    except BaseException as error:
        channel.send(server.failure(error))
        return
    channel.send(["value", None, None])
    server.serve()


def run(code: str) -> int:
    """Run the code as a program; returns its exit status."""
    status = 0
    try:
        exec(compile(code, "<answer>", "exec"), module("__main__"))
    except SystemExit as leaving:
        status = 0 if leaving.code in (None, 0) else 1
    except BaseException:
        status = 1
    try:
        sys.stdout.flush()
    except BaseException:
        status = 1
    return status


def main(requested: str) -> None:
    request = sandbox.request(int(requested))
    is_program = request["program"]
    channel = (-1, -1) if is_program else sandbox.take_standard_streams()
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # as the module `site` does
    status = 1
    try:
        sandbox.confine(request["memory"], request["seconds"])
        if is_program:
            os.write(1, sandbox.READY)
            status = run(request["code"])
        else:
            serve(request["code"], *channel)
    except OSError as error:
        # Of the sandbox: nothing of the answer has run. The reader takes it for no message.
        os.write(channel[1] if not is_program else 1, str(error).encode())
    finally:
        os._exit(status)  # no handlers of the answer's own
