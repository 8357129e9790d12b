"""Code generator that translates loss functions, KL estimators and divergences from Python to C++.

Each Python function is called once with `Variable` objects, which record every operation as one
line of C++. A call of an allowed function of `tl`, such as `tl.exp`, becomes a call of its C++
counterpart in csrc/vec/words.h. Loss functions and KL estimators use `double`. Divergences use
vectors, because they run once per logit. The header loss_functions.h is generated when the kernels
are compiled.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence

from grpo_fast.objective.kl import DIVERGENCES, KL_ESTIMATORS
from grpo_fast.objective.losses import LOG_RATIO_MAX, OBJECTIVES, TokenFunction, bind

MAX_PARAMS = 4  # p0 … p3 of the kernels

OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "and": "&&", "or": "||",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
}  # fmt: skip
WORDS = {
    "exp": "std::exp", "log": "std::log", "abs": "std::fabs", "expm1": "std::expm1",
    "where": "where", "clamp": "clamp", "sigmoid": "sigmoid",
}  # fmt: skip
VECTOR_WORDS = {"abs": "magnitude", "where": "where", "clamp": "clamp"}
# Helper functions of kl.py that are not translated, with the names of their C++ implementations.
HELPERS = {"expm1": "std::expm1", "expm1_minus": "expm1_minus"}
VECTOR_HELPERS = {"expm1_minus": "expm1_minus", "log1p": "log1p_above"}

PRELUDE = '#pragma once\n#include "vec/words.h"\nnamespace grpo_fast {\n'


def objective_functions() -> list[TokenFunction]:
    """Return the loss functions of `OBJECTIVES` without duplicates. C++ refers to them by index."""
    return list(dict.fromkeys(objective.function for objective in OBJECTIVES.values()))


def kl_functions() -> list[TokenFunction]:
    """Return the KL estimators without duplicates. C++ refers to them by index."""
    return list(dict.fromkeys(KL_ESTIMATORS.values()))


@functools.cache
def header() -> str:
    """Return the text of loss_functions.h.

    Raises:
        ValueError: a function uses an operation that has no C++ counterpart; the message names
            the function and the operation.
    """
    return print_header(objective_functions(), kl_functions(), list(DIVERGENCES.values()))


def print_header(
    objectives: list[TokenFunction],
    estimators: list[TokenFunction],
    divergences: Sequence[TokenFunction] = (),
) -> str:
    """Return the text of a C++ header with the formulas of losses, KL estimators and divergences.

    The header defines one C++ function for each of the three lists. The first argument of a
    function is the index of a formula in its list. For divergences, the index is a template
    argument.
    """
    tables = [
        table("objective", ("logp", "log_ratio", "advantage"), objectives),
        table("kl_estimator", ("d",), estimators),
        vector_table("divergence", ("p", "q", "d", "near", "beta"), divergences),
    ]
    # repr() gives all digits of a float.
    limit = f"constexpr double kLogRatioMax = {LOG_RATIO_MAX!r};\n"
    return "\n".join([PRELUDE, limit, *tables, "}  // namespace grpo_fast\n"])


def table(name: str, arguments: tuple[str, ...], formulas: Sequence[TokenFunction]) -> str:
    """Return the C++ source of a function that selects a formula by its index.

    Its signature is `name(index, arguments…, p)`, where p[0], p[1], … are the hyperparameters of
    the formula.
    """
    cases = []
    for index, formula in enumerate(formulas):
        # The arguments of a formula after the common `arguments` are its hyperparameters.
        extra = formula.__code__.co_argcount - len(arguments)
        if not 0 <= extra <= MAX_PARAMS:
            expected = f"the arguments {', '.join(arguments)} and at most {MAX_PARAMS} more"
            came = inspect.signature(formula)
            raise ValueError(f"{formula.__name__}: expected {expected}, got {came}")
        names = [*arguments, *(f"p[{i}]" for i in range(extra))]
        cases.append(f"    case {index}: {{{body(formula, names, WORDS, HELPERS)}    }}\n")
    signature = ", ".join(f"double {argument}" for argument in arguments)
    head = f"constexpr int64_t k_{name}_count = {len(formulas)};\n"
    head += f"inline ValueAndSlope {name}(int64_t index, {signature},\n"
    head += "    [[maybe_unused]] const double* p) {\n  switch (index) {\n"
    return head + "".join(cases) + "  }\n  return {NAN, NAN};\n}\n"


def vector_table(name: str, arguments: tuple[str, ...], formulas: Sequence[TokenFunction]) -> str:
    """Return the C++ source of a function template `name<index>(arguments…)` on vectors."""
    cases = [
        f"  if constexpr (index == {i}) {{"
        f"{body(formula, arguments, VECTOR_WORDS, VECTOR_HELPERS, 'splat({!r}f)')}  }}\n"
        for i, formula in enumerate(formulas)
    ]
    signature = ", ".join(f"Floats {argument}" for argument in arguments)
    head = f"constexpr int64_t k_{name}_count = {len(formulas)};\n"
    head += f"template <int index>\nGRPO_FAST_INLINE VectorPair {name}({signature}) {{\n"
    return head + "".join(cases) + f"  return {{{arguments[0]}, {arguments[0]}}};\n}}\n"


def body(
    formula: TokenFunction,
    arguments: Sequence[str],
    words: dict[str, str],
    helpers: dict[str, str],
    constant: str = "{!r}",
) -> str:
    """Translate a formula into the body of a C++ function that returns both of its results.

    Args:
        formula: the Python function to translate.
        arguments: C++ names of its arguments.
        words: C++ names of the functions of `tl`.
        helpers: C++ names of the Python helpers that the formula calls.
        constant: format string that writes a number as a C++ constant.
    """
    lines = [""]

    def text(x: Variable | float) -> str:
        return x.name if isinstance(x, Variable) else constant.format(float(x))

    def write(form: str, *operands: Variable | float) -> Variable:
        name = f"x{len(lines)}"
        value = form.format(*map(text, operands))
        lines.append(f"      [[maybe_unused]] const auto {name} = {value};")
        return Variable(name, write)

    def function(name: str) -> Callable[..., Variable]:
        return lambda *operands: write(f"{name}({', '.join(['{}'] * len(operands))})", *operands)

    class Vocabulary:
        def __getattr__(self, word: str) -> Callable[..., Variable]:
            if word not in words:
                raise ValueError(f"expected the words {', '.join(words)}, got 'tl.{word}'")
            return function(words[word])

    own = {name: function(word) for name, word in helpers.items()}
    # Call a copy of the formula in which bind() has replaced the module `tl` and the helper
    # functions.
    printed = bind(formula, {"tl": Vocabulary(), **own})
    try:
        pair = ", ".join(map(text, printed(*(Variable(name, write) for name in arguments))))
    except (TypeError, ValueError) as error:
        failed = f"this function cannot be printed as C++: {formula.__name__}"
        raise ValueError(f"{failed}: {error}") from error
    return "\n".join([*lines, f"      return {{{pair}}};\n"])


class Variable:
    """A C++ variable. Each of its operators writes a C++ statement and returns a new variable."""

    def __init__(self, name: str, write: Callable[..., Variable]) -> None:
        self.name = name
        self.write = write

    def __neg__(self) -> Variable:
        return self.write("-{}", self)

    def __bool__(self) -> bool:
        raise ValueError(f"expected tl.where, got a branch in Python on {self.name}")


# Define __add__, __radd__ and so on. Each operator writes one C++ statement.
for _word, _sign in OPERATORS.items():
    _form = f"{{}} {_sign} {{}}"
    setattr(Variable, f"__{_word}__", lambda x, y, form=_form: x.write(form, x, y))
    setattr(Variable, f"__r{_word}__", lambda x, y, form=_form: x.write(form, y, x))
