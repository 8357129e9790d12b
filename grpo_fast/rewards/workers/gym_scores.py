"""Scores of the package reasoning-gym, computed in a worker process.

Some scorers of reasoning-gym pass the answer of a model to Python's `eval`, or to sympy's parser,
which calls `eval`. Both are replaced here, so that no text of a model is executed.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

MOST_MEMORY = 8 << 30  # in bytes
LARGEST_POWER = 999  # the largest product of nested exponents; 9**9**9 would take hours
FUNCTIONS = ("sin", "cos", "tan", "asin", "acos", "atan", "exp", "log", "ln", "sqrt", "Abs")
ARITHMETIC = (
    ast.Expression, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.unaryop,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow,
)  # fmt: skip
# These data sets use the real `eval` for the question. Their scorers do not evaluate the answer.
OWN_TEXT = "bitwise_arithmetic", "basic_arithmetic"


def scores(*, completions: Sequence[str], entries: Sequence[dict[str, Any]]) -> list[float]:
    """Return the score of each answer by the scorer of the data set that made its question."""
    return [_score(text, entry) for text, entry in zip(completions, entries, strict=True)]


def _score(text: str, entry: dict[str, Any]) -> float:
    """Return the score of an answer, which is 0 if the scorer cannot read it."""
    scorer = _scorer(entry["dataset"], json.dumps(entry["options"]))
    try:
        return float(scorer(text, entry))
    except Exception:
        return 0.0


@functools.cache
def _scorer(dataset: str, options: str) -> Callable[[str, dict[str, Any]], float]:
    """Return the scorer of a data set with these options.

    Raises:
        ValueError: the scorer does not accept the answer of the data set's first item.
    """
    _guard_sympy()
    from reasoning_gym.factory import create_dataset

    items = create_dataset(dataset, **json.loads(options))
    if dataset not in OWN_TEXT:
        vars(sys.modules[type(items).__module__])["eval"] = ast.literal_eval
    # A data set may compare tuples, which JSON turns into lists, or may need the real `eval`.
    entry = json.loads(json.dumps(items[0], default=str))
    answer = entry["answer"]
    if answer is not None and items.score_answer(answer, entry) < 1:
        raise ValueError(f"reasoning_gym: {dataset} cannot be scored in a separate process")
    return items.score_answer  # type: ignore[no-any-return]


@functools.cache
def _guard_sympy() -> None:
    """Make sympy's parser refuse text that is not arithmetic. Call this before reasoning_gym loads.

    reasoning_gym copies the name of the parser when it is imported.
    """
    import sympy.parsing.sympy_parser as parser  # noqa: TID251

    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = MOST_MEMORY if most == resource.RLIM_INFINITY else min(MOST_MEMORY, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    theirs = parser.parse_expr

    def parse_expr(text: str, *arguments: Any, **options: Any) -> Any:
        check_arithmetic(text)
        return theirs(text, *arguments, **options)

    parser.parse_expr = parse_expr
    vars(sys.modules["sympy"])["parse_expr"] = parse_expr


def check_arithmetic(text: str) -> None:
    """Raise a ValueError or SyntaxError unless a text has only numbers, names and FUNCTIONS."""
    tree = ast.parse(text.strip().replace("^", "**"), mode="eval")
    for node in ast.walk(tree):
        is_number = isinstance(node, ast.Constant) and isinstance(node.value, (int, float))
        is_call = isinstance(node, ast.Call) and getattr(node.func, "id", "") in FUNCTIONS
        if not (is_number or is_call or isinstance(node, ARITHMETIC)):
            raise ValueError(f"expected arithmetic, got {type(node).__name__}")
    if _power(tree) > LARGEST_POWER:
        raise ValueError(f"expected powers up to {LARGEST_POWER}")


def _power(node: ast.AST) -> float:
    """Return a bound of the product of nested exponents in a checked text."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        inner = [*ast.walk(node.right)]
        sizes = [abs(x.value) for x in inner if isinstance(x, ast.Constant)]  # type: ignore[arg-type]
        is_nested = any(isinstance(x, (ast.Pow, ast.Mult, ast.Call)) for x in inner)
        return math.inf if is_nested else _power(node.left) * max(1, *sizes)
    return max((_power(x) for x in ast.iter_child_nodes(node)), default=1)
