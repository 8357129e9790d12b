"""Stand-ins, in the judge's process, for objects that stay in the answer's process."""

import operator

MISSING = object()
# Methods of strings, lists and sets to which a test gives what it expects.
JUDGING = frozenset(
    "startswith endswith issubset issuperset isdisjoint difference symmetric_difference "
    "intersection union index rindex find rfind count replace strip lstrip rstrip removeprefix "
    "removesuffix split rsplit partition rpartition translate".split()
)


class Proxy:
    """A function, class, instance or iterator of the answer.

    Calls, attributes and iteration are carried out in the answer's process. `==`, `<` and
    arithmetic with plain data are not, because an object could claim to be equal to everything. If
    the object's class extends a builtin class, these operators use its builtin value.

    Args:
        is_known: whether the tests name this object, or created it from a class that they name. Any
            other object may have been returned in place of data, and has no methods to which tests
            pass what they expect.
    """

    __slots__ = ("__session", "__number", "__is_known", "__makes_objects")

    def __init__(self, session, number: int, is_known: bool) -> None:
        for name, value in (("session", session), ("number", number), ("is_known", is_known),
                            ("makes_objects", False)):  # fmt: skip
            object.__setattr__(self, f"_Proxy__{name}", value)

    def __call__(self, *args, **kwargs):
        tree = ["object", self.__number]
        return self.__session.call(tree, args, kwargs, is_known=self.__makes_objects)

    def __getattr__(self, name):
        if name in JUDGING and not may_judge(self):
            raise AttributeError(f"code_tests: an object of the answer has no .{name}")
        pair = (self, name)  # an enum's member is an object, too
        return self.__session.call(["name", "getattr"], pair, is_known=self.__makes_objects)

    def __setattr__(self, name, value):
        ask(self, "setattr", name, value)

    def __delattr__(self, name):
        ask(self, "delattr", name)

    def __getitem__(self, key):
        if not isinstance(key, int) and not may_judge(self):
            values = plain(self)
            if values is MISSING:
                raise TypeError("code_tests: an object of the answer has no keys")
            return values[key]
        return ask(self, "getitem", key)

    def __contains__(self, value):
        if may_judge(self) and plain(self) is MISSING:
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


def may_judge(proxy: Proxy) -> bool:
    """Return whether the tests expect this object, and give it keys and values to look up."""
    session = object.__getattribute__(proxy, "_Proxy__session")
    return session.uses_objects and object.__getattribute__(proxy, "_Proxy__is_known")


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


def attribute_of_error(error, name):
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
