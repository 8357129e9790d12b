"""What a source of tests says: which statements are tests, which names it takes from the answer."""

import ast
import builtins
import symtable
import sys
from types import CodeType

ASSERTING = "<asserting>"  # no name that a source can have


def tests_of(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements that are tests; the others prepare.

    A test is an assert, or the call of a function that the tests define or whose name begins with
    assert. A call of the answer alone (`stack.push(1)`) judges nothing.
    """
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return [statement for statement in tree.body if _is_test(statement, defined)]


def _is_test(statement: ast.stmt, defined: set[str]) -> bool:
    if isinstance(statement, ast.Assert):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    if isinstance(function, ast.Attribute):
        return function.attr.startswith("assert")
    return isinstance(function, ast.Name) and (
        function.id in defined or function.id.startswith("assert")
    )


def names_of_answer(source: str) -> set[str]:
    """Return the names that tests take from the answer: those that they do not define.

    Builtins and modules of the standard library are never the answer's, which could define
    `isinstance` or `math` to suit itself. Two exceptions: a builtin's name that is the only one
    (`assert sum(10, 15) == 6`), and a module's name that is called.
    """
    free = free_names(source) - modules_of(source)
    own = free - vars(builtins).keys()
    return own or (free if len(free) == 1 else set())


def modules_of(source: str) -> set[str]:
    """Return the modules of the standard library that tests use without an import."""
    nodes = list(ast.walk(ast.parse(source)))
    called = {node.func.id for node in nodes
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    return (free_names(source) & sys.stdlib_module_names) - called


def free_names(source: str) -> set[str]:
    """Return the global names that a source reads and does not define."""
    top = symtable.symtable(source, "<tests>", "exec")
    names, tables = set(), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table is top or symbol.is_global()):
                names.add(symbol.get_name())
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    return names - bound


class _Deferred(ast.NodeTransformer):
    """Marks asserts, and calls such as `self.assertEqual(…)`, by a context; see `judge.Session`."""

    def visit_Assert(self, node: ast.stmt) -> ast.With:
        return _with(True, [node])

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        return _with(True, [node]) if _is_test(node, set()) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.body = [_with(False, node.body)]
        return node


def _with(is_asserting: bool, body: list[ast.stmt]) -> ast.With:
    context = ast.Call(ast.Name(ASSERTING, ast.Load()), [ast.Constant(is_asserting)], [])
    node = ast.With([ast.withitem(context)], body)
    return ast.fix_missing_locations(ast.copy_location(node, body[0]))


def compiled(statement: ast.stmt) -> CodeType:
    part = ast.Module([_Deferred().visit(statement)], [])
    return compile(part, "<tests>", "exec")
