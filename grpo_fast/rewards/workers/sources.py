"""Analysis of the source of tests: which statements are tests, and which names they expect."""

import ast
import builtins
import contextlib
import functools
import importlib
import symtable

import wire

APPLY_CHANGES, TEST = "<apply changes>", "<test>"  # a source cannot contain these names
# Names that tests use without an import. Solutions usually import them.
WELL_KNOWN = {
    "collections": "Counter OrderedDict defaultdict deque namedtuple",
    "datetime": "date datetime timedelta",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "math": "inf isclose nan pi tau",
    "typing": "Any Callable Dict Iterable Iterator List Optional Sequence Set Tuple Union",
}
MODULE_OF = {name: module for module, names in WELL_KNOWN.items() for name in names.split()}
INNER = (ast.stmt, ast.ExceptHandler, ast.match_case, ast.withitem)  # parts of a statement
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
BRANCHES = (ast.For, ast.While, ast.If, ast.Match)  # statements that may skip their tests
ATTRIBUTES = {name for kind in wire.PLAIN for name in dir(kind)}


def statements_of(source):
    """Return the statements of the source, with the tests marked.

    A test is an assert, or a call such as `check(f)` or `case.assertEqual(f(1), 2)`. The called
    function must be defined by the tests, or its name must begin with "assert". A loop, `if`,
    `with` or `try` that contains a test is one test, and so is `with case.assertRaises(…)`. All
    other statements are setup, including calls of the answer's code such as `stack.push(1)`.
    """
    tree, is_test = _read(source)
    return _MarkTests(is_test).visit(tree).body


def count_tests(source):
    """Return how many statements of the source are tests."""
    tree, is_test = _read(source)
    return sum(map(is_test, tree.body))


def _read(source):
    """Return the syntax tree of the source, and a function that says which nodes are tests."""
    tree = ast.parse(source)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    answers = free_names(source) - vars(builtins).keys()
    return tree, functools.partial(_is_test, defined=defined, answers=answers)


def _is_test(node, defined, answers):
    if isinstance(node, DEFINITIONS):
        return False
    inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, INNER)]
    if isinstance(node, ast.Assert) or any(_is_test(x, defined, answers) for x in inner):
        return True
    is_statement = isinstance(node, ast.Expr)
    call = node.value if is_statement else getattr(node, "context_expr", None)
    if not isinstance(call, ast.Call):
        return False
    function = root = call.func
    while isinstance(root, (ast.Attribute, ast.Call)):
        root = root.value if isinstance(root, ast.Attribute) else root.func
    if not isinstance(root, ast.Name) or root.id in answers:
        return False
    name = function.attr if isinstance(function, ast.Attribute) else root.id
    return name.startswith("assert") or (is_statement and function is root and name in defined)


class _MarkTests(ast.NodeTransformer):
    """AST transformer that replaces each test by `with TEST:` and the test.

    TEST notices a loop or `if` that skips all its tests, for example because the answer returns an
    empty list. It also notices a failure that a `try` or `with` around the test swallows.
    """

    def __init__(self, is_test):
        self.is_test = is_test

    def visit(self, node):
        if isinstance(node, (ast.expr, *DEFINITIONS)):
            return node
        is_test = isinstance(node, ast.stmt) and self.is_test(node)
        node = self.generic_visit(node)
        if not is_test or isinstance(node, BRANCHES):
            return node
        marked = ast.With([ast.withitem(ast.Name(TEST, ast.Load()))], [node])
        return ast.fix_missing_locations(ast.copy_location(marked, node))


def names_of_answer(source):
    """Return the names that the answer must define: names that the tests use but do not define.

    The answer must not define functions that judge it, such as `isinstance`, `math` or `Counter`.
    Names of builtins, modules and well-known types are therefore left out, unless the tests use no
    other undefined name, as in `assert sum(10, 15) == 6`.
    """
    free = free_names(source) - modules_of(source)
    known = vars(builtins).keys() | MODULE_OF.keys()
    own = {name for name in free - known if not name.startswith("assert")}
    return own or (free if len(free) == 1 else set())


def borrowed(source):
    """Return the modules and types that the tests use without importing them, keyed by name.

    Names that the answer must define are left out.
    """
    modules = {name: MODULE_OF[name] for name in free_names(source) & MODULE_OF.keys()}
    modules |= dict.fromkeys(modules_of(source))
    found = {}
    for name in modules.keys() - names_of_answer(source):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(modules[name] or name)
            found[name] = getattr(module, name) if modules[name] else module
    return found


def modules_of(source):
    """Return the undefined names that the tests use as modules, such as `math` in `math.pi`.

    A name counts as a module if the tests only use it as `name.attribute`. Names in CapWords are
    classes, and are left out.
    """
    nodes = list(ast.walk(ast.parse(source)))
    bases = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
    others = {n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in bases}
    return {name for name in free_names(source) - others if not name[0].isupper()}


def uses_objects(source):
    """Return True if the tests use an object that is not plain data.

    This is the case if they read an attribute that no builtin class has, or if a statement consists
    of a method call, such as `stack.push(1)`.
    """
    nodes = list(ast.walk(ast.parse(source)))
    modules = modules_of(source)
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules |= {alias.asname or alias.name for alias in node.names}
    statements = [node.value for node in nodes if isinstance(node, ast.Expr)]
    effects = {id(value.func) for value in statements if isinstance(value, ast.Call)}
    for node in nodes:
        if not isinstance(node, ast.Attribute) or node.attr.startswith("assert"):
            continue
        if isinstance(node.value, ast.Name) and node.value.id in modules:
            continue
        if node.attr not in ATTRIBUTES or id(node) in effects:
            return True
    return False


def free_names(source):
    """Return the global names that Python source code reads without defining them."""
    top = symtable.symtable(source, "<tests>", "exec")
    names = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table is top or symbol.is_global()):
                names.add(symbol.get_name())
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    return names - bound


class _ApplyChanges(ast.NodeTransformer):
    """AST transformer that adds a call of APPLY_CHANGES after each statement.

    The answer's function f receives a copy of x. If f changes its copy, the tests' variable x is
    changed only after the statement. In `assert f(x) == sorted(x)`, `sorted` therefore still sees
    the original x, even if f has emptied its copy.
    """

    def generic_visit(self, node):
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):  # the body of a lambda is an expression
                setattr(node, field, [part for s in statements for part in (s, _apply_after(s))])
        return node


def _apply_after(statement):
    call = ast.Call(ast.Name(APPLY_CHANGES, ast.Load()), [], [])
    return ast.fix_missing_locations(ast.copy_location(ast.Expr(call), statement))


def compiled(statement):
    """Compile a statement of the tests. Call APPLY_CHANGES after it and each nested statement."""
    return compile(_ApplyChanges().visit(ast.Module([statement], [])), "<tests>", "exec")
