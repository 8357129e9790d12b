"""Unit tests as Python source: what they may use of the answer, and their statements with marks.

`check` refuses tests that are not supported, when the data are read. Otherwise such tests would
give every answer the reward 0. The table in `rewards/README.md` lists what is supported.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import functools
import importlib.util
import json
import logging
import symtable
import sys
from pathlib import Path
from typing import Any

warn_once = functools.cache(logging.getLogger(__name__).warning)
SOLUTIONS = ("solution", "submission", "answer", "main", "__main__")  # modules of the answer
PACKAGES = ("numpy", "pytest")  # tests may import them if they are installed
REFUSED = "asyncio concurrent mock multiprocessing socket subprocess tempfile threading".split()
# Names that tests use without importing them, each with its module. The answer does not define
# them, unless the tests use no other undefined name.
LIBRARY = {name: module for module in ("statistics", "functools", "itertools", "math")
           for name in dir(importlib.import_module(module))}  # fmt: skip
LIBRARY |= {
    **dict.fromkeys("Counter OrderedDict defaultdict deque namedtuple".split(), "collections"),
    **dict.fromkeys("Any Callable Dict List Optional Set Tuple Union".split(), "typing"),
    "date": "datetime", "timedelta": "datetime", "Decimal": "decimal", "Fraction": "fractions",
    "deepcopy": "copy", "allclose": "numpy", "array_equal": "numpy",
}  # fmt: skip
PLAIN = (*(kind for kind in vars(builtins).values() if isinstance(kind, type)), decimal.Decimal,
         collections.Counter, collections.OrderedDict, collections.deque, fractions.Fraction,
         datetime.datetime, datetime.timedelta)  # fmt: skip
METHODS = {name for kind in PLAIN for name in dir(kind) if callable(getattr(kind, name, 0))}
FIELDS = {name for kind in PLAIN for name in dir(kind)} - METHODS
LOOKS = vars(builtins).keys() - {"callable", "filter", "map", "print"}  # look into their arguments
# Statements and expressions that pass a value on without looking into it.
PASSES = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr, ast.List, ast.Tuple, ast.keyword,
          ast.ExceptHandler, ast.arg, ast.FunctionDef, ast.Call)  # fmt: skip
BASES = ("TestCase", "Error", "Exception", "NamedTuple")  # of classes that tests may define
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Raise)
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Assert, ast.Return)
INNER = (ast.stmt, ast.ExceptHandler, ast.match_case, ast.withitem)  # parts of a statement


def check(tests: Any) -> None:
    """Check that `code_tests` can run the tests of a data row.

    Raises:
        ValueError: the tests have an unknown form, or use something that is not supported.
    """
    read = read_tests(tests)
    if isinstance(read, str) and len(prepared(read)["names"]) > 1:
        trap = "an answer can define a helper that accepts every result"
        warn_once("code_tests: some tests use several names of the answer; %s", trap)


def read_tests(entry: Any) -> str | list[tuple[str, str]]:
    """Return the tests of a completion as Python source, or as pairs of input and output.

    Raises:
        ValueError: there is no test, or the tests have an unknown form.
    """
    with contextlib.suppress(TypeError, ValueError):
        entry = json.loads(entry)  # data sets store inputs and outputs as JSON text
    parts = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    if parts and all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    pairs: list[tuple[str, str]] = []
    for part in parts or [None]:
        given = part if isinstance(part, dict) and part.get("testtype") != "functional" else {}
        inputs = given.get("inputs", [given.get("input")])
        outputs = given.get("outputs", [given.get("output")])
        are_lists = isinstance(inputs, list) and isinstance(outputs, list)
        are_texts = are_lists and all(isinstance(text, str) for text in inputs + outputs)
        if not are_texts or len(inputs) != len(outputs):
            expected = 'Python source, a list of sources, or {"input": text, "output": text}'
            got = f"{part!r:.60} ({type(part).__name__})"
            raise ValueError(f"tests: expected {expected}, got {got}")
        pairs += zip(inputs, outputs, strict=True)
    return pairs


def free_names(table: symtable.SymbolTable, is_top: bool = True) -> set[str]:
    """Return the global names that Python source code reads without defining them."""
    symbols = table.get_symbols()
    free = {x.get_name() for x in symbols if x.is_referenced() and (is_top or x.is_global())}
    free = free.union(*(free_names(child, False) for child in table.get_children()))
    return free - {x.get_name() for x in symbols if is_top and (x.is_assigned() or x.is_imported())}


def called(node: ast.AST) -> str:
    """Return the name of the function that an expression calls, or ""."""
    return getattr(getattr(node, "func", None), "id", "")


def root(node: Any) -> str:
    """Return the first name of an expression such as `a.b(1).c`, or ""."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


class Tests(ast.NodeTransformer):
    """Syntax tree of Python tests, whose statements `visit` puts into `with` blocks.

    A simple statement is put into a block `with _step_:`, and a test into `with _test_:`. `_test_`
    notices a loop or `if` that skips all its tests, for example because the answer returns an empty
    list. It also notices a failure that a `try` or `with` around the test swallows. At the end of a
    block, the changes that the answer has made to its arguments are applied. Therefore `sorted`
    sees the original x in `assert f(x) == sorted(x)`.

    Attributes:
        tree: syntax tree, in which imports of the answer are replaced.
        names: the names that the answer must define, each with its name in the answer.
        imports: names of libraries, each with the statement that imports it.
    """

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module in SOLUTIONS:
                self.names |= {x.asname or x.name: x.name for x in node.names if x.name != "*"}
                node.module, node.names, node.level = "builtins", [ast.alias("object")], 0
        self.nodes = list(ast.walk(self.tree))
        self.up = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.imports: dict[str, str] = {}
        self.find_names()
        functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef)]
        self.functions = {x.name for x in functions} | LOOKS - {x.__name__ for x in PLAIN}
        # Variables with a result of the answer. The result is an object if the tests call a method
        # on it that no plain data has.
        assigned = [node for node in self.nodes if isinstance(node, ast.Assign)]
        targets = [x for node in assigned if called(node.value) in self.names for x in node.targets]
        self.results = {x.id for x in targets if isinstance(x, ast.Name)}
        attributes = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        self.objects = {
            root(x) for x in attributes if x.attr not in METHODS | FIELDS
        } & self.results
        self.testers: set[str] = set()  # functions that contain a test, or call such a function
        found = {"_run_"}
        while found - self.testers:
            self.testers |= found
            found = {f.name for f in functions if any(map(self.is_leaf, ast.walk(f)))}

    def find_names(self) -> None:
        free = free_names(symtable.symtable(ast.unparse(self.tree), "<tests>", "exec"))
        free -= self.names.keys()
        for name in {"np", *sys.stdlib_module_names} & free:
            module = importlib.import_module("numpy" if name == "np" else name)
            uses = [self.up[x] for x in self.nodes if isinstance(x, ast.Name) and x.id == name]
            if all(hasattr(module, getattr(use, "attr", "?")) for use in uses):
                self.imports[name] = f"import {module.__name__} as {name}"
        undefined = free - vars(builtins).keys() - self.imports.keys()
        known = undefined & LIBRARY.keys()
        # The other names are the answer's. If there is none, it is the only name of a library or
        # the only builtin, as in `assert gcd(4, 6) == 2` or `assert sum(10, 15) == 25`.
        own = undefined - known
        candidates = known or free & vars(builtins).keys()
        if not own and not self.names and len(candidates) == 1:
            own = candidates
        self.names |= {name: name for name in own}
        self.imports |= {name: f"from {LIBRARY[name]} import {name}" for name in known - own}

    def is_wrong(self, node: Any) -> bool:
        """Return True if a node of the syntax tree is not supported."""
        match node:
            case ast.AsyncFunctionDef() | ast.Await() | ast.Name("redirect_stdout" | "patch"):
                return True
            case ast.FunctionDef("setup_method" | "setup_class") | ast.Attribute(attr="fixture"):
                return True
            case ast.Import(listed) | ast.ImportFrom(names=listed):
                paths = [f"{getattr(node, 'module', '')}.{x.name}".strip(".") for x in listed]
                return not all(map(can_import, paths))
            case ast.ClassDef(name, bases):
                return name[:4] != "Test" and not any(ast.unparse(x).endswith(BASES) for x in bases)
            case ast.FunctionDef(name, ast.arguments(args=[*_, ast.arg(last)])):
                return name[:4] == "test" and last != "self"  # a fixture
            case ast.Name(name) if name in self.names.keys() | self.objects:
                is_receiver = name in self.objects and isinstance(self.up[node], ast.Attribute)
                return not is_receiver and isinstance(node.ctx, ast.Load) and not self.passes(node)
            case ast.Attribute(value, name, context) if root(value) in {*self.names, *self.results}:
                is_chain = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
                is_read = name not in FIELDS and not self.passes(node)
                is_unknown = is_chain and name not in METHODS | FIELDS
                return is_read or is_unknown or isinstance(context, ast.Store)
            case ast.Compare(left, comparators=[right]) | ast.BinOp(left, right=right):
                both = (called(left), called(right))
                return all(x in self.names and x[0].isupper() for x in both)
            case ast.Call(function, values, keywords) if self.calls_answer(node):
                given = [*values, *(x.value for x in keywords)]
                is_function = any(map(self.is_function, given))
                return is_function or isinstance(function, ast.Call)
        return False

    def is_function(self, value: ast.AST) -> bool:
        """Return True for an argument that is a function, or an array of numpy."""
        is_name = isinstance(value, ast.Name) and value.id in self.functions
        return is_name or isinstance(value, ast.Lambda) or root(value) in ("np", "numpy")

    def calls_answer(self, node: ast.AST) -> bool:
        return root(node) in self.names.keys() | self.objects

    def passes(self, node: ast.AST) -> bool:
        """Return True if a value is called, or passed on without looking into it."""
        outer = self.up[node]
        is_argument = isinstance(outer, ast.Call) and outer.func is not node
        looks = is_argument and (self.calls_answer(outer) or called(outer) in LOOKS)
        return isinstance(outer, PASSES) and not looks

    def is_leaf(self, node: Any) -> bool:
        """Return True for an assert, and for a call such as `check(f)` or `self.assertEqual(…)`."""
        call = node.value if isinstance(node, ast.Expr) else getattr(node, "context_expr", None)
        if not isinstance(call, ast.Call) or self.calls_answer(call):
            return isinstance(node, (ast.Assert, ast.Raise))
        name = getattr(call.func, "attr", root(call))
        return name.startswith("assert") or name in {"raises", "fail", *self.testers}

    def is_test(self, node: ast.AST) -> bool:
        """Return True for a statement that is a test, or contains one."""
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, INNER)]
        is_test = self.is_leaf(node) or any(map(self.is_test, inner))
        return is_test and not isinstance(node, DEFINITIONS)

    def visit(self, node: Any) -> Any:
        if isinstance(node, ast.expr):
            return node
        is_test = isinstance(node, ast.stmt) and self.is_test(node)
        if not any("aises" in ast.unparse(x) for x in getattr(node, "items", [])):
            self.generic_visit(node)  # an assert inside of `with raises(…)` need not finish
        if isinstance(node, SIMPLE) or (is_test and isinstance(node, (ast.With, ast.Try))):
            mark = ast.withitem(ast.Name("_test_" if is_test else "_step_"))
            return ast.copy_location(ast.With([mark], [node]), node)
        return node


def can_import(path: str) -> bool:
    parts = path.split(".")
    is_star = parts[-1] == "*" and parts[0] not in LIBRARY.values()
    is_known = parts[0] in sys.stdlib_module_names or (
        parts[0] in PACKAGES and importlib.util.find_spec(parts[0]) is not None
    )
    return is_known and not is_star and not {*parts} & {*REFUSED}


@functools.lru_cache(maxsize=64)
def prepared(text: str) -> dict[str, Any]:
    """Return what the judge needs: the statements of the tests with marks, and their names.

    Raises:
        ValueError: see `check`.
    """
    # 1. Find the names of the answer, and refuse what is not supported.
    try:
        tests = Tests(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"tests: expected Python, got {text[:60]!r}: {error}") from None
    for wrong in filter(tests.is_wrong, tests.nodes):
        while not isinstance(wrong, ast.stmt):
            wrong = tests.up[wrong]
        expected = "what the table in the README of rewards lists"
        raise ValueError(f"tests: expected {expected}, got {ast.unparse(wrong)[:80]!r}")
    # 2. Call the test functions that the tests do not call, and the methods of test classes.
    body: list[Any] = tests.tree.body
    calls = {called(node) for node in tests.nodes}
    for node in [*body]:
        is_class = isinstance(node, ast.ClassDef)
        for name in [getattr(x, "name", "") for x in (node.body if is_class else [node])]:
            if name.startswith("test") and name not in calls:
                call = f"_run_({node.name}, {name!r})" if is_class else f"{name}()"
                body += ast.parse(call).body
    # 3. Mark the statements one by one.
    units = []
    for node in body:
        stored = [x.id for x in ast.walk(node) if isinstance(x, ast.Name)
                  and isinstance(x.ctx, ast.Store)]  # fmt: skip
        units.append((tests.is_test(node), stored, ast.unparse(tests.visit(node))))
    count = sum(is_test for is_test, *_ in units)
    if not (count and tests.names):
        expected = "at least one assert, or call of a function that the tests define"
        got = f"{text[:60]!r}, which uses {len(tests.names)} names of the answer"
        raise ValueError(f"tests: expected {expected}, got {got}")
    specs = [importlib.util.find_spec(x) for x in PACKAGES if x in f"{text}{tests.imports}"]
    return {"units": units, "count": count, "names": tests.names, "imports": tests.imports,
            "paths": [str(Path(x.origin).parents[1]) for x in specs if x and x.origin],
            "seeds": "random" in text and "seed(" in text}  # fmt: skip
