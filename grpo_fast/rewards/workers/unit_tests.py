"""Analysis of unit tests in Python: whether they can be run, and which statements are tests.

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
# Statements and expressions that pass a value on without reading it. A call counts as such, unless
# it calls the answer or a builtin in READERS, such as `len`, which reads its argument.
PASSES = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr, ast.List, ast.Tuple, ast.keyword,
          ast.ExceptHandler, ast.Call)  # fmt: skip
LITERALS = (ast.Constant, ast.UnaryOp, ast.List, ast.Tuple, ast.Dict, ast.Set)  # -1 is a UnaryOp
READERS = vars(builtins).keys() - {"callable", "filter", "map", "print"}
# What messages about refused tests expect. The summary of a data set counts rows by these texts.
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


def is_failure(node: Any) -> bool:
    """Return True for a statement that always fails: `assert False`, or `self.fail()`."""
    if isinstance(node, ast.Assert):
        return not getattr(node.test, "value", True)
    function = getattr(getattr(node, "value", None), "func", None)
    return "fail" in (getattr(function, "attr", ""), getattr(function, "id", ""))


class Tests(ast.NodeTransformer):
    """Syntax tree of Python tests. `refusal` checks a node, and `visit` marks assertions.

    An assertion is an assert statement, a call such as `self.assertEqual(…)`, or a block
    `with pytest.raises(…)`. `visit` puts each assertion into a block `with _test_:`. The judge's
    object `_test_` notices a loop or `if` that skips all its assertions, for example because the
    answer returns an empty list. It also notices a failed assertion whose error a `try` or `with`
    around it swallows.

    Attributes:
        tree: syntax tree, in which imports of the answer are replaced.
        nodes: the nodes of the tree.
        parents: the parent of each node.
        names: the names that the answer must define. The keys are the names in the tests, and the
            values are the names in the answer.
        classes: the names of the answer that are taken for classes, whose results are objects.
            They begin with a capital letter, and no test compares their result with a literal by
            `==`, as `Find_Max([1, 2]) == 2` does.
        objects: variables that store an object of the answer.
        results: variables that store any result of the answer, objects included.
        functions: names of builtins, and of functions of the answer and the tests.
        testers: names of functions that contain an assertion, or call such a function.
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
                # The judge cannot import the answer. Import something harmless instead.
                node.module = "builtins"
                node.names = [ast.alias("object")]
                node.level = 0
        # 2. Find the names that the tests use, but do not define. Names in LIBRARY are imported,
        # and all others must be defined by the answer. If there are no others, the answer may have
        # a function with the name of a library function or a builtin, as in
        # `assert gcd(4, 6) == 2` or `assert sum(10, 15) == 25`. This must be the only such name.
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
        # 3. Find the variables that store results of the answer, and the function that each result
        # comes from. This function is a class if its name begins with a capital letter, and no
        # test compares its result with a literal. Its results are then objects.
        self.nodes = list(ast.walk(self.tree))
        self.parents = {x: node for node in self.nodes for x in ast.iter_child_nodes(node)}
        stores = [node for node in self.nodes
                  if isinstance(node, ast.Assign) and called(node.value) in self.names]  # fmt: skip
        called_for = {x.id: called(node.value) for node in stores for x in node.targets
                      if isinstance(x, ast.Name)}  # fmt: skip
        equal = [x for x in self.nodes if isinstance(x, ast.Compare) and type(x.ops[0]) is ast.Eq]
        compared = {called(x.left) for x in equal if isinstance(x.comparators[0], LITERALS)}
        self.classes = {name for name in self.names if name[0].isupper()} - compared
        self.objects = {name for name, function in called_for.items() if function in self.classes}
        self.results = called_for.keys()
        # 4. Find the functions that contain an assertion, and the nodes inside of a `try` or
        # `pytest.raises`. A call of such a function is itself an assertion for `is_assertion`, so
        # search until no function is added. `_run_` is the judge's function that runs a method of
        # a test class.
        functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef)]
        self.functions = used | self.names.keys() | {node.name for node in functions}
        self.testers = {"_run_"}
        before: set[str] = set()
        while before != self.testers:
            before = self.testers
            found = {x.name for x in functions if any(map(self.is_assertion, ast.walk(x)))}
            self.testers = before | found
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        self.methods = {getattr(x, "name", "") for node in classes for x in node.body}
        guards = [x for x in self.nodes if isinstance(x, ast.Try)
                  or (isinstance(x, ast.With) and self.is_assertion(x))]  # fmt: skip
        self.guarded = {inner for guard in guards for inner in ast.walk(guard)}

    # ------------------------------------------------------------------- what is not supported
    def refusal(self, node: Any) -> str:
        """Return what the tests must use instead of a node, or "" if the node is supported."""
        match node:
            case ast.Raise():
                return ASSERTS
            case ast.Assert() | ast.Expr() if is_failure(node) and self.is_assertion(node):
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
        is_base = isinstance(outer, ast.Attribute)  # as `s` in `s.push`
        is_own = self.is_own(node)
        match node:
            # A call such as `f(1)` or `s.push(1)`. Its arguments must be plain data. If it returns
            # an object, the object must be stored or passed on, or a method of it called.
            case ast.Call(_, values, keywords) if is_own:
                given = [*values, *(x.value for x in keywords)]
                names = {getattr(x, "id", "") for x in given}
                is_plain = self.functions.isdisjoint(names) and ast.Lambda not in map(type, given)
                fits = is_base or self.passes(node) or called(node) not in self.classes
                return is_plain and fits and not (is_called or isinstance(outer, ast.withitem))
            # An attribute such as `s.push`. It must be called or passed on. The judge can call no
            # method of an object that a method returns, so `s.pop().x` is refused.
            case ast.Attribute(value, _, context) if is_own or root(node) in self.results:
                is_object = root(node) in self.classes | self.objects
                is_result = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
                fits = isinstance(context, ast.Load) and not (is_object and is_result)
                return fits and (is_called or self.passes(node))
            # A name such as `f` or `s`. It must be called, or be the object of a method, or be
            # passed on.
            case ast.Name(name, ast.Load()) if is_own:
                return self.passes(node) or (is_base if name in self.objects else is_called)
        return True

    def is_own(self, node: ast.AST) -> bool:
        """Return True for an expression that begins with a name or an object of the answer."""
        return root(node) in self.names.keys() | self.objects

    def passes(self, node: ast.AST) -> bool:
        """Return True if the parent of a value passes it on without reading it."""
        outer = self.parents[node]
        is_read = isinstance(outer, ast.Call) and (self.is_own(outer) or called(outer) in READERS)
        return isinstance(outer, PASSES) and not is_read

    # ----------------------------------------------------------------------------------- marks
    def is_assertion(self, node: Any) -> bool:
        """Return True for an assertion, and for a call of a function that contains one."""
        values = [node.value] if isinstance(node, ast.Expr) else []
        values += [x.context_expr for x in node.items] if isinstance(node, ast.With) else []
        calls = [x for x in values if isinstance(x, ast.Call) and not self.is_own(x)]
        names = {getattr(x.func, "attr", root(x)) for x in calls}
        is_call = not names.isdisjoint({"raises", "fail", *self.testers})
        is_assert = any(name.startswith("assert") for name in names)
        return is_call or is_assert or isinstance(node, ast.Assert)

    def is_test(self, node: ast.AST) -> bool:
        """Return True for a statement that runs an assertion. A definition runs none."""
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, INNER)]
        is_test = self.is_assertion(node) or any(map(self.is_test, inner))
        return is_test and not isinstance(node, (ast.FunctionDef, ast.ClassDef))

    def mark(self, node: Any) -> Any:
        """Put an assertion into a block `with _test_:`.

        A call of a function that contains assertions gets no block, because they have blocks.
        """
        call = getattr(node, "value", node)
        name = called(call)
        if root(call) == "self" and call.func.attr in self.methods:  # as in `self.check(f(1))`
            name = call.func.attr
        if not self.is_assertion(node) or name in self.testers:
            return self.generic_visit(node)
        block = ast.parse("with _test_: pass").body[0]
        block.body = [node]  # type: ignore[attr-defined]
        return block

    visit_Assert = visit_Expr = visit_With = mark

    def visit_Try(self, node: ast.Try) -> ast.Try:
        """Count a `try` with an assertion as reached when its body starts.

        In `try: f(-1); assert False`, the right answer raises an error before the assertion.
        """
        self.generic_visit(node)
        if self.is_test(node):
            node.body[:0] = ast.parse("with _test_: pass").body
        return node


@functools.lru_cache(maxsize=64)
def prepared(text: str) -> dict[str, Any]:
    """Return what the judge needs to run tests.

    Returns:
        A dict with the keys "units", "count" and "names". The units are one tuple for each
        statement: whether it is a test, the names that it assigns, and its source with marks. The
        count is the number of units that are tests. The names are those that the answer must
        define, see `Tests`.

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
    # function without an assertion is not called.
    body: list[Any] = tests.tree.body
    unused = tests.testers - {called(node) for node in tests.nodes}
    for node in [*body]:
        is_class = isinstance(node, ast.ClassDef)
        for name in [getattr(x, "name", "") for x in (node.body if is_class else [node])]:
            if name.startswith("test") and name in unused:
                call = f"_run_({node.name}, {name!r})" if is_class else f"{name}()"
                body += ast.parse(call).body
    # 3. Mark the assertions in the statements one by one.
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
