"""The process that runs the tests of an answer, which runs in another process.

Each name that the tests take from the answer is a proxy here: a call sends plain data to the
answer's process (`answer.py`) and returns plain data that this process has built. An object of the
answer stays where it is, and its proxy never decides how it compares with a value of the tests.
"""

import ast
import builtins
import contextlib
import importlib
import operator
import os

import sandbox
import sources
import wire

HELD = b"held\n"
MISSING = object()
ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
# Methods of strings, lists and sets to which a test gives what it expects.
JUDGING = frozenset(
    "startswith endswith issubset issuperset isdisjoint difference symmetric_difference "
    "intersection union index rindex find rfind count replace strip lstrip rstrip removeprefix "
    "removesuffix split rsplit partition rpartition translate".split()
)


class Session:
    """Calls into the answer's process."""

    def __init__(self, channel: wire.Channel) -> None:
        self.channel = channel
        self.is_open = True
        self.functions: list = []  # of the tests, which the answer may call
        self.proxies: dict = {}
        self.errors: dict = {}  # number → the class that stands for an exception of the answer
        self.is_asserting = False
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
                attributes = {"__getattr__": _attribute_of_error}
                self.errors[key] = type(str(name), tuple(kinds), attributes)
            return self.errors[key]
        raise wire.Malformed(f"expected a value, got {kind!r}")

    def proxy(self, number: int, is_known: bool) -> "Proxy":
        key = (number, is_known)
        if key not in self.proxies:
            self.proxies[key] = Proxy(self, number, is_known)
        return self.proxies[key]


def errors_and_types() -> dict:
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type)]
    shared = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
    return {k.__name__: k for k in kinds if issubclass(k, BaseException) or k in shared}


TYPES = errors_and_types()


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


class Proxy:
    """An object of the answer: a function, a class, an instance, an iterator.

    What it does to itself is carried out where it is. It is never shown a value that a test may
    expect: `==` and arithmetic with plain data are not forwarded, since an object could be equal to
    everything. For an object whose class extends a builtin one they use that plain value.

    `is_known`: the tests themselves name it, or make it from a class that they name. Any other
    object may stand where data is expected, and is not asked whether it starts with, contains, …
    """

    __slots__ = ("__session", "__number", "__is_known", "__makes_objects")

    def __init__(self, session: Session, number: int, is_known: bool) -> None:
        for name, value in (("session", session), ("number", number), ("is_known", is_known),
                            ("makes_objects", False)):  # fmt: skip
            object.__setattr__(self, f"_Proxy__{name}", value)

    def __call__(self, *args, **kwargs):
        tree = ["object", self.__number]
        return self.__session.call(tree, args, kwargs, is_known=self.__makes_objects)

    def __getattr__(self, name):
        if name in JUDGING and not self.__is_known:
            raise AttributeError(f"code_tests: an object of the answer has no .{name}")
        pair = (self, name)  # an enum's member is an object, too
        return self.__session.call(["name", "getattr"], pair, is_known=self.__makes_objects)

    def __setattr__(self, name, value):
        ask(self, "setattr", name, value)

    def __delattr__(self, name):
        ask(self, "delattr", name)

    def __getitem__(self, key):
        if not self.__is_known and not isinstance(key, int):
            values = plain(self)
            if values is MISSING:
                raise TypeError("code_tests: an object of the answer has no keys")
            return values[key]
        return ask(self, "getitem", key)

    def __contains__(self, value):
        if self.__is_known and plain(self) is MISSING:
            return ask(self, "contains", value) is True
        return any(item is value or item == value for item in self)

    def __enter__(self):
        return ask(self, "getattr", "__enter__")()

    def __exit__(self, *_):
        """An answer does not suppress the error of an assert: this returns None."""
        ask(self, "getattr", "__exit__")(None, None, None)

    def __instancecheck__(self, value):
        return type(value) is Proxy and ask(value, "isinstance", self) is True

    def __subclasscheck__(self, kind):
        return type(kind) is Proxy and ask(kind, "issubclass", self) is True

    def __mro_entries__(self, bases):
        raise TypeError("code_tests: tests cannot extend a class of the answer")


def number_of(proxy: Proxy) -> int:
    return object.__getattribute__(proxy, "_Proxy__number")


def ask(proxy: Proxy, function: str, *args):
    """Apply a function of `builtins` or `operator` to an object, in the answer's process."""
    return object.__getattribute__(proxy, "_Proxy__session").call(
        ["name", function], (proxy, *args)
    )


def plain(proxy: Proxy):
    """Return the builtin value of an object whose class extends a builtin one, else MISSING."""
    try:
        value = ask(proxy, "plain")
    except TypeError:
        return MISSING
    return MISSING if type(value) is Proxy else value


def _attribute_of_error(error, name):
    return getattr(object.__getattribute__(error, "proxy_"), name)


def forward(function: str):
    return lambda self, *args: ask(self, function, *args)


def binary(function: str, is_reflected: bool = False):
    compute = getattr(operator, function)

    def method(self, other):
        if type(other) is Proxy:
            return ask(self, function, other)
        value = plain(self)
        if value is not MISSING:
            return compute(other, value) if is_reflected else compute(value, other)
        # A number times a vector or a matrix; no test multiplies by what it expects.
        is_known = object.__getattribute__(self, "_Proxy__is_known")
        if function in ("mul", "imul") and is_known and type(other) in (int, float):
            session = object.__getattribute__(self, "_Proxy__session")
            pair = (other, self) if is_reflected else (self, other)
            return session.call(["name", function], pair, is_known=True)
        return NotImplemented

    return method


FORWARDED = ("len", "iter", "next", "reversed", "hash", "str", "repr", "bool", "int", "float",
             "complex", "abs", "round", "format", "index", "neg", "pos", "invert", "setitem",
             "delitem")  # fmt: skip
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_",
              "xor", "lshift", "rshift")  # fmt: skip
for _name in FORWARDED:
    setattr(Proxy, f"__{_name}__", forward(_name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Proxy, f"__{_name}__", binary(_name))
for _name in ARITHMETIC:
    _bare = _name.rstrip("_")
    setattr(Proxy, f"__{_bare}__", binary(_name))
    setattr(Proxy, f"__r{_bare}__", binary(_name, is_reflected=True))


def run(source: str, session: Session, out: int) -> None:
    """Run the tests one by one; writes a line for each that holds."""
    namespace = {"__name__": "tests", sources.ASSERTING: session.asserting}
    for name in sources.modules_of(source):
        with contextlib.suppress(ImportError):
            namespace[name] = importlib.import_module(name)
    for name in sources.names_of_answer(source):
        with contextlib.suppress(NameError):
            namespace[name] = session.name(name)
    tree = ast.parse(source)
    tests = sources.tests_of(tree)
    for statement in tree.body:
        try:
            exec(sources.compiled(statement), namespace)
        except BaseException:  # sys.exit() is no way to pass, either
            continue
        if statement in tests:
            os.write(out, HELD)


def main(requested: str, results: str) -> None:
    request = sandbox.request(int(requested))
    out = int(results)
    channel = wire.Channel(*sandbox.take_standard_streams())
    try:
        sandbox.confine(request["memory"], request["seconds"])
        if channel.receive() != "ready":
            raise OSError("expected an answer's process that is ready")
        os.write(out, sandbox.READY)
    except (OSError, wire.Malformed) as error:
        os.write(out, str(error).encode())
        os._exit(1)
    try:
        session = Session(channel)
        if session.exchange()[0] == "value":  # the answer's code ran to its end
            run(request["tests"], session, out)
    finally:
        os._exit(0)
