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

import sandbox
from answer import Channel, decode, encode

ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
ERRORS = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)
          and issubclass(kind, BaseException) and not issubclass(kind, ENDS)}  # fmt: skip
# Methods whose argument may be the expected value of a test. Only an object that was created
# without arguments has them: in place of a list, `Extract([1, 2])` may return an object.
JUDGING = {*dir(str), *dir(frozenset)}


class Unsupported(BaseException):
    """Exception for an argument that is not plain data. It is an error of the tests."""


class Object:
    """Object of the answer, of which tests can only call methods.

    Args:
        call: function that calls a method, given its name and arguments, or None.
        is_new: True if the object was created without arguments.
    """

    def __init__(self, call, is_new):
        self.__state = (call, is_new)

    def __getattr__(self, name):
        call, is_new = self.__state
        if call is None or name.startswith("__") or (name in JUDGING and not is_new):
            raise AttributeError(f"code_tests: an object of the answer has no .{name}")
        return functools.partial(call, name)

    def __eq__(self, *_):
        raise TypeError("code_tests: an object of the answer has no value")

    __ne__ = __bool__ = __eq__


class Mark:
    """Context of each statement. It records whether a test was reached, and whether one failed."""

    def __init__(self, judge):
        self.judge = judge
        self.is_reached = self.has_failed = False

    def __enter__(self):
        self.is_reached = True

    def __exit__(self, kind, *_):
        self.has_failed |= kind is not None
        self.judge.apply_changes()


class Judge:
    """Connection to the answer's process, through which the tests call the answer's code."""

    def __init__(self, channel):
        self.channel = channel
        self.changes = []  # (arguments before a call, arguments after the call)
        self.errors = {}  # exception classes that the answer defines, keyed by name

    def call(self, target, method, /, *args, **kwargs):
        """Call a function of the answer, or a method of an object, and return its result.

        Args:
            target: name of a function, or number of an object.
            method: name of a method, or "".
            args: positional arguments.
            kwargs: keyword arguments.
        """
        try:
            tree = encode([[*args], kwargs])
        except TypeError as error:
            raise Unsupported(f"{error}, in a call of {method or target}") from None
        try:
            self.channel.send([target, method, tree])
            kind, result, after = self.channel.receive()
            if kind == "error":
                result = self.error_of(result, *decode(after))
            elif kind == "value":
                result = decode(result)
            after = decode(after)
        except Exception:  # the answer's process has ended or does not follow the protocol
            os._exit(0)
        if kind == "error":
            raise result
        if after is not None:
            self.changes.append(((args, kwargs), after))
        if kind == "value":
            return result
        # A method returns plain data. Of an object that it returns, no method can be called.
        methods = None if method else functools.partial(self.call, result)
        return Object(methods, is_new=not (args or kwargs))

    def error_of(self, kinds, args, attributes):
        """Rebuild an exception that the answer has raised: its type, arguments and attributes.

        StopIteration becomes a RuntimeError. If a call in a `map` over test cases raised it, the
        remaining cases would be skipped.
        """
        bases = [self.errors[name] for name in kinds if name in self.errors]
        bases += [ERRORS[name] for name in kinds if name in ERRORS][:1]
        try:
            kind = bases[0] if len(bases) == 1 else type(kinds[0], tuple(bases), {})
            error = kind(*args)
            error.__dict__.update(attributes)
            return error
        except Exception:  # for example a UnicodeDecodeError without arguments
            return RuntimeError(f"the answer raised {kinds}")

    def apply_changes(self):
        """Apply the changes that the answer made to its arguments, which were copies."""
        changes = self.changes
        self.changes = []
        for (args, kwargs), (new_args, new_kwargs) in changes:
            old = [*args, *kwargs.values()]
            for x, y in zip(old, [*new_args, *new_kwargs.values()], strict=False):
                if type(x) is type(y) and hasattr(x, "clear"):
                    x.clear()
                    getattr(x, "extend", getattr(x, "update", None))(y)


def run_test(function, method=None):
    """Run a test function of the tests, or a method of a test class."""
    if method is None:
        function()
    elif hasattr(function, "debug"):  # a unittest.TestCase
        function.setUpClass()
        function(method).debug()
    else:
        case = function()
        getattr(case, "setup_method", lambda: None)()
        getattr(case, method)()


def run(request, judge, out):
    """Run the tests one by one. Write a line to `out` for each test that passes."""
    # 1. Create the global names. Tests may stand below `if __name__ == "__main__"`.
    names = {"__name__": "__main__", "_step_": Mark(judge), "_run_": run_test}
    for name, (module, attribute) in request["borrowed"].items():
        found = importlib.import_module(module)
        names[name] = getattr(found, attribute) if attribute else found
    for name, own in request["names"].items():
        names[name] = judge.errors.get(own, functools.partial(judge.call, own, ""))
    if request["seeds"]:  # seed the answer's generator of random numbers, too
        random = importlib.import_module("random")
        seed = random.seed
        random.seed = lambda value=None: (seed(value), judge.call("random.seed", "", value))[0]
    # 2. Run the statements.
    for is_test, code, stored in request["units"]:
        names["_test_"] = test = Mark(judge)
        try:
            exec(compile(code, "<tests>", "exec"), names)
            if is_test and test.is_reached and not test.has_failed:
                os.write(out, f"{sandbox.HELD}\n".encode())
        except Unsupported as error:
            os.write(out, f"{error}\n".encode())
        except BaseException:  # a test that calls sys.exit() counts as failed
            for name in stored:  # an older value must not be taken for the result of this statement
                names.pop(name, None)


def main(descriptor):
    request = sandbox.request(descriptor)
    judge = Judge(Channel(sandbox.take(0)))
    out = sandbox.take(1)
    sys.path += request["paths"]
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the sandbox forbids threads
    try:
        sandbox.confine(request)
        judge.channel.send("go")
        judge.errors = {name: type(name, (Exception,), {}) for name in judge.channel.receive()}
        run(request, judge, out)
    finally:
        os._exit(0)
