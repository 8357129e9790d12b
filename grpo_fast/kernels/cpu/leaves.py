"""The leaves for C++: prints the functions of losses.py, kl.py and divergences.py as a header.

Every word of the vocabulary has one C++ counterpart, in double, and for the divergences, which run
once per logit, on vectors as well. The header is made when the kernels are compiled.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Sequence

from grpo_fast.objective.divergences import DIVERGENCES
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import LOG_RATIO_MAX, OBJECTIVES

MAX_PARAMS = 4  # p0 … p3 of the kernels' doors

OPERATORS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.BitAnd: "&&", ast.BitOr: "||",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
WORDS = {
    "exp": "std::exp", "log": "std::log", "abs": "std::fabs", "expm1": "std::expm1",
    "where": "where", "clamp": "clamp", "sigmoid": "sigmoid", "minimum": "minimum",
    "maximum": "maximum",
}  # fmt: skip
VECTOR_WORDS = {"abs": "magnitude", "where": "where", "clamp": "clamp"}
# Helpers of kl.py and divergences.py that are words themselves: each reader has its own.
HELPERS = {"expm1": "std::expm1", "expm1_minus": "expm1_minus", "log1p": "std::log1p"}
VECTOR_HELPERS = {"expm1_minus": "expm1_minus", "log1p": "log1p_above"}

PRELUDE = """\
#pragma once
#include <cmath>
#include <cstdint>

#include "vec/words.h"

namespace grpo_fast {

struct ValueAndSlope {
  double value, slope;
};
struct VectorPair {
  Floats value, slope;
};

// A NaN argument comes out as NaN everywhere, as in torch.
inline double where(bool condition, double a, double b) { return condition ? a : b; }
inline bool where(bool condition, bool a, bool b) { return condition ? a : b; }
inline double clamp(double x, double low, double high) {
  return x < low ? low : x > high ? high : x;
}
inline double minimum(double a, double b) { return b < a || b != b ? b : a; }
inline double maximum(double a, double b) { return b > a || b != b ? b : a; }
inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double expm1_minus(double x) { return std::expm1(x) - x; }
"""


def objective_leaves() -> list[Callable]:
    """The leaves of `OBJECTIVES`, each once; their order numbers them."""
    return list(dict.fromkeys(objective.leaf for objective in OBJECTIVES.values()))


def kl_leaves() -> list[Callable]:
    return list(dict.fromkeys(KL_ESTIMATORS.values()))


@functools.cache
def header() -> str:
    """The text of leaves.h.

    Raises:
        ValueError: a leaf uses something outside of the vocabulary; the message names both.
        OSError: the python sources are not there.
    """
    return print_header(objective_leaves(), kl_leaves(), list(DIVERGENCES.values()))


def print_header(
    objectives: list[Callable], estimators: list[Callable], divergences: Sequence[Callable] = ()
) -> str:
    """The leaves, and tables that choose one by number; divergences on vectors, too."""
    functions: dict[Callable, str] = {}  # in the order in which C++ must see them: helpers first
    for leaf in (*objectives, *estimators, *divergences):
        add_function(leaf, functions)
    tables = [
        table("objective", ("logp", "log_ratio", "advantage"), objectives),
        table("kl_estimator", ("d",), estimators),
        table("divergence", ("student", "teacher", "d", "near"), divergences),
        *(VectorPrinter(leaf).function() for leaf in divergences),
        vector_table("divergence", ("p", "q", "d", "near", "beta"), divergences),
    ]
    limit = f"constexpr double kLogRatioMax = {LOG_RATIO_MAX!r};\n"
    return "\n".join([PRELUDE, limit, *functions.values(), *tables, "}  // namespace grpo_fast\n"])


def vector_table(name: str, arguments: tuple[str, ...], leaves: Sequence[Callable]) -> str:
    cases = [
        f"  if constexpr (index == {i}) return {function_name(x)}({', '.join(arguments)});\n"
        for i, x in enumerate(leaves)
    ]
    signature = ", ".join(f"Floats {argument}" for argument in arguments)
    head = f"template <int index>\nGRPO_FAST_INLINE VectorPair {name}({signature}) {{\n"
    return head + "".join(cases) + f"  return {{{arguments[0]}, {arguments[0]}}};\n}}\n"


def table(name: str, arguments: tuple[str, ...], leaves: Sequence[Callable]) -> str:
    """`name(index, arguments…, p)`: a switch over the leaves; p[0], p[1], … are their options."""
    lines = []
    for index, leaf in enumerate(leaves):
        extra = leaf.__code__.co_argcount - len(arguments)
        if not 0 <= extra <= MAX_PARAMS:
            expected = f"the arguments {', '.join(arguments)} and at most {MAX_PARAMS} more"
            came = inspect.signature(leaf)
            raise ValueError(f"{leaf.__name__}: expected {expected}, got {came}")
        values = ", ".join([*arguments, *(f"p[{i}]" for i in range(extra))])
        lines.append(f"    case {index}: return {function_name(leaf)}({values});")
    signature = ", ".join(f"double {argument}" for argument in arguments)
    head = f"constexpr int64_t k_{name}_count = {len(leaves)};\n"
    head += f"inline ValueAndSlope {name}(int64_t index, {signature},\n"
    head += "    [[maybe_unused]] const double* p) {\n"
    return head + "  switch (index) {\n" + "\n".join(lines) + "\n  }\n  return {NAN, NAN};\n}\n"


def function_name(leaf: Callable) -> str:
    return f"{leaf.__module__.rpartition('.')[2]}_{leaf.__name__}"


def add_function(leaf: Callable, functions: dict[Callable, str]) -> None:
    if leaf in functions:
        return
    printer = LeafPrinter(leaf)
    text = printer.function()
    for callee in printer.callees:
        add_function(callee, functions)
    functions[leaf] = text


class LeafPrinter:
    """One leaf as a C++ function of doubles; names end in an underscore, as no C++ word does."""

    signature, number, words, helpers = "inline ValueAndSlope", "double", WORDS, HELPERS

    def __init__(self, leaf: Callable) -> None:
        self.leaf = leaf
        tree = ast.parse(textwrap.dedent(inspect.getsource(leaf))).body[0]
        if not isinstance(tree, ast.FunctionDef):
            raise ValueError(f"{leaf.__name__}: expected a function made by def")
        self.tree = tree
        self.local = {argument.arg for argument in tree.args.args}
        self.callees: list[Callable] = []

    def function(self) -> str:
        arguments = ", ".join(f"{self.number} {argument.arg}_" for argument in self.tree.args.args)
        lines = [line for statement in self.tree.body for line in self.statement(statement)]
        head = f"{self.signature} {function_name(self.leaf)}({arguments}) {{"
        return "\n".join([head, *lines, "}\n"])

    def statement(self, statement: ast.stmt) -> list[str]:
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):
                return []
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                text = self.expression(value)
                declared = "" if name in self.local else "auto "
                self.local.add(name)
                return [f"  {declared}{name}_ = {text};"]
            case ast.Assign(
                targets=[ast.Tuple(elts=[ast.Name(id=value), ast.Name(id=slope)])],
                value=ast.Call() as call,
            ):
                pair = f"{value}_and_{slope}_"
                self.local |= {value, slope}
                return [
                    f"  const ValueAndSlope {pair} = {self.expression(call)};",
                    f"  [[maybe_unused]] double {value}_ = {pair}.value, {slope}_ = {pair}.slope;",
                ]
            case ast.Return(value=ast.Tuple(elts=[value, slope])):
                return [f"  return {{{self.expression(value)}, {self.expression(slope)}}};"]
        raise self.refusal(statement)

    def expression(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return self.name(node, name)
            case ast.Constant(value=int() | float()):
                return self.constant(node.value)  # type: ignore[arg-type]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return f"({self.expression(left)} {OPERATORS[type(op)]} {self.expression(right)})"
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(-{self.expression(operand)})"
            case ast.Compare(left=left, ops=[compare], comparators=[right]) if (
                type(compare) in OPERATORS
            ):
                return (
                    f"({self.expression(left)} {OPERATORS[type(compare)]} {self.expression(right)})"
                )
            case ast.Call(func=function, args=args, keywords=[]):
                return f"{self.callee(function)}({', '.join(map(self.expression, args))})"
        raise self.refusal(node)

    def name(self, node: ast.expr, name: str) -> str:
        if name in self.local:
            return f"{name}_"
        constant = self.leaf.__globals__.get(name)
        if isinstance(constant, (int, float)):
            return self.constant(constant)
        raise self.refusal(node)

    def constant(self, value: float) -> str:
        return repr(float(value))

    def callee(self, node: ast.expr) -> str:
        match node:
            case ast.Attribute(value=ast.Name(id="tl"), attr=word) if word in self.words:
                return self.words[word]
            case ast.Name(id=name) if name in self.helpers:
                return self.helpers[name]
            case ast.Name(id=name) if isinstance(
                self.leaf.__globals__.get(name), types.FunctionType
            ):
                function = self.leaf.__globals__[name]
                self.callees.append(function)
                return function_name(function)
        raise self.refusal(node)

    def refusal(self, node: ast.AST) -> ValueError:
        expected = f"assignments and a returned pair in the words {', '.join(self.words)}"
        came = repr(ast.unparse(node))
        return ValueError(f"{self.leaf.__name__}: expected {expected}, got {came}")


class VectorPrinter(LeafPrinter):
    signature, number = "GRPO_FAST_INLINE VectorPair", "Floats"
    words, helpers = VECTOR_WORDS, VECTOR_HELPERS

    def constant(self, value: float) -> str:
        return f"splat({float(value)!r}f)"
