"""Scores of the package reasoning-gym, computed in a worker process.

Some scorers of reasoning-gym pass the answer of a model to Python's `eval`, or to sympy's parser,
which calls `eval`. Both are replaced here, so that no text of a model is executed.
"""

from __future__ import annotations

import ast
import functools
import json
import resource
import sys
from collections.abc import Callable, Sequence
from typing import Any

MOST_MEMORY = 8 << 30  # in bytes, because powers in an answer may need any amount of memory
FUNCTIONS = ("sin", "cos", "tan", "asin", "acos", "atan", "exp", "log", "ln", "sqrt", "Abs")
ARITHMETIC = (ast.Expression, ast.Name, ast.Load, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
OWN_TEXT = "bitwise_arithmetic"  # its scorer evaluates the question, not the answer


def scores(*, completions: Sequence[str], entries: Sequence[dict[str, Any]]) -> list[float]:
    """Return the score of each answer by the scorer of the data set that made its question."""
    pairs = zip(completions, entries, strict=True)
    return [float(_scorer(x["dataset"], json.dumps(x["options"]))(text, x)) for text, x in pairs]


@functools.cache
def _scorer(dataset: str, options: str) -> Callable[[str, dict[str, Any]], float]:
    """Return the scorer of a data set with these options.

    Raises:
        ValueError: the scorer does not accept the answer of the data set's first item.
    """
    _guard_sympy()
    from reasoning_gym.factory import create_dataset

    items = create_dataset(dataset, **json.loads(options))
    if dataset != OWN_TEXT:
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
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        fits = isinstance(node, ARITHMETIC)
        if isinstance(node, ast.Constant):
            fits = isinstance(node.value, (int, float))
        elif isinstance(node, ast.Call):
            fits = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        if not fits:
            raise ValueError(f"expected arithmetic, got {type(node).__name__}")
