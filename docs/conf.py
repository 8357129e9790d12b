"""Sphinx configuration of the documentation site.

A page with the line ```{readme} path``` shows the README at that path. Links in the README to other
pages are rewritten. Links to files that are not on the site become plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

import grpo_fast  # noqa: E402

project, author = "grpo_fast", "the grpo_fast authors"
project_copyright = "the grpo_fast authors, Apache-2.0"
version = release = grpo_fast.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"grpo_fast {release}"
html_static_path, html_css_files = ["_static"], ["site.css"]
pygments_dark_style = "github-dark"
html_show_sourcelink = False
html_copy_source = False
exclude_patterns = ["_build", "*.ipynb"]
highlight_language = "none"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
suppress_warnings = ["myst.header"]  # a README may begin with a heading of level 2
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_mock_imports = ["verl", "openrlhf", "lightning", "prime_rl", "tensordict"]
napoleon_use_rtype = False
napoleon_use_ivar = True
# Headings of the groups of fields in the docstring of LossConfig.
GROUPS = (
    "Objective", "KL to the reference", "Logits", "Filters and corrections", "Entropy",
    "Options of single losses",
)  # fmt: skip
napoleon_custom_sections = [(group, "params_style") for group in GROUPS]

README = re.compile(r"```\{readme\} (\S+)\n```\n")
WORD_CELL = re.compile(r"(?<=\| )\w+(?= \|)")  # cell of a table that holds one word
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def pages() -> dict[str, str]:
    """Return a dictionary from the path of a README, relative to the root, to its page."""
    found = {}
    for page in sorted(DOCS.glob("*.md")):
        stated = README.search(page.read_text(encoding="utf-8"))
        if stated:
            found[posixpath.normpath(posixpath.join("docs", stated[1]))] = page.name
    return found


def turned(text: str, folder: str) -> str:
    """Return the text of a README with links that work on the site.

    `folder` is the README's folder relative to the root.
    """
    known = pages()

    def turn(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        path, hash_, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if mark:
            return f"![{words}]({os.path.relpath(ROOT / path, DOCS)})"
        if path in known:
            return f"[{words}]({known[path]}{hash_}{anchor})"
        if path.startswith("docs/") and path.endswith(".md"):
            return f"[{words}]({path.removeprefix('docs/')}{hash_}{anchor})"
        return words if words.startswith("`") else f"{words} (`{path}`)"

    return LINK.sub(turn, text)


def put_readme(app: object, docname: str, source: list[str]) -> None:
    """Replace a `{readme}` line by the text of the README (Sphinx event "source-read")."""

    def read(stated: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", stated[1]))
        text = turned((ROOT / path).read_text(encoding="utf-8"), posixpath.dirname(path))
        # On a telephone, a long name in a cell may break after an underscore.
        return WORD_CELL.sub(lambda cell: cell[0].replace("_", "_<wbr>"), text)

    source[0] = README.sub(read, source[0])


def plain_text(app: object, what: str, name: str, obj: object, options: object, lines: list[str]):
    """Escape the markup in a docstring, except in literal blocks and examples.

    Docstrings are plain text in which only `names` are marked up.
    """
    is_literal = False
    for number, line in enumerate(lines):
        if line and not line.startswith(" "):
            is_literal = False
        if not (is_literal or line.lstrip().startswith((">>>", "..."))):
            parts = line.split("`")
            for place, part in enumerate(parts):
                if place % 2 == 0:
                    parts[place] = re.sub(r"([\\*|]|(?<=\w)_(?!\w))", r"\\\1", part)
            lines[number] = "``".join(parts) if len(parts) % 2 else line.replace("`", "'")
        if line.endswith("::"):
            is_literal = True
        if line in GROUPS:
            lines[number] += ":"


def setup(app: object) -> None:
    app.connect("source-read", put_readme)
    app.connect("autodoc-process-docstring", plain_text, priority=100)  # napoleon's is 500
