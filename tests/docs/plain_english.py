"""Search docstrings, comments and messages for constructions of our old compressed style.

    python -m tests.docs.plain_english [PATH ...]

The command prints the place, the text and a better wording of each construction. Its exit status is
1 if it finds one.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

# Map from old constructions (patterns that match lower-case text) to the words to use instead.
OLD = {
    r"\bbeside\b": "together with, next to, with",
    r"\bbehind\b": "after",
    r"\bdoors?\b": "entry point, function, interface",
    r"\bgo(?:es)? by\b": "uses the … implementation",
    r"\bhand(?:s|ed)? on\b": "passes",
    r"\bis whole\b|\bthe whole head\b": "is unsharded, the full LM head",
    r"\bof (?:one's|its|their|our|your) own\b": "custom, its, separate",
    r"\basks nobody\b|\bis asked for\b|\bare asked for\b": "is requested",
    r"\bwants? a gradient\b": "requires grad",
    r"\blies? in\b|\bstands? in\b": "is in, is defined in",
    r"\bis there\b|\bare there\b": "exists, is available",
    r"\bby hand of\b|\bis made of\b|\bare made of\b": "is computed from, is built from",
    r"\bof no\b": "without",
    r"\bshall\b": "must, or the present tense",
    r"\bare no rows\b|\bis no row\b": "are excluded",
    r"\bfor ever\b": "forever",
    r"\bhalf of what\b|\bas it is\b": "unchanged",
}
ANY = re.compile("|".join(OLD))  # one search is faster than one for each pattern
OPENINGS = ("what", "whether", "where", "of", "how", "which", "as", "those", "that")
# Functions whose string arguments are messages. Calls of exception classes need no entry, because
# their names end in "Error".
MESSAGES = "require", "conflict", "argument_error", "choice", "number", "warn", "warning", "info"
FOLDERS = "grpo_fast", "csrc", "benchmarks", "tests"
KINDS = {".py", ".h", ".cpp", ".yaml", ".sh"}


def texts(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, text) for every docstring, comment and message in a file."""
    source = path.read_text()
    if path.suffix != ".py":
        pattern = r"//\s?(.*)" if path.suffix in (".h", ".cpp") else r"^\s*#\s?(.*)"
        for number, line in enumerate(source.splitlines(), 1):
            for comment in re.findall(pattern, line):
                yield number, "comment", comment
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], "comment", token.string.lstrip("# ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield getattr(node, "lineno", 1), "docstring", ast.get_docstring(node) or ""
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in MESSAGES or called.endswith("Error"):
                for part in ast.walk(node):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.lineno, "message", part.value


def found(path: Path) -> Iterator[str]:
    """Search the docstrings, comments and messages of a file for the constructions in `OLD`.

    Yield one report line for each construction that is found, with its place and a better wording.
    """
    for line, kind, text in texts(path):
        small = " ".join(text.lower().split())
        for pattern, better in OLD.items() if ANY.search(small) else ():
            for match in re.finditer(pattern, small):
                around = small[max(0, match.start() - 40) : match.end() + 40]
                yield f"{path}:{line}: {kind}: {match[0]!r} ({better}): …{around}…"
        if kind == "docstring" and small.split(" ")[0].strip(",;:.") in OPENINGS:
            yield f"{path}:{line}: docstring begins with {text.split()[0]!r}: {small[:80]}"


def found_in(roots: Iterable[Path]) -> list[str]:
    """Return the report lines of `found` for all files in `roots`, which may contain folders."""
    paths = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*"))]
    return [line for path in sorted(paths) if path.suffix in KINDS for line in found(path)]


def main() -> int:
    lines = found_in(map(Path, sys.argv[1:] or FOLDERS))
    print(*lines, sep="\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
