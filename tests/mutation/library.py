"""Bugs that cosmic-ray generates for a Python file: a different operator, number or comparison.

cosmic-ray's own runner starts Python and imports torch for every bug, which takes 5 s.
`tests.mutation` forks a process instead. The bugs are edits of the source text. The C++ and
Triton code that is generated from objective/losses.py therefore contains them, too. mutmut is
unsuitable: it renames each function that it changes, and the generator then does not find it.
"""

from __future__ import annotations

import ast
import random
from pathlib import Path

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

# Maps each folder to the key of `suites.SUITES` whose tests must detect bugs in it. These suites
# are quick, and check numbers, gradients and error messages.
SUITES = {
    "grpo_fast/objective": "python_objective",
    "grpo_fast/loss": "python_loss",
    "grpo_fast/attention": "python_attention",
}


class Behaviour(ast.NodeTransformer):
    """Syntax tree transformer that removes annotations, because they do not affect results."""

    def visit_AnnAssign(self, node):  # noqa: N802 (ast's name)
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_FunctionDef(self, node):  # noqa: N802 (ast's name)
        node.returns = None
        return self.generic_visit(node)


def behaviour(code: str) -> str | None:
    """Return the code's syntax tree as text, without annotations, or None if the code is invalid.

    Two versions of the code with the same tree behave in the same way.
    """
    try:
        return ast.dump(Behaviour().visit(ast.parse(code)))
    except SyntaxError:
        return None


def is_telling(operator: str) -> bool:
    """Return True if the bugs of a cosmic-ray operator are worth testing.

    Every test would detect the bugs of other operators. For example, x << y raises a TypeError for
    floats.
    """
    if "BinaryOperator" not in operator:
        return True
    return operator.rpartition("_")[2] in ("Add", "Sub", "Mul", "Div", "BitAnd", "BitOr")


def changed(code: str, most: int) -> list[tuple[str, str]]:
    """Return pairs (operator, changed code) for at most `most` bugs in the code.

    If there are more bugs, they are chosen with a fixed seed.
    """
    tree = get_ast(code)
    places = []
    for name in filter(is_telling, cosmic_ray.plugins.operator_names()):
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments():
            continue
        count = sum(1 for node in ast_nodes(tree) for _ in kind().mutation_positions(node))
        places += [(name, kind, occurrence) for occurrence in range(count)]
    random.Random(0).shuffle(places)
    seen = {behaviour(code), None}
    found = []
    for name, kind, occurrence in places:
        if len(found) == most:
            break
        mutated = mutate_code(code, kind(), occurrence)
        changes = behaviour(mutated) if mutated else None
        if changes not in seen:
            seen.add(changes)
            found.append((name.partition("/")[2], mutated))
    return found


def plants(root: Path, file: str, most: int) -> list[tuple]:
    """Return the generated bugs of a file as tuples with the fields of `Plant`."""
    code = (root / file).read_text()
    suite = next((suite for folder, suite in SUITES.items() if file.startswith(folder)), None)
    if suite is None:
        raise SystemExit(f"--library: expected a file in one of {list(SUITES)}, got {file}")
    result = []
    for number, (operator, mutated) in enumerate(changed(code, most)):
        pairs = zip(code.splitlines(), mutated.splitlines(), strict=False)
        line = next(i for i, (before, after) in enumerate(pairs, 1) if before != after)
        shown = mutated.splitlines()[line - 1].strip()
        name = f"{Path(file).stem}-{number}"
        result.append((file, name, suite, f"{operator}, line {line}: {shown}", code, mutated))
    return result
