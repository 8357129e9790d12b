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
import symtable
import sys
from typing import Any

SOLUTIONS = ("solution", "submission", "answer", "main", "__main__")  # modules of the answer
REFUSED = {"asyncio", "concurrent", "mock", "multiprocessing", "socket", "subprocess", "tempfile",
           "threading", "*"}  # fmt: skip
RAISES = {"raises", "assertRaises", "assertRaisesRegex"}
# Builtins that call a function, or ask whether it can be called. Others look into their arguments.
CALLERS = {"callable", "filter", "map", "print"}
# Without these statements, a test that fails cannot be caught.
WRONG = (ast.AsyncFunctionDef, ast.Await, ast.Raise, ast.Try, ast.TryStar)


def check(entry: Any) -> dict[str, Any] | list[tuple[str, str]]:
    """Return the tests of a data row, if `code_tests` can run them.

    Returns:
        The pairs of input and output of a program, or what `prepared` returns for Python source.

    Raises:
        ValueError: the tests have an unknown form, or use something that is not supported.
    """
    with contextlib.suppress(TypeError, ValueError):
        entry = json.loads(entry)  # data sets store inputs and outputs as JSON text
    parts = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    if parts and all(isinstance(part, str) for part in parts):
        return prepared("\n".join(parts))
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


def undefined_names(table: symtable.SymbolTable, is_top: bool = True) -> set[str]:
    """Return the global names that Python source code reads without defining them."""
    symbols = table.get_symbols()
    free = {x.get_name() for x in symbols if x.is_referenced() and (is_top or x.is_global())}
    free = free.union(*(undefined_names(child, False) for child in table.get_children()))
    return free - {x.get_name() for x in symbols if is_top and (x.is_assigned() or x.is_imported())}


def called(node: Any) -> str:
    """Return the name of the function or method that an expression calls, or ""."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def root(node: Any) -> str:
    """Return the first name of an expression such as `a.b(1).c`, or ""."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


class Tests(ast.NodeTransformer):
    """Syntax tree of Python tests. `visit` adds the call `_reached_()` after each test.

    The judge then notices a loop or `if` that skips all its tests, for example because the answer
    returns an empty list.

    Attributes:
        tree: the syntax tree.
        names: the names that the answer must define, each with its name in the answer.
        own: the names that the tests neither define nor import.
        testers: the functions that contain a test, or call such a function.
    """

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.up = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.names = {x.asname or x.name: x.name for node in self.nodes
                      if isinstance(node, ast.ImportFrom) and node.module in SOLUTIONS
                      for x in node.names}  # fmt: skip
        free = undefined_names(symtable.symtable(text, "<tests>", "exec"))
        self.own = free - vars(builtins).keys()
        if not self.names and not self.own and len(free) == 1:
            self.own = free  # the answer has the name of a builtin: `assert sum(10, 15) == 25`
        functions = [x for x in self.nodes if isinstance(x, ast.FunctionDef)]
        self.functions = {x.name for x in functions} | (free & vars(builtins).keys())
        self.parameters = {x.arg for x in self.nodes if isinstance(x, ast.arg)}
        self.names |= {name: name for name in self.own}
        # Variables that hold a result of the answer. If the name of the called function begins with
        # a capital letter, it is a class, and the variable holds an object.
        self.results = {getattr(x, "id", ""): called(node.value) for node in self.nodes
                        if isinstance(node, ast.Assign) and called(node.value) in self.names
                        for x in node.targets}  # fmt: skip
        self.objects = {name for name, function in self.results.items() if function[0].isupper()}
        self.testers: set[str] = set()
        found = {"_run_"}
        while found - self.testers:
            self.testers |= found
            found = {x.name for x in functions if self.has_test(x)}

    def is_wrong(self, node: Any) -> bool:
        """Return True if a node of the syntax tree is not supported."""
        match node:
            case ast.ClassDef(_, bases):
                is_case = any(ast.unparse(x).endswith("TestCase") for x in bases)
                return not is_case or bool(node.decorator_list)
            case ast.FunctionDef(name, ast.arguments(args=args)):
                is_fixture = name[:4] == "test" and [x.arg for x in args] not in ([], ["self"])
                decorators = {ast.unparse(x) for x in node.decorator_list}
                return is_fixture or not decorators <= {"classmethod", "staticmethod"}
            case ast.ImportFrom(module) if module in SOLUTIONS:
                return "*" in self.names
            case ast.Import(listed) | ast.ImportFrom(names=listed):
                paths = [f"{getattr(node, 'module', '')}.{x.name}".strip(".") for x in listed]
                return not all(map(can_import, paths))
            case ast.withitem(value):
                return called(value) not in {*RAISES, "subTest"}
            case ast.Expr(ast.Call(function, values, keywords)) if values or keywords:
                # If nobody reads its result, the call changes its arguments, which are only copies.
                is_parameter = isinstance(function, ast.Name) and function.id in self.parameters
                is_own = is_parameter or root(function) in self.names
                return is_own and not isinstance(self.up[node], ast.With)
            case ast.Name(name, ast.Load()) if name in self.names:
                return not self.is_passed(node)
            case ast.Name(name, ast.Load()) if name in self.objects:
                return not (isinstance(self.up[node], ast.Attribute) or self.is_passed(node))
            case ast.Attribute(value) if root(value) in {*self.names, *self.results}:
                return not self.is_passed(node)
            case ast.Call(function, values, keywords) if root(node) in {*self.names, *self.objects}:
                given = [*values, *(x.value for x in keywords)]
                return isinstance(function, ast.Call) or any(map(self.is_function, given))
            case ast.BinOp() | ast.Compare():  # of two objects
                names = [root(x) for x in ast.iter_child_nodes(node) if called(x) == root(x)]
                return sum(x in self.names and x[0].isupper() for x in names) > 1
        return isinstance(node, WRONG)

    def is_function(self, value: ast.AST) -> bool:
        known = {*self.functions, *self.names}
        return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in known)

    def is_passed(self, node: ast.AST) -> bool:
        """Return True if a value is called, or passed on without looking into it."""
        outer: Any = self.up[node]
        if not isinstance(outer, ast.Call):
            return isinstance(outer, (ast.Assign, ast.Return)) and outer.value is node
        name = called(outer)
        looks = name in vars(builtins).keys() - CALLERS or root(outer) in self.names
        is_error = name in RAISES and outer.args[0] is node  # a class of the answer
        return outer.func is node or not (looks or is_error)

    def is_test(self, node: Any) -> bool:
        """Return True for an assert, `self.assertEqual(…)` and `with raises(…)`."""
        values = [x.context_expr for x in node.items] if isinstance(node, ast.With) else []
        values += [node.value] if isinstance(node, ast.Expr) else []
        names = [called(x) for x in values if root(x) not in self.names]
        is_call = any(name.startswith("assert") or name in RAISES for name in names)
        return is_call or isinstance(node, ast.Assert)

    def has_test(self, node: ast.AST) -> bool:
        """Return True if a node contains a test, or calls a function that contains one."""
        return any(self.is_test(x) or called(x) in self.testers for x in ast.walk(node))

    def visit(self, node: Any) -> Any:
        if isinstance(node, ast.ImportFrom) and node.module in SOLUTIONS:
            return ast.Pass()
        if self.is_test(node):  # an assert inside of `with raises(…)` need not finish
            return [node, ast.parse("_reached_()").body[0]]
        return node if isinstance(node, ast.expr) else self.generic_visit(node)


def can_import(path: str) -> bool:
    parts = path.split(".")
    is_pytest = parts[0] == "pytest" and importlib.util.find_spec("pytest") is not None
    is_known = parts[0] in sys.stdlib_module_names or is_pytest
    return is_known and REFUSED.isdisjoint(parts)


@functools.lru_cache(maxsize=64)
def prepared(text: str) -> dict[str, Any]:
    """Return what the judge needs: the statements of the tests with marks, and their names.

    Raises:
        ValueError: see `check`.
    """
    # 1. Find the names of the answer, and refuse what is not supported. If tests used several names
    # without an import, the answer could define one of them so that it accepts every result.
    try:
        tests = Tests(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"tests: expected Python, got {text[:60]!r}: {error}") from None
    if len(tests.own) > 1 or (tests.own and len(tests.names) > 1):
        expected = "`from solution import …` for the names of the answer, and imports of all others"
        got = f"the undefined names {', '.join(sorted(tests.own))}"
        raise ValueError(f"tests: expected {expected}, got {got}")
    for wrong in filter(tests.is_wrong, tests.nodes):
        while not isinstance(wrong, ast.stmt):
            wrong = tests.up[wrong]
        expected = "what the table in the README of rewards lists"
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
        is_test = not isinstance(node, (ast.FunctionDef, ast.ClassDef)) and tests.has_test(node)
        stored = [x.id for x in ast.walk(node) if isinstance(x, ast.Name)
                  and isinstance(x.ctx, ast.Store)]  # fmt: skip
        units.append((is_test, stored, ast.unparse(tests.visit(ast.Module([node], [])))))
    count = sum(is_test for is_test, *_ in units)
    if not (count and tests.names):
        expected = "at least one assert, or call of a function that the tests define"
        got = f"{text[:60]!r}, which uses {len(tests.names)} names of the answer"
        raise ValueError(f"tests: expected {expected}, got {got}")
    return {"units": units, "count": count, "names": tests.names}
