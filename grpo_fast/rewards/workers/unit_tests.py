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
PYTEST = getattr(importlib.util.find_spec("pytest"), "origin", None)  # path of its file
INSTALLED = sys.stdlib_module_names | ({"pytest"} if PYTEST else set())
# Names that tests use without importing them, each with its module. The answer does not define
# them, unless the tests use no other undefined name. Tests cannot import numpy.
NAMED = ("typing", "collections", "decimal", "fractions", "statistics", "functools", "itertools")
LIBRARY = {name: module for module in (*NAMED, "math")
           for name in vars(importlib.import_module(module)) if name[0] != "_"}  # fmt: skip
LIBRARY |= {"deepcopy": "copy", "allclose": "numpy", "array_equal": "numpy"}
INNER = (ast.stmt, ast.ExceptHandler, ast.match_case)  # parts of a statement
# Statements and expressions that pass a value on without looking into it. A call does, too, unless
# it calls the answer or one of the builtin functions LOOKS.
PASSES = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr, ast.List, ast.Tuple, ast.keyword,
          ast.ExceptHandler, ast.Call)  # fmt: skip
LITERALS = (ast.Constant, ast.UnaryOp, ast.List, ast.Tuple, ast.Dict, ast.Set)
LOOKS = vars(builtins).keys() - {"callable", "filter", "map", "print"}
# What messages about refused tests expect. The data of a run are summarized by these texts.
ASSERTS = "`assert CONDITION` (no `raise`, and no failure outside of a `try`)"
CALLS = "calls such as `f(1)`, `check(f)` and `Stack().push(1)` (is a module not imported?)"
IMPORTS = "imports from the standard library or pytest, without `*`, mocks, threads and processes"
FUNCTIONS = "plain functions `test_…`, or unittest with `setUp`, without fixtures and `async`"
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
        # Inputs of a function are its arguments, which need not be texts.
        is_function = given.get("fn_name") or given.get("testtype") == "functional"
        inputs = given.get("inputs", [given.get("input")])
        outputs = given.get("outputs", [given.get("output")])
        are_lists = isinstance(inputs, list) and isinstance(outputs, list)
        are_texts = are_lists and all(isinstance(text, str) for text in inputs + outputs)
        if is_function or not are_texts or len(inputs) != len(outputs):
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
    if isinstance(leaf, ast.Assert):
        return not getattr(leaf.test, "value", True)
    function = getattr(getattr(leaf, "value", None), "func", None)
    return "fail" in (getattr(function, "attr", ""), getattr(function, "id", ""))


class Tests(ast.NodeTransformer):
    """Syntax tree of Python tests, whose tests `visit` puts into blocks `with _test_:`.

    `_test_` notices a loop or `if` that skips all its tests, for example because the answer returns
    an empty list. It also notices a failure that a `try` or `with` around the test swallows.

    Attributes:
        tree: syntax tree, in which imports of the answer are replaced.
        nodes: the nodes of the tree.
        parents: the parent of each node.
        names: the names that the answer must define, each with its name in the answer.
        classes: names that begin with a capital letter, and whose result is not compared with a
            literal by `==`, as in `Find_Max([1, 2]) == 2`. Their results are objects.
        objects: variables that hold an object of the answer.
        results: variables that hold a result of the answer, such as an object.
        functions: names of builtins, and of functions of the answer and the tests.
        testers: names of functions that contain a test, or call such a function.
        methods: names of the methods of test classes.
        guarded: nodes inside of a `try` or `with pytest.raises(…)`.
    """

    def __init__(self, text: str) -> None:
        # 1. Find the names that the tests import from the answer, and replace these imports.
        self.tree = ast.parse(text)
        self.names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module in SOLUTIONS:
                self.names |= {x.asname or x.name: x.name for x in node.names if x.name != "*"}
                vars(node).update(module="builtins", names=[ast.alias("object")], level=0)
        # 2. Find the names that the tests do not define. Import those of a library. The others are
        # the answer's. If there are no others, the answer's is the only name of a library or the
        # only builtin, as in `assert gcd(4, 6) == 2` or `assert sum(10, 15) == 25`.
        free = free_names(symtable.symtable(ast.unparse(self.tree), "<tests>", "exec"))
        used = free & vars(builtins).keys()
        undefined = free - used - self.names.keys()
        known = undefined & LIBRARY.keys()
        own = undefined - known
        if not own and not self.names and len(known or used) == 1:
            own = known or used
        self.names |= {name: name for name in own}
        imports = [f"from {LIBRARY[name]} import {name}" for name in sorted(known - own)]
        self.tree.body[:0] = ast.parse("\n".join(imports)).body
        # 3. Find the variables that hold results of the answer.
        self.nodes = list(ast.walk(self.tree))
        self.parents = {x: node for node in self.nodes for x in ast.iter_child_nodes(node)}
        stores = [node for node in self.nodes
                  if isinstance(node, ast.Assign) and called(node.value) in self.names]  # fmt: skip
        held = {x.id: called(node.value) for node in stores for x in node.targets
                if isinstance(x, ast.Name)}  # fmt: skip
        equal = [x for x in self.nodes if isinstance(x, ast.Compare) and type(x.ops[0]) is ast.Eq]
        compared = {called(x.left) for x in equal if isinstance(x.comparators[0], LITERALS)}
        self.classes = {name for name in self.names if name[0].isupper()} - compared
        self.objects = {name for name, function in held.items() if function in self.classes}
        self.results = held.keys()
        # 4. Find the functions that contain a test, and what a `try` or `pytest.raises` contains.
        functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef)]
        self.functions = used | self.names.keys() | {node.name for node in functions}
        self.testers = {"_run_"}
        before: set[str] = set()
        while before != self.testers:
            before = self.testers
            found = {x.name for x in functions if any(map(self.is_leaf, ast.walk(x)))}
            self.testers = before | found
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        self.methods = {getattr(x, "name", "") for node in classes for x in node.body}
        guards = [x for x in self.nodes if isinstance(x, ast.Try)
                  or (isinstance(x, ast.With) and self.is_leaf(x))]  # fmt: skip
        self.guarded = {inner for guard in guards for inner in ast.walk(guard)}

    # ------------------------------------------------------------------- what is not supported
    def refusal(self, node: Any) -> str:
        """Return what a message expects in place of a node, or "" if the node is supported."""
        match node:
            case ast.Raise():
                return ASSERTS
            case ast.Assert() | ast.Expr() if is_failure(node) and self.is_leaf(node):
                return "" if node in self.guarded else ASSERTS
            case ast.ClassDef(name, bases):
                is_test = name[:4] == "Test" or any("TestCase" in ast.unparse(x) for x in bases)
                return "" if is_test else CLASSES
            case ast.FunctionDef(name, ast.arguments(args=args)):
                has_parameters = name[:4] == "test" and [x.arg for x in args] not in ([], ["self"])
                is_setup = name in ("setup_method", "setup_class")
                return FUNCTIONS if has_parameters or is_setup else ""
            case ast.AsyncFunctionDef() | ast.Attribute(attr="fixture"):
                return FUNCTIONS
            case ast.Import(listed) | ast.ImportFrom(names=listed):
                paths = [f"{getattr(node, 'module', '')}.{x.name}".strip(".") for x in listed]
                names = [name for path in paths for name in path.split(".")]
                are_known = all(path.partition(".")[0] in INSTALLED for path in paths)
                return "" if are_known and REFUSED.isdisjoint(names) else IMPORTS
            case ast.expr() if not self.is_supported(node):
                return CALLS
        return ""

    def is_supported(self, node: Any) -> bool:
        """Return False for an expression that uses the answer in a way that is not supported."""
        outer = self.parents[node]
        is_called = isinstance(outer, ast.Call) and outer.func is node
        is_base = isinstance(outer, ast.Attribute)  # of a method
        is_own = self.is_own(node)
        match node:
            case ast.Call(_, values, keywords) if is_own:
                given = [*values, *(x.value for x in keywords)]
                names = {getattr(x, "id", "") for x in given}
                is_plain = self.functions.isdisjoint(names) and ast.Lambda not in map(type, given)
                is_read = is_base or self.passes(node) or called(node) not in self.classes
                return is_plain and is_read and not (is_called or isinstance(outer, ast.withitem))
            case ast.Attribute(value, _, context) if is_own or root(node) in self.results:
                is_object = root(node) in self.classes | self.objects
                is_result = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
                is_read = isinstance(context, ast.Load) and not (is_object and is_result)
                return is_read and (is_called or self.passes(node))
            case ast.Name(name, ast.Load()) if is_own:
                return self.passes(node) or (is_base if name in self.objects else is_called)
        return True

    def is_own(self, node: ast.AST) -> bool:
        """Return True for a name of the answer, an object of it, and for their attributes."""
        return root(node) in self.names.keys() | self.objects

    def passes(self, node: ast.AST) -> bool:
        """Return True if the statement or call around a value passes it on."""
        outer = self.parents[node]
        looks = isinstance(outer, ast.Call) and (self.is_own(outer) or called(outer) in LOOKS)
        return isinstance(outer, PASSES) and not looks

    # ----------------------------------------------------------------------------------- marks
    def is_leaf(self, node: Any) -> bool:
        """Return True for an assert, a call such as `check(f)`, and `with pytest.raises(…)`."""
        values = [node.value] if isinstance(node, ast.Expr) else []
        values += [x.context_expr for x in node.items] if isinstance(node, ast.With) else []
        calls = [x for x in values if isinstance(x, ast.Call) and not self.is_own(x)]
        names = {getattr(x.func, "attr", root(x)) for x in calls}
        is_call = not names.isdisjoint({"raises", "fail", *self.testers})
        is_assert = any(name.startswith("assert") for name in names)
        return is_call or is_assert or isinstance(node, ast.Assert)

    def is_test(self, node: ast.AST) -> bool:
        """Return True for a statement that is a test, or contains one."""
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, INNER)]
        is_test = self.is_leaf(node) or any(map(self.is_test, inner))
        return is_test and not isinstance(node, (ast.FunctionDef, ast.ClassDef))

    def mark(self, node: Any) -> Any:
        """Put a test into a block. The call of a function with tests has blocks in the function."""
        call = getattr(node, "value", node)
        name = called(call)
        if root(call) == "self" and call.func.attr in self.methods:  # as in `self.check(f(1))`
            name = call.func.attr
        if not self.is_leaf(node) or name in self.testers:
            return self.generic_visit(node)
        block = ast.parse("with _test_: pass").body[0]
        block.body = [node]  # type: ignore[attr-defined]
        return block

    visit_Assert = visit_Expr = visit_With = mark

    def visit_Try(self, node: ast.Try) -> ast.Try:
        """Count a `try` with a test as reached when its body starts.

        With a right answer, its `assert False` does not run, because of the expected error.
        """
        self.generic_visit(node)
        if self.is_test(node):
            node.body[:0] = ast.parse("with _test_: pass").body
        return node


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
    for node in tests.nodes:
        if expected := tests.refusal(node):
            while not isinstance(node, ast.stmt):
                node = tests.parents[node]
            raise ValueError(f"tests: expected {expected}, got {ast.unparse(node)[:80]!r}")
    # 2. Call the test functions that the tests do not call, and the methods of test classes. A
    # function without a test is not called.
    body: list[Any] = tests.tree.body
    unused = tests.testers - {called(node) for node in tests.nodes}
    for node in [*body]:
        is_class = isinstance(node, ast.ClassDef)
        for name in [getattr(x, "name", "") for x in (node.body if is_class else [node])]:
            if name.startswith("test") and name in unused:
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
