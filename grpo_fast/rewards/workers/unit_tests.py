"""Unit tests of a data row: their forms, what they may use, and their preparation for the judge.

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
MODULES = sys.stdlib_module_names - set(
    "asyncio concurrent multiprocessing socket subprocess tempfile threading".split()
)
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
ATTRIBUTES = {name for kind in PLAIN for name in dir(kind)}
LOOKS = vars(builtins).keys() - {"callable", "filter", "map", "print"}  # look into their arguments
# Statements and expressions that pass a value on without looking into it.
PASSES = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr, ast.List, ast.Tuple, ast.keyword,
          ast.ExceptHandler, ast.arg, ast.FunctionDef)  # fmt: skip
BASES = ("TestCase", "Error", "Exception", "NamedTuple")  # of classes that tests may define
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Assert, ast.Return)
INNER = (ast.stmt, ast.ExceptHandler, ast.match_case, ast.withitem)  # parts of a statement


def check(tests: Any) -> None:
    """Check that `code_tests` can run the tests of a data row.

    Raises:
        ValueError: the tests have an unknown form, or use something that is not supported.
    """
    read = read_tests(tests)
    if isinstance(read, str) and len(prepared(read)["names"]) > 1:
        warn_once("code_tests: some tests use several names of the answer; %s", "it can define "
                  "a helper that accepts every result")  # fmt: skip


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
    expected = 'Python source, a list of sources, or {"input": text, "output": text}'
    pairs: list[tuple[str, str]] = []
    for part in parts or [None]:
        given = part if isinstance(part, dict) else {}
        inputs = given.get("inputs", [given.get("input")])
        outputs = given.get("outputs", [given.get("output")])
        are_texts = all(isinstance(text, str) for text in [*inputs, *outputs])
        if not are_texts or len(inputs) != len(outputs) or given.get("testtype") == "functional":
            raise ValueError(
                f"tests: expected {expected}, got {part!r:.60} ({type(part).__name__})"
            )
        pairs += zip(inputs, outputs, strict=True)
    return pairs


def free_names(table: symtable.SymbolTable, is_top: bool = True) -> set[str]:
    """Return the global names that Python source code reads without defining them."""
    symbols = table.get_symbols()
    free = {x.get_name() for x in symbols if x.is_referenced() and (is_top or x.is_global())}
    free = free.union(*(free_names(child, False) for child in table.get_children()))
    return free - {x.get_name() for x in symbols if is_top and (x.is_assigned() or x.is_imported())}


def names_of(tree: ast.AST) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Return the names that the answer must define, and the names that come from libraries.

    Remove the imports of the answer from the syntax tree.

    Returns:
        The names of the answer, as a dict from the names in the tests to the names in the answer.
        The names of libraries, as a dict from names to the module and the name there. The latter is
        "" for the module itself, such as `math` in `math.pi`.
    """
    # 1. Find the imports of the answer, and the attributes that are read from each name.
    names: dict[str, str] = {}
    uses: dict[str, list[str]] = collections.defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in SOLUTIONS:
            names |= {x.asname or x.name: x.name for x in node.names if x.name != "*"}
            node.module, node.names = "builtins", [ast.alias("object")]
        for name in [x.id for x in ast.iter_child_nodes(node) if isinstance(x, ast.Name)]:
            uses[name].append(getattr(node, "attr", ""))
    free = free_names(symtable.symtable(ast.unparse(tree), "<tests>", "exec")) - names.keys()
    # 2. Find the names of libraries.
    paths = {name: name for name in free & MODULES if all(uses[name])} | {"np": "numpy"}
    modules = {name: importlib.import_module(x) for name, x in paths.items() if name in free}
    borrowed = {name: (module.__name__, "") for name, module in modules.items()
                if all(hasattr(module, attribute) for attribute in uses[name])}  # fmt: skip
    undefined = free - vars(builtins).keys() - borrowed.keys()
    known = undefined & LIBRARY.keys()
    # 3. The other names are the answer's. If there is none, it is the only name of a library or the
    # only builtin, as in `assert gcd(4, 6) == 2` or `assert sum(10, 15) == 25`.
    own = undefined - known
    candidates = known or free & vars(builtins).keys()
    if not own and not names and len(candidates) == 1:
        own = candidates
    return names | {x: x for x in own}, borrowed | {x: (LIBRARY[x], x) for x in known - own}


class Syntax:
    """Syntax tree of tests, without imports of the answer, and what it uses of the answer.

    Args:
        tree: the syntax tree.
        names: the names that the answer defines.
    """

    def __init__(self, tree: ast.AST, names: Any) -> None:
        self.names = names
        self.nodes = list(ast.walk(tree))
        self.up = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.functions = {node.name for node in self.nodes if isinstance(node, DEFINITIONS)}
        self.functions |= {name for name, x in vars(builtins).items() if not isinstance(x, type)}
        # Variables with a result of the answer. The result is an object if the tests call a method
        # on it that no plain data has.
        self.results = {ast.unparse(target) for node in self.nodes if isinstance(node, ast.Assign)
                        and called(node.value) in names for target in node.targets}  # fmt: skip
        attributes = [node for node in self.nodes if isinstance(node, ast.Attribute)]
        used = {ast.unparse(node.value) for node in attributes if node.attr not in ATTRIBUTES}
        self.objects = used & self.results

    def unsupported(self) -> str | None:
        """Return the first statement that is not supported, or None."""
        wrong: Any = next(filter(self.is_wrong, self.nodes), None)
        while isinstance(wrong, ast.expr) and wrong in self.up:
            wrong = self.up[wrong]
        return wrong and ast.unparse(wrong)

    def is_wrong(self, node: ast.AST) -> bool:
        match node:
            case ast.AsyncFunctionDef() | ast.Await() | ast.Name("redirect_stdout" | "patch"):
                return True
            case ast.Import(listed) | ast.ImportFrom(names=listed):
                modules = [getattr(node, "module", x.name) or "." for x in listed]
                names = {x.name for x in listed}
                is_star = "*" in names and modules[0] not in LIBRARY.values()
                return is_star or "mock" in names or not all(map(can_import, modules))
            case ast.ClassDef(name, bases):
                return name[:4] != "Test" and not any(ast.unparse(x).endswith(BASES) for x in bases)
            case ast.FunctionDef(name, ast.arguments(args=[*_, ast.arg(last)])):
                return name[:4] == "test" and last != "self"  # a fixture
            case ast.Name(name) if name in self.names:
                return not self.passes(node)
            case ast.Name(ctx=ast.Load()) if ast.unparse(node) in self.objects:
                return not (isinstance(self.up[node], ast.Attribute) or self.passes(node))
            case ast.Attribute(value, name, context):
                is_receiver = isinstance(self.up[node], ast.Attribute)
                if ast.unparse(node) in self.objects and isinstance(context, ast.Load):
                    return not (is_receiver or self.passes(node))
                if ast.unparse(value) in self.objects:
                    return isinstance(context, ast.Store) or not self.passes(node)
                is_chain = isinstance(value, ast.Call) and root(value) in self.objects
                is_result = ast.unparse(value) in self.results or root(value) in self.names
                is_read = is_result and not self.passes(node)
                return name not in ATTRIBUTES and (is_chain or is_read)
            case ast.BinOp(left, right=right) | ast.Compare(left, comparators=[right]):
                both = (called(left), called(right))
                return all(x in self.names and x[0].isupper() for x in both)
            case ast.Call(function, values, keywords) if self.calls_answer(node):
                given = [*values, *(x.value for x in keywords)]
                return isinstance(function, ast.Call) or any(map(self.is_function, given))
        return False

    def passes(self, node: ast.AST) -> bool:
        """Return True if a value is called, or passed on without looking into it."""
        outer = self.up[node]
        if isinstance(outer, ast.Call) and outer.func is not node:
            return not self.calls_answer(outer) and ast.unparse(outer.func) not in LOOKS
        return isinstance(outer, (ast.Call, *PASSES))

    def calls_answer(self, node: ast.Call) -> bool:
        receiver = ast.unparse(getattr(node.func, "value", node))
        return root(node) in self.names or receiver in self.objects

    def is_function(self, value: ast.AST) -> bool:
        """Return True for an argument that is a function, or an array of numpy."""
        is_name = isinstance(value, ast.Name) and value.id in self.functions
        return is_name or isinstance(value, ast.Lambda) or root(value) in ("np", "numpy")


def can_import(module: str) -> bool:
    base = module.partition(".")[0]
    is_installed = base in PACKAGES and importlib.util.find_spec(base) is not None
    return is_installed or (base in MODULES and "mock" not in module)


def called(node: ast.AST) -> str:
    """Return the name of the function that an expression calls, or ""."""
    return getattr(getattr(node, "func", None), "id", "")


def root(node: Any) -> str:
    """Return the first name of an expression such as `a.b(1).c`, or ""."""
    while isinstance(node, (ast.Call, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


class Marks(ast.NodeTransformer):
    """AST transformer that replaces each simple statement by `with _step_:` and the statement.

    For a test, it is `with _test_:`. This notices a loop or `if` that skips all its tests, for
    example because the answer returns an empty list. It also notices a failure that a `try` or
    `with` around the test swallows. Both apply the changes that the answer has made to its
    arguments, after the statement: in `assert f(x) == sorted(x)`, `sorted` sees the original x.
    """

    def __init__(self, tree: ast.AST, names: Any) -> None:
        self.names = names
        self.testers = {"_run_"}  # functions that contain a test
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for _ in functions:  # a function may call a function that contains a test
            self.testers |= {f.name for f in functions if any(map(self.tests, ast.walk(f)))}

    def tests(self, node: ast.AST) -> bool:
        """Return True for an assert, and for a call such as `check(f)` or `self.assertEqual(…)`."""
        call = node.value if isinstance(node, ast.Expr) else getattr(node, "context_expr", None)
        if not isinstance(call, ast.Call) or root(call) in self.names:
            return isinstance(node, (ast.Assert, ast.Raise))
        name = getattr(call.func, "attr", root(call))
        return name.startswith("assert") or name in {"raises", "fail", *self.testers}

    def is_test(self, node: ast.AST) -> bool:
        """Return True for a statement that is a test, or contains one."""
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, INNER)]
        is_definition = isinstance(node, (*DEFINITIONS, ast.Raise))
        return not is_definition and (self.tests(node) or any(map(self.is_test, inner)))

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


@functools.lru_cache(maxsize=64)
def prepared(text: str) -> dict[str, Any]:
    """Return what the judge needs: the statements of the tests with marks, and their names.

    Raises:
        ValueError: the source is not Python, has no test, or uses something unsupported.
    """
    # 1. Find the names of the answer, and refuse what is not supported.
    try:
        tree = ast.parse(text)
        names, borrowed = names_of(tree)
        wrong = Syntax(tree, names).unsupported()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"tests: expected Python, got {text[:60]!r}: {error}") from None
    if wrong is not None:
        expected = "what the table in the README of rewards lists"
        raise ValueError(f"tests: expected {expected}, got {wrong[:80]!r}")
    # 2. Call the test functions that the tests do not call, and the methods of test classes.
    calls = {called(node) for node in ast.walk(tree)}
    body: list[Any] = [*tree.body]
    for node in body:
        is_class = isinstance(node, ast.ClassDef)
        for name in [getattr(x, "name", "") for x in (node.body if is_class else [node])]:
            if name.startswith("test") and name not in calls:
                arguments = f"{node.name}, {name!r}" if is_class else name
                tree.body += ast.parse(f"_run_({arguments})").body
    # 3. Mark the statements one by one.
    marks = Marks(tree, names)
    units = []
    for node in tree.body:
        is_test = marks.is_test(node)
        stored = [x.id for x in ast.walk(node) if isinstance(x, ast.Name)
                  and isinstance(x.ctx, ast.Store)]  # fmt: skip
        units.append((is_test, ast.unparse(marks.visit(node)), stored))
    count = sum(is_test for is_test, *_ in units)
    if not (count and names):
        expected = "at least one assert, or call of a function that the tests define"
        got = f"{text[:60]!r}, which uses {len(names)} names of the answer"
        raise ValueError(f"tests: expected {expected}, got {got}")
    specs = [importlib.util.find_spec(x) for x in PACKAGES if x in f"{text}{borrowed}"]
    return {"units": units, "count": count, "names": names, "borrowed": borrowed,
            "paths": [str(Path(x.origin).parents[1]) for x in specs if x and x.origin],
            "seeds": "random" in text and "seed(" in text}  # fmt: skip
