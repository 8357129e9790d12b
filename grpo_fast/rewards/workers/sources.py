"""What a source of tests says: which statements are tests, which names it takes from the answer."""

import ast
import builtins
import contextlib
import importlib
import symtable
from types import CodeType

ASSERTING = "<asserting>"  # no name that a source can have


# Names that tests use without an import because answers import them as well.
WELL_KNOWN = {
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "datetime": "date datetime timedelta",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "math": "inf isclose nan pi tau",
    "typing": "Any Callable Dict Iterable Iterator List Optional Sequence Set Tuple Union",
}
PLAIN = (bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
ATTRIBUTES = {name for kind in PLAIN for name in dir(kind)}
MODULE_OF = {name: module for module, names in WELL_KNOWN.items() for name in names.split()}


def statements_of(source: str) -> list[tuple[ast.stmt, bool]]:
    """Return each statement, and whether it is a test; the others prepare.

    A test is an assert, or the call of a function that the tests define or that is called
    assert…: `check(f)`, `case.assertEqual(f(1), 2)`. A call of the answer (`stack.push(1)`) judges
    nothing.
    """
    tree = ast.parse(source)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    answers = free_names(source) - vars(builtins).keys()
    return [(statement, _is_test(statement, defined, answers)) for statement in tree.body]


def count_tests(source: str) -> int:
    return sum(is_test for _, is_test in statements_of(source))


def _is_test(statement: ast.stmt, defined: set[str], answers: set[str]) -> bool:
    if isinstance(statement, ast.Assert):
        return True
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = root = statement.value.func
    while isinstance(root, (ast.Attribute, ast.Call)):
        root = root.value if isinstance(root, ast.Attribute) else root.func
    if not isinstance(root, ast.Name) or root.id in answers:
        return False
    name = function.attr if isinstance(function, ast.Attribute) else root.id
    return name.startswith("assert") or (function is root and name in defined)


def names_of_answer(source: str) -> set[str]:
    """Return the names that tests take from the answer: those that they do not define.

    The answer must not define what judges it, such as `isinstance`, `math` or `Counter`. The names
    of builtins, of modules and of well-known types are therefore the answer's only if the tests
    name nothing else (`assert sum(10, 15) == 6`).
    """
    free = free_names(source) - modules_of(source)
    known = vars(builtins).keys() | MODULE_OF.keys()
    own = {name for name in free - known if not name.startswith("assert")}
    return own or (free if len(free) == 1 else set())


def borrowed(source: str) -> dict[str, object]:
    """Return what tests use without an import and is not the answer's: name → module or type."""
    found = {}
    wanted = dict.fromkeys(modules_of(source))
    wanted |= {name: MODULE_OF[name] for name in free_names(source) & MODULE_OF.keys()}
    for name in wanted.keys() - names_of_answer(source):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(wanted[name] or name)
            found[name] = getattr(module, name) if wanted[name] else module
    return found


def modules_of(source: str) -> set[str]:
    """Return the names that tests use as modules, `name.attribute` alone.

    A name in CapWords is a class.
    """
    nodes = list(ast.walk(ast.parse(source)))
    bases = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
    others = {n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in bases}
    return {name for name in free_names(source) - others if not name[0].isupper()}


def uses_objects(source: str) -> bool:
    """Return whether tests use an object that is not plain data.

    They do if they read an attribute that no builtin type has, or call a method for its effect.
    """
    tree = ast.parse(source)
    bound = {alias.asname or alias.name for node in ast.walk(tree)
             if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}  # fmt: skip
    modules = bound | modules_of(source)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)
             and not node.attr.startswith("assert")
             and not (isinstance(node.value, ast.Name) and node.value.id in modules)]  # fmt: skip
    effects = {id(node.value.func) for node in ast.walk(tree)
               if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)}  # fmt: skip
    return any(node.attr not in ATTRIBUTES or id(node) in effects for node in found)


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
        return _with(True, [node]) if _is_test(node, set(), set()) else node

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
