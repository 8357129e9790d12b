"""Process that runs the tests of an answer. The code of the answer runs in a different process.

Calls of the answer's functions exchange plain data, which this process decodes. An object of the
answer stays in the other process, and is represented by a handle here. The handle never lets the
object decide how it compares with a value of the tests.
"""

import builtins
import contextlib
import operator
import os

import sandbox
import sources
import wire
from handles import CLASS, MISSING, OBJECT, VALUE, Handle, state_of

ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
# Builtin classes that the answer's process may name in a message. Builtin functions such as `eval`
# are excluded.
TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)
         and (issubclass(kind, BaseException) or kind in wire.PLAIN)}  # fmt: skip


class Judge(wire.Peer):
    """Connection to the process of the code under test, through which the tests call that code."""

    operations = {"call": operator.call}

    def __init__(self, descriptor):
        super().__init__(descriptor)
        self.handles = {}  # (number, role) → Handle, reused so that `is` works
        self.errors = {}  # number → class that represents an exception class of the answer
        self.changes = []  # (arguments before a call, arguments after the call)
        self.uses_objects = False  # True if the tests use objects that are not plain data

    def ask(self, operation, args, kwargs=None, role=VALUE):
        """Execute an operation in the process of the code under test, and return its result.

        Args:
            operation: "call", "lookup", "plain", or a function of `builtins` or `operator`.
            args: positional arguments.
            kwargs: keyword arguments.
            role: role of the handle if the result is an object; see `Handle`.
        """
        given = [args, kwargs or {}]
        # Encode outside of the try block. An argument that cannot be sent is an error of the tests.
        tree = self.encode(given)
        try:
            kind, parts = self.request(operation, tree)
            if kind == "value":
                result, after = map(self.decode, parts)
            else:
                error = self.error_of(*map(self.decode, parts), is_next=operation == "next")
        except Exception:  # the answer's process has ended or does not follow the protocol
            os._exit(0)
        if kind != "value":
            raise error
        if after is not None:
            self.changes.append((given, after))
        if type(result) is Handle:
            return self.handle(state_of(result)[1], role)
        return result

    def error_of(self, kind, args, attributes, is_next):
        """Rebuild an exception that the code under test has raised, from its decoded parts."""
        is_error = isinstance(kind, type) and issubclass(kind, Exception)
        # Only next() may raise StopIteration. If a call in a `map` over test cases raised it, the
        # remaining cases would be skipped.
        if not is_error or (issubclass(kind, ENDS) and not is_next):
            return RuntimeError(f"the answer raised {kind}")
        try:
            error = kind(*args)
        except Exception:  # for example a UnicodeDecodeError without arguments
            return RuntimeError(f"the answer raised {kind}")
        error.__dict__.update(attributes)
        return error

    def apply_changes(self):
        """Apply the changes that the answer's code made to its arguments.

        The answer's code receives copies of its arguments. Changes of the copies are applied to the
        variables of the tests.
        """
        changes = self.changes
        self.changes = []
        for before, after in changes:
            refresh(before, after)

    def handle(self, number, role):
        return self.handles.setdefault((number, role), Handle(self, number, role))

    def refer(self, value):
        if type(value) is Handle:
            return ["own", state_of(value)[1]]
        for number, kind in self.errors.items():
            if value is kind:
                return ["exception", number]
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, MISSING) is value:
            return ["name", name]
        if callable(value):
            return ["function", self.number(value)]
        kind = type(value).__name__
        raise TypeError(f"code_tests: expected plain data or a function as argument, got a {kind}")

    def resolve(self, tag, key, *parts):
        if tag == "object":
            return self.handle(int(key), VALUE)
        if tag == "own":
            return self.objects[key]
        if tag == "name":
            return TYPES[key]
        if tag == "exception" and key not in self.errors:
            name, bases = parts
            kinds = tuple(self.resolve(*base) for base in bases)
            if not all(issubclass(kind, Exception) for kind in kinds):
                raise TypeError("expected bases that are exceptions")
            self.errors[key] = type(name, kinds, {})
        return self.errors[key]


class Test:
    """Context of each test in a statement. It records whether a test was reached and held."""

    def __init__(self):
        self.is_reached = False
        self.has_failed = False

    def __enter__(self):
        self.is_reached = True

    def __exit__(self, kind, *_):
        self.has_failed |= kind is not None and issubclass(kind, AssertionError)


def refresh(old, new):
    """Copy the contents of `new` into the lists, dicts and sets in `old`, and return the result.

    The containers remain the same objects, so that all variables of the tests see the change.
    """
    if type(old) is not type(new):
        return new
    if isinstance(old, (list, tuple)):
        items = [refresh(a, b) for a, b in zip(old, new, strict=False)] + [*new[len(old) :]]
        if isinstance(old, tuple):
            return old
        old[:] = items
    elif isinstance(old, dict):
        items = {key: refresh(old.get(key), new[key]) for key in new}
        old.clear()
        old.update(items)
    elif isinstance(old, set):
        old.intersection_update(new)
        old.update(new)
    elif isinstance(old, bytearray):
        old[:] = new
    else:
        return new
    return old


def run(source, judge, out):
    """Run the tests one by one. Write a line to `out` for each test that passes."""
    # Tests may stand below `if __name__ == "__main__"`.
    namespace = {"__name__": "__main__", sources.APPLY_CHANGES: judge.apply_changes}
    namespace |= sources.borrowed(source)
    judge.uses_objects = sources.uses_objects(source)
    # 1. Look up the names that the answer must define.
    for name in sources.names_of_answer(source):
        # A name in CapWords is a class, whose instances are objects that the tests expect.
        is_class = name[0].isupper() and "_" not in name
        with contextlib.suppress(KeyError):  # the answer does not define the name
            namespace[name] = judge.ask("lookup", [name], role=CLASS if is_class else OBJECT)
    # 2. Run the statements.
    for statement in sources.statements_of(source):
        namespace[sources.TEST] = test = Test()
        try:
            exec(sources.compiled(statement), namespace)
        except BaseException:  # a test that calls sys.exit() counts as failed
            with contextlib.suppress(BaseException):
                judge.apply_changes()
            continue
        if test.is_reached and not test.has_failed:
            os.write(out, sandbox.HELD)


def main(descriptor):
    request = sandbox.request(descriptor)
    judge = Judge(sandbox.take(0))
    out = sandbox.take(1)
    try:
        sandbox.confine(request)
        judge.send(wire.pack("go"))
        if judge.receive() == "defined":  # the answer's code has run without an error
            run(request["tests"], judge, out)
    finally:
        os._exit(0)
