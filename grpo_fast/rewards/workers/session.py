"""Calls from the tests of an answer into the process that runs it."""

import builtins
import contextlib

import wire
from proxies import MISSING, Proxy, attribute_of_error, number_of

ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)


def _shared_types() -> dict:
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type)]
    shared = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
    return {k.__name__: k for k in kinds if issubclass(k, BaseException) or k in shared}


TYPES = _shared_types()


class Session:
    """Calls into the answer's process."""

    def __init__(self, channel: wire.Channel) -> None:
        self.channel = channel
        self.is_open = True
        self.functions: list = []  # of the tests, which the answer may call
        self.proxies: dict = {}
        self.errors: dict = {}  # number → the class that stands for an exception of the answer
        self.is_asserting = False
        self.uses_objects = False  # whether the tests do
        self.changes: list = []  # arguments and what a call has made of them

    def call(self, function, args=(), kwargs=None, is_known=False):
        """Call a function of the answer's process.

        is_known: the tests expect an object, not data (see `Proxy`).
        """
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        trees = {name: self.tree(value) for name, value in kwargs.items()}
        request = ["call", function, [self.tree(value) for value in args], trees]
        message = self.exchange(request)
        while message[0] == "back":
            message = self.exchange(self.called_back(*message[1:]))
        if message[0] == "error":
            raise self.error(message, is_next=function == ["name", "next"])
        value = self.value(message[1])
        if message[2] is not None:
            self.changes.append((given, [self.value(tree) for tree in message[2]]))
            self.apply_changes()
        if type(value) is Proxy and is_known:
            return self.proxy(number_of(value), True)
        return value

    def exchange(self, request=None) -> list:
        """Send a request, if any, and return the next message; nothing is sent after a fault."""
        if not self.is_open:
            raise wire.Malformed("the answer's process is gone")
        self.is_open = False
        if request is not None:
            self.channel.send(request)
        message = self.channel.receive()
        lengths = {"value": 3, "error": 4, "back": 4}
        is_list = isinstance(message, list) and message and isinstance(message[0], str)
        if not is_list or lengths.get(message[0]) != len(message):
            raise wire.Malformed("expected a reply")
        if message[0] != "value" and not isinstance(message[2], list):
            raise wire.Malformed("expected arguments")
        self.is_open = True
        return message

    def called_back(self, key, args, kwargs) -> list:
        if type(key) is not int or not 0 <= key < len(self.functions):
            raise wire.Malformed("expected a function of the tests")
        if not isinstance(kwargs, dict):
            raise wire.Malformed("expected named arguments")
        args = [self.value(tree) for tree in args]
        kwargs = {name: self.value(tree) for name, tree in kwargs.items()}
        try:
            return ["value", self.tree(self.functions[key](*args, **kwargs))]
        except Exception as error:
            return ["error", type(error).__name__, str(error)]

    def apply_changes(self) -> None:
        """Change arguments as the answer did. Within an assert that waits for its end, so that
        `f(x) == sorted(x)` judges by the x that was given.
        """
        if not self.is_asserting:
            changes, self.changes = self.changes, []
            for old, new in changes:
                refresh(old, new)

    @contextlib.contextmanager
    def asserting(self, is_asserting: bool):
        """The context of an assert, and of the functions of the tests, which it may call."""
        before, self.is_asserting = self.is_asserting, is_asserting
        try:
            yield
        finally:
            self.is_asserting = before
            self.apply_changes()

    def error(self, message: list, is_next: bool) -> Exception:
        _, kind, args, proxy = message
        kind = self.value(kind)
        args = [self.value(tree) for tree in args]
        is_error = isinstance(kind, type) and issubclass(kind, Exception)
        # Elsewhere the end of an iteration would end a `map` over test cases early.
        if not is_error or (issubclass(kind, ENDS) and not is_next):
            return RuntimeError(f"the answer raised {kind}")
        try:
            error = kind(*args)
        except Exception:
            return RuntimeError(f"the answer raised {kind}")
        if kind in self.errors.values():
            error.proxy_ = self.value(proxy)
        return error

    def name(self, name: str):
        """Return what the answer calls so. A name in CapWords is a class, which makes objects."""
        value = self.call(["name", "lookup"], [name], is_known=True)
        if type(value) is Proxy and name[0].isupper() and "_" not in name:
            object.__setattr__(value, "_Proxy__makes_objects", True)
        return value

    def tree(self, value):
        return wire.encode(value, self.refer)

    def value(self, tree):
        return wire.decode(tree, self.resolve)

    def refer(self, value) -> list:
        if type(value) is Proxy:
            return ["object", number_of(value)]
        for number, kind in self.errors.items():
            if value is kind:
                return ["exception", number]
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, MISSING) is value:
            return ["name", name]
        if callable(value):
            self.functions.append(value)
            return ["back", len(self.functions) - 1]
        came = type(value).__name__
        raise TypeError(f"code_tests: expected plain data or a function as argument, got a {came}")

    def resolve(self, kind, key, *more):
        if kind == "object" and type(key) is int:
            return self.proxy(key, False)
        if kind == "name" and key in TYPES:
            return TYPES[key]
        if kind == "exception" and type(key) is int:
            if key not in self.errors:
                name, bases = more
                kinds = [self.resolve(*base) for base in bases]
                is_plain = all(isinstance(kind, type) for kind in kinds)
                if not is_plain or not all(issubclass(kind, Exception) for kind in kinds):
                    raise wire.Malformed("expected an exception")
                attributes = {"__getattr__": attribute_of_error}
                self.errors[key] = type(str(name), tuple(kinds), attributes)
            return self.errors[key]
        raise wire.Malformed(f"expected a value, got {kind!r}")

    def proxy(self, number: int, is_known: bool) -> "Proxy":
        key = (number, is_known)
        if key not in self.proxies:
            self.proxies[key] = Proxy(self, number, is_known)
        return self.proxies[key]


def refresh(old, new):
    """Give the lists, dicts and sets in `old` the contents of `new`; returns the newer of both."""
    if type(old) is not type(new):
        return new
    if isinstance(old, (list, tuple)):
        items = [refresh(a, b) for a, b in zip(old, new, strict=False)]
        items += new[len(items) :]
        if isinstance(old, tuple):
            return old
        old[:] = items
    elif isinstance(old, dict):
        items = {key: refresh(old[key], new[key]) if key in old else new[key] for key in new}
        old.clear()
        old.update(items)
    elif isinstance(old, (set, bytearray)):
        fresh = new.copy()
        old.clear()
        old.update(fresh) if isinstance(old, set) else old.extend(fresh)
    else:
        return new
    return old
