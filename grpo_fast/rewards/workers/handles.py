"""Handles through which the tests use objects that stay in the process of the answer's code."""

import operator

MISSING = object()
# Methods of strings, lists and sets whose argument is often the expected value of a test. An answer
# must not see expected values. Therefore handles for which `may_judge` is False do not have these
# methods.
JUDGING = frozenset(
    "startswith endswith issubset issuperset isdisjoint difference symmetric_difference "
    "intersection union index rindex find rfind count replace strip lstrip rstrip removeprefix "
    "removesuffix split rsplit partition rpartition translate remove discard difference_update "
    "symmetric_difference_update intersection_update".split()
)
# Roles of a handle; see `Handle`. If the code under test returns an object where the tests expect
# plain data, the role of the object is VALUE.
CLASS, OBJECT, VALUE = "class", "object", "value"


class Handle:
    """Handle of an object in the process of the code under test.

    The object may be a function, class, instance or iterator. Calls, attribute accesses and
    iteration are executed in that process. `==`, `<` and arithmetic with plain data are not
    executed there, because an object could claim to be equal to everything. If the class of the
    object extends a builtin class, these operators use the builtin value.

    Args:
        judge: the connection to that process.
        number: number of the object in that process.
        role: CLASS for a class that the tests name, OBJECT for an object that such a class has
            returned, and VALUE for every other object. A VALUE has no method whose argument could
            be an expected value, because an answer may return it in place of plain data.
    """

    __slots__ = ("__state",)

    def __init__(self, judge, number, role):
        object.__setattr__(self, "_Handle__state", (judge, number, role))

    def __call__(self, *args, **kwargs):
        return self.__state[0].ask("call", [self, *args], kwargs, made_by(self))

    def __getattr__(self, name):
        if name in JUDGING and not may_judge(self):
            raise AttributeError(f"code_tests: an object of the answer has no .{name}")
        return self.__state[0].ask("getattr", [self, name], role=made_by(self))

    def __setattr__(self, name, value):
        ask(self, "setattr", name, value)

    def __delattr__(self, name):
        ask(self, "delattr", name)

    def __getitem__(self, key):
        if isinstance(key, int) or may_judge(self):
            return ask(self, "getitem", key)
        value = plain(self)
        if value is MISSING:
            raise TypeError("code_tests: an object of the answer has no keys")
        return value[key]

    def __contains__(self, value):
        if may_judge(self) and plain(self) is MISSING:
            return ask(self, "contains", value) is True
        return any(item is value or item == value for item in self)

    def __enter__(self):
        return ask(self, "getattr", "__enter__")()

    def __exit__(self, *_):
        # Return None. Otherwise the answer could suppress the AssertionError of a test.
        ask(self, "getattr", "__exit__")(None, None, None)

    def __instancecheck__(self, value):
        return type(value) is Handle and ask(value, "isinstance", self) is True

    def __mro_entries__(self, bases):
        raise TypeError("code_tests: tests cannot extend a class of the answer")


def state_of(handle):
    """Return the arguments from which a handle was built: judge, number and role."""
    return object.__getattribute__(handle, "_Handle__state")


def made_by(handle):
    """Return the role of an object that comes from a call or an attribute of this handle."""
    return OBJECT if state_of(handle)[2] == CLASS else VALUE


def may_judge(handle):
    """Return True if the object's methods may receive keys and expected values of the tests."""
    judge, _, role = state_of(handle)
    return judge.uses_objects and role != VALUE


def ask(handle, operation, *args):
    """Apply a function of `builtins` or `operator` to the object, in the process that holds it."""
    return state_of(handle)[0].ask(operation, [handle, *args])


def plain(handle):
    """Return an object as its builtin base class, such as list, or MISSING if it has none."""
    try:
        value = ask(handle, "plain")
    except TypeError:
        return MISSING
    return MISSING if type(value) is Handle else value


def _forward(operation):
    return lambda self, *args: ask(self, operation, *args)


def _binary(operation, is_reflected=False):
    compute = getattr(operator, operation)

    def method(self, other):
        if type(other) is Handle:
            return ask(self, operation, other)
        value = plain(self)
        if value is not MISSING:
            return compute(other, value) if is_reflected else compute(value, other)
        judge, _, role = state_of(self)
        # Allow a vector times a number. Such a number is not a hard-coded expected value, because
        # tests compare with expected values and do not multiply by them.
        if operation == "mul" and role == OBJECT and type(other) in (int, float):
            pair = [other, self] if is_reflected else [self, other]
            return judge.ask("mul", pair, role=OBJECT)
        return NotImplemented

    return method


FORWARDED = (
    "len iter next reversed hash str repr bool int float complex abs round format index neg pos "
    "invert setitem delitem"
)
COMPARISONS = "eq ne lt le gt ge"
ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift"
for _name in FORWARDED.split():
    setattr(Handle, f"__{_name}__", _forward(_name))
for _name in f"{COMPARISONS} {ARITHMETIC}".split():
    setattr(Handle, f"__{_name.rstrip('_')}__", _binary(_name))
for _name in ARITHMETIC.split():
    setattr(Handle, f"__r{_name.rstrip('_')}__", _binary(_name, is_reflected=True))
