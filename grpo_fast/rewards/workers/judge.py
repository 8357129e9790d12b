"""Process that runs the tests of an answer. The code of the answer runs in a different process.

The tests call functions of the answer, and methods of the objects that these return, by name. Only
plain data crosses between the processes. This process decodes a result once, and compares only
the decoded values. An object of the answer never decides how it compares with a value of the tests.
"""

import builtins
import functools
import importlib
import os
import sys
from collections import deque
from decimal import Decimal

import sandbox
from answer import Channel, NotPlain, encode

# StopIteration becomes a plain Exception. If a call in a `map` over test cases raised it, the
# remaining cases would be skipped.
ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
ERRORS = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)
          and issubclass(kind, BaseException) and not issubclass(kind, ENDS)}  # fmt: skip
# Methods of texts and sets by which a test may judge a result, such as `count`. In place of such a
# value, `Extract([1, 2])` may return an object whose methods return what the test expects.
# Therefore an object that was created with arguments has these methods only after a call of a
# method that is not in CONTAINERS, such as `record`.
JUDGING = {*dir(str), *dir(frozenset)}
CONTAINERS = {name for kind in (str, bytearray, list, dict, set, deque) for name in dir(kind)}
# Names of methods of numbers that return a truth value. Only an object of a class, whose name
# begins with a capital letter, has them at once, as in `Rational(4, 2).is_integer()`.
NUMBERS = {"is_integer", *(name for name in dir(Decimal) if name.startswith("is_"))}


class NoValue(BaseException):
    """Tests compared an object of the answer, or took its truth value.

    It is not a TypeError, so that `with pytest.raises(TypeError)` does not expect it.
    """


def no_value(*_):
    """Raise an error, because a test compares an object of the answer, or reads its truth value."""
    raise NoValue


class Method:
    """Method of an object of the answer. It has no truth value, so `assert f(1).done` fails."""

    def __init__(self, call):
        self.__call = call

    def __call__(self, *args, **kwargs):
        return self.__call(*args, **kwargs)

    __eq__ = __ne__ = __bool__ = no_value


class Object:
    """Object of the answer, of which tests can only call methods.

    Args:
        call: function that calls a method, given its name and arguments, or None.
        judging: names of methods that the object does not have yet.
    """

    def __init__(self, call, judging):
        self.__state = (call, judging)

    def __getattr__(self, name):
        call, judging = self.__state
        if call is None or name.startswith("__") or name in judging:
            raise AttributeError(f"code_tests: an object of the answer has no .{name}")

        def method(*args, **kwargs):
            result = call(name, *args, **kwargs)
            # `hasattr` does not change this.
            self.__state = (call, judging if name in CONTAINERS else ())
            return result

        return Method(method)

    __eq__ = __ne__ = __bool__ = no_value


class Judge:
    """Connection to the answer's process, through which the tests call the answer's code.

    It is also the context of each test, and records whether a test was reached, and whether one
    failed. The changes that the answer has made to its arguments are applied after the test.
    Therefore `sorted` sees the original x in `assert f(x) == sorted(x)`.
    """

    def __init__(self, channel):
        self.channel = channel
        self.changes = []  # (argument before a call, argument after the call)
        self.errors = {}  # exception classes that the answer defines, keyed by name
        self.open = 0  # number of tests that are running
        self.is_reached = self.has_failed = False

    def __enter__(self):
        self.is_reached = True
        self.open += 1

    def __exit__(self, kind, *_):
        self.has_failed |= kind is not None
        self.open -= 1
        self.apply_changes()

    def call(self, target, method, /, *args, **kwargs):
        """Call a function of the answer, or a method of an object, and return its result.

        Args:
            target: name of a function, or number of an object.
            method: name of a method, or "".
            args: positional arguments.
            kwargs: keyword arguments.
        """
        message = [target, method, encode([*args]), encode(kwargs)]
        try:
            self.channel.send(message)
            kind, result, after = self.channel.receive()
            error = self.error_of(result, after) if kind in ("error", "missing") else None
            self.has_failed |= kind == "missing"  # even if the test expects an error
            if after and error is None:
                new = [*after[0], *after[1].values()]
                self.changes += zip([*args, *kwargs.values()], new, strict=True)
        except Exception:  # the answer's process has ended or does not follow the protocol
            os._exit(0)
        if error is not None:
            raise error
        if not self.open:
            self.apply_changes()
        # A method returns plain data. Of an object that it returns, no method can be called.
        methods = None if method else functools.partial(self.call, result)
        judging = JUDGING if str(target)[0].isupper() else JUDGING | NUMBERS
        return result if kind == "value" else Object(methods, judging if args or kwargs else ())

    def error_of(self, kinds, args):
        """Rebuild an exception that the answer has raised, from the names of its classes."""
        bases = [self.errors[name] for name in kinds if name in self.errors]
        bases += [ERRORS[name] for name in kinds if name in ERRORS][:1]
        try:
            return type(kinds[0], tuple(bases), {"__init__": Exception.__init__})(*args)
        except Exception:  # for example a UnicodeDecodeError without arguments
            return RuntimeError(f"the answer raised {kinds}")

    def apply_changes(self):
        """Apply the changes that the answer made to its arguments, which were copies."""
        for old, new in self.changes:
            if type(old) is type(new) and hasattr(old, "clear"):
                old.clear()
                getattr(old, "extend", getattr(old, "update", None))(new)
        self.changes = []


def refuse(*_):
    """Raise an error, because the tests called an exception class in place of a function."""
    raise TypeError("code_tests: tests cannot create exceptions of the answer")


def run_method(kind, name):
    """Run a method of a test class."""
    case = importlib.import_module("unittest").TestCase
    kind = kind if issubclass(kind, case) else type(kind.__name__, (kind, case), {})
    kind.setUpClass()
    kind(name).debug()


def main(descriptor):
    request = sandbox.request(descriptor)
    judge = Judge(Channel(sandbox.take(0)))
    out = sandbox.take(1)
    sys.path += request["paths"]
    try:
        sandbox.confine(request)
        judge.channel.send("go")
        defined = judge.channel.receive()
        judge.errors = {x: type(x, (Exception,), {"__init__": refuse}) for x in defined}
        # The tests may be below `if __name__ == "__main__"`.
        names = {"__name__": "__main__", "_test_": judge, "_run_": run_method}
        for name, own in request["names"].items():
            names[name] = judge.errors.get(own, functools.partial(judge.call, own, ""))
        # Run the statements one by one. Write a line to `out` for each test that passes.
        for is_test, stored, code in request["units"]:
            judge.is_reached = judge.has_failed = False
            try:
                exec(compile(code, "<tests>", "exec"), names)
                if is_test and judge.is_reached and not judge.has_failed:
                    os.write(out, f"{sandbox.HELD}\n".encode())
            except NotPlain as error:
                os.write(out, f"{error}\n".encode())
            except BaseException:  # a test that calls sys.exit() counts as failed
                for name in stored:  # an older value must not be taken for this statement's result
                    names.pop(name, None)
    finally:
        os._exit(0)
