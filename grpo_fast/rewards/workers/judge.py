"""Process that runs the tests of an answer. The code of the answer runs in a different process.

The tests call functions of the answer, and methods of the objects that these return, by name. Only
plain data crosses between the processes. This process decodes a result once, and compares only
the decoded values. An object of the answer never decides how it compares with a value of the tests.
"""

import builtins
import functools
import os
import sys

import sandbox
from answer import Channel, NotPlain, encode

# StopIteration becomes a plain Exception. If a call in a `map` over test cases raised it, the
# remaining cases would be skipped.
ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
ERRORS = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)
          and issubclass(kind, BaseException) and not issubclass(kind, ENDS)}  # fmt: skip
# Methods whose argument may be the expected value of a test. Only an object of a class that was
# created without arguments has them: in place of a list, `extract([1, 2])` may return an object.
JUDGING = {*dir(str), *dir(frozenset)}


class Object:
    """Object of the answer, of which tests can only call methods.

    Args:
        call: function that calls a method, given its name and arguments.
        is_new: True if the object is the result of a class that was called without arguments.
    """

    def __init__(self, call, is_new):
        self.__state = (call, is_new)

    def __getattr__(self, name):
        call, is_new = self.__state
        if name.startswith("__") or (name in JUDGING and not is_new):
            raise AttributeError(f"code_tests: an object of the answer has no .{name}")
        return functools.partial(call, name)

    def __eq__(self, *_):
        raise TypeError("code_tests: an object of the answer has no value")

    __ne__ = __bool__ = __eq__


def call(channel, target, method, /, *args, **kwargs):
    """Call a function of the answer, or a method of an object, and return its result.

    Args:
        channel: the connection to the answer's process.
        target: name of a function, or number of an object.
        method: name of a method, or "".
        args: positional arguments.
        kwargs: keyword arguments.
    """
    message = [target, method, encode([*args]), encode(kwargs)]
    try:
        channel.send(message)
        kind, result = channel.receive()
        error = error_of(*result) if kind == "error" else None
    except Exception:  # the answer's process has ended or does not follow the protocol
        os._exit(0)
    if error is not None:
        raise error
    is_new = not (method or args or kwargs) and target[0].isupper()
    return result if kind == "value" else Object(functools.partial(call, channel, result), is_new)


def error_of(kinds, args):
    """Rebuild an exception that the answer has raised, as its nearest builtin class."""
    kind = next((ERRORS[name] for name in kinds if name in ERRORS), Exception)
    try:
        return kind(*args)
    except Exception:  # for example a UnicodeDecodeError without arguments
        return RuntimeError(f"the answer raised {kinds}")


def run_method(kind, name):
    """Run a method of a subclass of `unittest.TestCase`."""
    kind.setUpClass()
    kind(name).debug()


def main(descriptor):
    request = sandbox.request(descriptor)
    channel = Channel(sandbox.take(0))
    out = sandbox.take(1)
    sys.path += request["paths"]
    try:
        sandbox.confine(request)
        channel.send("go")
        reached = []  # grows with each test that passes
        # The tests may be below `if __name__ == "__main__"`.
        names = {"__name__": "__main__", "_run_": run_method}
        names["_reached_"] = lambda: reached.append(True)
        for name, own in request["names"].items():
            names[name] = functools.partial(call, channel, own, "")
        # Run the statements one by one. Write a line to `out` for each statement that passes.
        for is_test, stored, code in request["units"]:
            reached.clear()
            try:
                exec(compile(code, "<tests>", "exec"), names)
                if is_test and reached:
                    os.write(out, f"{sandbox.HELD}\n".encode())
            except BaseException as error:  # a test that calls sys.exit() counts as failed
                for name in stored:  # an older value must not be taken for this statement's result
                    names.pop(name, None)
                # If the answer returned the value, the test has failed. Otherwise the tests are
                # faulty.
                if isinstance(error, NotPlain) and error.args[0] is not Object:
                    os.write(out, f"a value of type {error.args[0].__name__}\n".encode())
    finally:
        os._exit(0)
