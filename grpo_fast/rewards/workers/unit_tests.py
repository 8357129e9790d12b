"""Unit tests as Python source: what they may use of the answer, and their statements with marks.

`check` refuses tests that are not supported, when the data are read. Otherwise such tests would
give every answer the reward 0. The table in `rewards/README.md` lists what is supported.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib.util
import json
import logging
import symtable
import sys
from typing import Any

warn_once = functools.cache(logging.getLogger(__name__).warning)
SOLUTIONS = ("solution", "submission", "answer", "main", "__main__")  # modules of the answer
REFUSED = {"asyncio", "concurrent", "mock", "multiprocessing", "redirect_stdout", "socket",
           "subprocess", "tempfile", "threading", "*"}  # fmt: skip
# Names that tests use without importing them, each with its module. The answer does not define
# them, unless the tests use no other undefined name. Tests cannot import numpy.
NAMED = ("typing", "collections", "decimal", "fractions", "statistics", "functools", "itertools")
LIBRARY = {name: module for module in (*NAMED, "math")
           for name in vars(importlib.import_module(module)) if name[0] != "_"}  # fmt: skip
LIBRARY |= {"deepcopy": "copy", "allclose": "numpy", "array_equal": "numpy"}
LOOKS = vars(builtins).keys() - {"callable", "filter", "map", "print"}  # look into their arguments
# Statements and expressions that pass a value on without looking into it.
PASSES = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr, ast.List, ast.Tuple, ast.keyword,
          ast.ExceptHandler, ast.Call)  # fmt: skip
MARKED = (ast.Expr, ast.Assert, ast.With)
INNER = (ast.stmt, ast.ExceptHandler, ast.match_case, ast.withitem)  # parts of a statement
# What messages about refused tests expect. The data of a run are summarized by these texts.
ASSERTS = "`assert CONDITION` (no `raise`, and no failure outside of a `try`)"
CALLS = ("calls of the answer with plain data, such as `f(1)`, `check(f)` and `Stack().push(1)` "
         "(is a module not imported?)")  # fmt: skip
IMPORTS = ("imports of names from the standard library or pytest, and none of mocks, threads and "
           "processes")  # fmt: skip
FUNCTIONS = ("functions `test_…` without parameters, and `setUp` of a unittest.TestCase (no "
             "fixtures, `parametrize`, `setup_method` or asynchronous code)")  # fmt: skip
CLASSES = "no classes other than test classes"


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
        given = part if isinstance(part, dict) else {}
        if given.get("fn_name") or given.get("testtype") == "functional":
            given = {}  # arguments of a function, which need not be texts
        inputs = given.get("inputs", [given.get("input")])
        outputs = given.get("outputs", [given.get("output")])
        are_lists = isinstance(inputs, list) and isinstance(outputs, list)
        are_texts = are_lists and all(isinstance(text, str) for text in inputs + outputs)
        if not are_texts or len(inputs) != len(outputs):
            expected = 'Python source, a list of sources, or {"input": text, "output": text}'
            raise ValueError(f"tests: expected {expected}, got {part!r:.60}")
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


def is_failure(leaf: Any) -> bool:
    """Return True for a test that always fails: `assert False`, or a call such as `self.fail()`."""
    match leaf:
        case ast.Assert(ast.Constant(value)):
            return not value
        case ast.Expr(ast.Call(ast.Attribute(attr="fail") | ast.Name("fail"))):
            return True
    return False


class Tests(ast.NodeTransformer):
    """Syntax tree of Python tests, whose tests `visit` puts into blocks `with _test_:`.

    `_test_` notices a loop or `if` that skips all its tests, for example because the answer returns
    an empty list. It also notices a failure that a `try` or `with` around the test swallows.

    Attributes:
        tree: syntax tree, in which imports of the answer are replaced.
        names: the names that the answer must define, each with its name in the answer.
    """

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module in SOLUTIONS:
                self.names |= {x.asname or x.name: x.name for x in node.names if x.name != "*"}
                node.module, node.names, node.level = "builtins", [ast.alias("object")], 0
        free = free_names(symtable.symtable(ast.unparse(self.tree), "<tests>", "exec"))
        undefined = free - vars(builtins).keys() - self.names.keys()
        known = undefined & LIBRARY.keys()
        # The other names are the answer's. If there is none, it is the only name of a library or
        # the only builtin, as in `assert gcd(4, 6) == 2` or `assert sum(10, 15) == 25`.
        own = undefined - known
        candidates = known or free & vars(builtins).keys()
        if not own and not self.names and len(candidates) == 1:
            own = candidates
        self.names |= {name: name for name in own}
        imports = [f"from {LIBRARY[name]} import {name}" for name in sorted(known - own)]
        self.tree.body[:0] = ast.parse("\n".join(imports)).body
        self.nodes = list(ast.walk(self.tree))
        self.up = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        # Variables that hold a result of the answer. If the name of the called function begins with
        # a capital letter, it is a class, and the variable holds an object.
        self.results = {x.id: called(node.value) for node in self.nodes
                        if isinstance(node, ast.Assign) and called(node.value) in self.names
                        for x in node.targets if isinstance(x, ast.Name)}  # fmt: skip
        self.objects = {name for name, function in self.results.items() if function[0].isupper()}
        functions: list[Any] = [x for x in self.nodes if isinstance(x, ast.FunctionDef)]
        self.functions = free & vars(builtins).keys() | {x.name for x in functions}
        # Functions that contain a test, or call such a function.
        self.testers: set[str] = set()
        found = {"_run_"}
        while found - self.testers:
            self.testers |= found
            found = {f.name for f in functions if any(map(self.is_leaf, ast.walk(f)))}

    def refusal(self, node: Any) -> str:
        """Return what a node of the syntax tree has that is not supported, or ""."""
        match node:
            case ast.AsyncFunctionDef() | ast.Await():
                return FUNCTIONS
            case ast.Raise():
                return ASSERTS
            case ast.Assert() | ast.Expr() if is_failure(node) and not self.is_expected(node):
                return ASSERTS
            case ast.ClassDef(name, bases):
                is_test = name[:4] == "Test" or any("TestCase" in ast.unparse(x) for x in bases)
                return "" if is_test else CLASSES
            case ast.FunctionDef(name, ast.arguments(args=args)) if name[:4] == "test":
                has_fixtures = [x.arg for x in args] not in ([], ["self"])
                return FUNCTIONS if has_fixtures else ""
            case ast.FunctionDef("setup_method" | "setup_class") | ast.Attribute(attr="fixture"):
                return FUNCTIONS
            case ast.ImportFrom(module=None):
                return IMPORTS
            case ast.Import(listed) | ast.ImportFrom(names=listed):
                paths = [f"{getattr(node, 'module', '')}.{x.name}".strip(".") for x in listed]
                return "" if all(map(is_known, paths)) else IMPORTS
            case ast.withitem(value) if self.calls_answer(value):
                return CALLS
            case ast.Name(name, ast.Load()) if name in self.names and not self.passes(node):
                return CALLS
            case ast.Attribute(value, _, context) if root(value) in {*self.names, *self.results}:
                is_chain = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
                if is_chain and (root(value) in self.objects or root(value)[0].isupper()):
                    return CALLS
                is_stored = isinstance(context, ast.Store)
                is_looked_at = is_stored or not self.passes(node)
                return CALLS if is_looked_at else ""
            case ast.Call(function, values, keywords) if self.calls_answer(node):
                given = [*values, *(x.value for x in keywords)]
                if isinstance(function, ast.Call):
                    return CALLS
                if any(map(self.is_function, given)):
                    return CALLS
                is_compared = called(node)[:1].isupper() and not self.is_object_used(node)
                return CALLS if is_compared else ""
            case ast.Name(name, ast.Load()) if name in self.objects:
                return "" if self.is_object_used(node) else CALLS
        return ""

    def is_expected(self, failure: ast.AST) -> bool:
        """Return True if an error that tests expect comes before a failure and prevents it."""
        node = failure
        while node := self.up.get(node):  # type: ignore[assignment]
            if isinstance(node, ast.Try) or any(map(self.is_leaf, getattr(node, "items", []))):
                return True
        return False

    def is_object_used(self, node: ast.AST) -> bool:
        """Return True if tests call a method of an object, or pass the object on."""
        return isinstance(self.up[node], ast.Attribute) or self.passes(node)

    def is_function(self, value: ast.AST) -> bool:
        is_name = isinstance(value, ast.Name) and value.id in {*self.functions, *self.names}
        return is_name or isinstance(value, ast.Lambda)

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
            return isinstance(node, ast.Assert)
        name = getattr(call.func, "attr", root(call))
        return name.startswith("assert") or name in {"raises", "fail", *self.testers}

    def is_test(self, node: ast.AST) -> bool:
        """Return True for a statement that is a test, or contains one."""
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, INNER)]
        is_test = self.is_leaf(node) or any(map(self.is_test, inner))
        return is_test and not isinstance(node, (ast.FunctionDef, ast.ClassDef))

    def visit(self, node: Any) -> Any:
        if isinstance(node, ast.expr):
            return node
        parts = getattr(node, "items", [node])
        is_own = called(getattr(node, "value", node)) in self.testers  # its own tests get marks
        is_marked = isinstance(node, MARKED) and any(map(self.is_leaf, parts)) and not is_own
        if not is_marked:  # an assert inside of `with raises(…)` need not finish
            self.generic_visit(node)
        mark = ast.copy_location(ast.With([ast.withitem(ast.Name("_test_"))], [ast.Pass()]), node)
        if is_marked:
            mark.body = [node]
        elif isinstance(node, ast.Try) and self.is_test(node):
            # It counts as reached when its body starts. With a right answer, its `assert False`
            # does not run, because of the expected error.
            node.body.insert(0, mark)
        return mark if is_marked else node


def is_known(path: str) -> bool:
    """Return True if tests may import a module or name, such as `unittest.mock`."""
    parts = path.split(".")
    is_pytest = parts[0] == "pytest" and importlib.util.find_spec("pytest") is not None
    is_installed = is_pytest or parts[0] in sys.stdlib_module_names
    return is_installed and REFUSED.isdisjoint(parts)


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
    for wrong in filter(tests.refusal, tests.nodes):
        expected = tests.refusal(wrong)
        while not isinstance(wrong, ast.stmt):
            wrong = tests.up[wrong]
        raise ValueError(f"tests: expected {expected}, got {ast.unparse(wrong)[:80]!r}")
    # 2. Call the test functions that the tests do not call, and the methods of test classes. A
    # function without a test is not called.
    body: list[Any] = tests.tree.body
    calls = {called(node) for node in tests.nodes}
    for node in [*body]:
        is_class = isinstance(node, ast.ClassDef)
        for name in [getattr(x, "name", "") for x in (node.body if is_class else [node])]:
            if name.startswith("test") and name in tests.testers - calls:
                call = f"_run_({node.name}, {name!r})" if is_class else f"{name}()"
                body += ast.parse(call).body
    # 3. Mark the tests in the statements one by one.
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
    return {"units": units, "count": count, "names": tests.names}
