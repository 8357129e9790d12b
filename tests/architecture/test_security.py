"""Tests that untrusted data is not executed or unpickled, and cannot stall a regular expression.

Run names and control characters are tested in tests/train/test_report.py and test_hostile_input.py.
"""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for room in ("grpo_fast", "benchmarks") for p in (ROOT / room).rglob("*.py"))

MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "sympy", "jsonpickle", "joblib"}
CALLS = {
    *("eval", "exec", "__import__"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("torch.save", "torch.jit.load", "torch.package.PackageImporter"),  # these use pickle
    *(f"yaml.{name}" for name in ("load", "load_all", "unsafe_load", "full_load", "dump")),
    *(f"torch.distributed.{name}_object" for name in ("all_gather", "gather", "send", "recv")),
    *(f"torch.distributed.{name}_object_list" for name in ("broadcast", "scatter", "send", "recv")),
}
ARGUMENTS = {
    ("shell", True), ("weights_only", False), ("trust_remote_code", True), ("allow_pickle", True),
    ("safe_serialization", False), ("use_safetensors", False),
}  # fmt: skip
# Allowed uses of forbidden functions: (file, function) and the reason why the use is safe.
RANKS = "grpo_fast/train/ranks/distributed.py"
ALLOWED = {
    (RANKS, "torch.distributed.all_gather_object"): "between the processes of one launch",
    (RANKS, "torch.distributed.broadcast_object_list"): "the same",
    ("grpo_fast/rewards/workers/answer.py", "exec"): "an answer's code, in the sandbox",
    ("grpo_fast/rewards/workers/judge.py", "exec"): "the tests of an answer, in the sandbox",
    ("grpo_fast/train/config/plain.py", "yaml.dump"): "with a SafeDumper that quotes more",
}


class Hit(NamedTuple):
    what: str
    line: int


def names_of(tree: ast.AST) -> dict[str, str]:
    """Return a dictionary from every name that a file imports to the full name."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    first, dot, rest = ast.unparse(node).partition(".")
    return (names.get(first, first) + dot + rest).removeprefix("builtins.")


def is_weights_only(call: ast.Call) -> bool:
    given = {keyword.arg: keyword.value for keyword in call.keywords}.get("weights_only")
    return isinstance(given, ast.Constant) and given.value is True


def hits(source: str) -> Iterator[Hit]:
    """Yield every forbidden call, argument and import in the source code of a module."""
    tree = ast.parse(source)
    names = names_of(tree)
    for module in {x.split(".")[0] for x in names.values()} & MODULES:
        yield Hit(module, 0)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = full_name(node.func, names)
        if name in CALLS or (name == "torch.load" and not is_weights_only(node)):
            yield Hit(name, node.lineno)
        for keyword in node.keywords:
            value = getattr(keyword.value, "value", None)
            if (keyword.arg, value) in ARGUMENTS:
                yield Hit(f"{keyword.arg}={value}", node.lineno)


def test_nothing_forbidden_is_called_but_what_is_allowed():
    found = [(str(p.relative_to(ROOT)), hit) for p in SOURCES for hit in hits(p.read_text())]
    assert not [(file, hit) for file, hit in found if (file, hit.what) not in ALLOWED]
    assert {(file, hit.what) for file, hit in found} == ALLOWED.keys(), "an allowed use is gone"


@pytest.mark.parametrize(
    "source",
    [
        "eval('1')", "from builtins import exec as run; run('1')",
        "import builtins; builtins.eval('1')", "from os import system; system('ls')",
        "import pickle", "def f():\n    from pickle import loads", "import yaml as y; y.load(text)",
        "import torch; torch.load(path)",
        "from torch import load; load(path, weights_only=allowed)",
        "import torch; torch.load(path, weights_only=False)",
        "from torch import distributed; distributed.all_gather_object(x, y)",
        "import torch.distributed as dist; dist.broadcast_object_list(x)",
        "subprocess.run(line, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "from sympy.parsing import sympy_parser", "numpy.load(path, allow_pickle=True)",
    ],
)  # fmt: skip
def test_the_scan_finds(source):
    assert list(hits(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import torch; torch.load(path, weights_only=True)",
        "import yaml; yaml.safe_load(text)",
        "subprocess.run(line, shell=False)",
        "AutoModel.from_pretrained(path, trust_remote_code=config.trust_remote_code)",
    ],
)
def test_the_scan_passes(source):
    assert not list(hits(source))


# ---------------------------------------------------------- regular expressions
LENGTH, SECONDS = 1 << 16, 0.05
# Modules that compile patterns from a configuration, with the reason why this is safe.
GIVEN = {"grpo_fast.rewards.workers.pattern": "a recipe's, in a process that a timeout ends"}
UNITS = (
    *("1", "1,", "1.", ",", ".", "-", "-$", "$", "-1", "a", "a1", " ", "\t", "\n", " \n"),
    *("<<", "<<a", ">>", "<<1>>", "<", "####", "#### ", "<answer>", "</answer>", "`", "```"),
    *(
        "vendor_id", "vendor_id ", "vendor_id\n", "vendor_id :", "\u2212", "\u0661", "\x00",
        "\ud800",
    ),
)  # fmt: skip


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield the location and the pattern of every regular expression in the package.

    The patterns are module globals and constants in calls of functions of `re`.
    """
    for path in sorted((ROOT / "grpo_fast").rglob("*.py")):
        tree = ast.parse(path.read_text())
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        top = {id(x.value): x.targets[0].id for x in tree.body if isinstance(x, ast.Assign)
               and isinstance(x.targets[0], ast.Name)}  # fmt: skip
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not full_name(node.func, {}).startswith("re."):
                continue
            where = f"{module}:{node.lineno}"
            if id(node) in top:
                yield where, getattr(importlib.import_module(module), top[id(node)])
            elif node.func.attr != "escape" and module not in GIVEN:
                text = ast.literal_eval(node.args[0])  # fails if the pattern is not a constant
                flags = re.MULTILINE if "MULTILINE" in ast.unparse(node) else 0
                yield where, re.compile(text, flags)


PATTERNS = list(patterns())


def test_the_patterns_are_found():
    from grpo_fast.data import answers

    assert answers._NUMBER_IN_TEXT in [pattern for _, pattern in PATTERNS]
    assert len(PATTERNS) >= 7


def seconds(pattern: re.Pattern[str], text: str) -> float:
    """Return the CPU time of this thread for matching `text` in three ways.

    Unlike the elapsed time, the CPU time does not depend on the load of the machine.
    """
    start = time.thread_time()
    pattern.match(text), pattern.fullmatch(text), pattern.findall(text)
    return time.thread_time() - start


@pytest.mark.parametrize(("where", "pattern"), PATTERNS, ids=[where for where, _ in PATTERNS])
def test_a_pattern_is_linear_in_hostile_text(where, pattern):
    for unit in UNITS:
        for text in (unit * (LENGTH // len(unit)), "1" + unit * (LENGTH // len(unit)) + "!"):
            is_quick = any(seconds(pattern, text) <= SECONDS for _ in range(3))
            assert is_quick, f"{where}: {unit!r}"


def test_a_pattern_that_backtracks_would_be_seen():
    assert seconds(re.compile(r"(?:a+b?)+c"), "a" * 24) > SECONDS
