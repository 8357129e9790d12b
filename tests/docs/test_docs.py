"""Tests of the documentation.

They check that code blocks run, commands and links exist, tables match the code and the results,
and the API reference is complete.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from grpo_fast import __version__, rewards
from grpo_fast.cli import app
from grpo_fast.data.tokenizer import build_bpe_tokenizer
from grpo_fast.objective.advantages import MODES
from grpo_fast.objective.aggregation import AGGREGATIONS
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.train.config import RunConfig, load_recipe, recipe_names
from grpo_fast.train.plan import plan
from tests import chromium
from tests.docs import plain_english
from tests.tiny import TEXTS, tiny_model

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WRITTEN = [page for page in PAGES if "```{readme}" not in page.read_text()]
README = ROOT / "README.md"
ROLLOUT = ROOT / "grpo_fast" / "rollout"
READMES = sorted([README, *(ROOT / "grpo_fast").rglob("README.md")])
OTHERS = [ROOT / x for x in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
# Modules whose __all__ is the public interface.
PUBLIC_MODULES = ("grpo_fast", "grpo_fast.attention", "grpo_fast.rollout", "grpo_fast.rewards")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
NOT_RUN = "# not run: needs "


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


def names_of_rollout() -> dict[str, Any]:
    tokenizer = build_bpe_tokenizer(TEXTS, 300)
    model = tiny_model("llama", vocab_size=len(tokenizer))
    return {"model": model, "prompts": TEXTS[:2], "tokenizer": tokenizer, "score": len}


@pytest.mark.parametrize(
    "page", [p for p in [*WRITTEN, *READMES] if BLOCK.search(p.read_text())], ids=names
)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, capsys):
    """Check that the code blocks run, and the results of some pages.

    The index is only compiled, because it uses the reader's variables.
    tests/attention/test_shared_prompt.py runs the README of attention.
    """
    known: dict = names_of_rollout() if page.parent == ROLLOUT else {}
    blocks = BLOCK.findall(page.read_text())
    for block in blocks:
        code = compile(block, page.name, "exec")
        is_run = page.stem != "index" and page.parent.name != "attention"
        if is_run and not block.startswith(NOT_RUN):
            exec(code, known)
    if page == README:
        (example,) = [block for block in blocks if not block.startswith(NOT_RUN)]
        assert len([line for line in example.splitlines() if line.strip()]) <= 12
        assert known["hidden"].grad.abs().sum() > 0 and known["head"].weight.grad.abs().sum() > 0
        assert "active_tokens': 40.0" in capsys.readouterr().out
    if page.parent == ROLLOUT:
        done = known["done"]
        assert len(known["rewards"]) == 16 and done.group.tolist() == [0] * 8 + [1] * 8
        assert len(done.support.offsets) == len(done.logps) + 1


def test_the_notebook_runs(tmp_path, monkeypatch):
    """Check that the quickstart notebook runs when it is limited to two training steps.

    `make notebook` runs all steps.
    """
    IPython = pytest.importorskip("IPython", reason="the extra docs brings ipykernel")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the notebook's folder of the run
    monkeypatch.setattr(IPython.display, "Image", lambda filename: Path(filename).read_bytes()[:4])
    cells = json.loads((DOCS / "quickstart.ipynb").read_text())["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    assert code.count("steps=200") == 1 and not any(c.get("outputs") for c in cells)
    exec(compile(code.replace("steps=200", "steps=2"), "quickstart.ipynb", "exec"), {})


def documented() -> list[str]:
    """Return the full names of all objects that the API reference documents."""
    text = (DOCS / "api.md").read_text()
    listed = re.findall(r"\.\. auto(?:function|class|exception|data):: (\S+)", text)
    for module, options in re.findall(r"\.\. automodule:: (\S+)\n((?:   :.*\n)*)", text):
        chosen = re.search(r":members:(?: (.+))?", options)
        if chosen:
            loaded = importlib.import_module(module)
            own = chosen[1].split(", ") if chosen[1] else getattr(loaded, "__all__", None) or [
                name for name, value in vars(loaded).items()
                if callable(value) and not name.startswith("_") and value.__module__ == module
            ]  # fmt: skip
            listed += [f"{module}.{name}" for name in own]
    return listed


def test_the_reference_is_complete():
    """Check that it has all public names, all names that pages import, and all built-in rewards."""
    listed, shown = {*documented()}, set()
    for page in [*WRITTEN, *READMES]:
        blocks = "\n".join(BLOCK.findall(page.read_text()))
        for module, what in re.findall(r"^from (grpo_fast\S*) import ([^#\n]+)", blocks, re.M):
            words = re.findall(r"(\w+)(?: as \w+)?", what)
            shown |= {f"{module}.{word}" for word in words}
    assert len(shown) > 8
    for name in PUBLIC_MODULES:
        module = importlib.import_module(name)
        shown |= {f"{name}.{public}" for public in module.__all__}
        for value in (getattr(module, public) for public in module.__all__):
            is_documentable = inspect.isroutine(value) or inspect.isclass(value)
            assert not is_documentable or (value.__doc__ or "").strip(), f"{value}: no docstring"
    assert not shown - listed
    assert not {*rewards.KNOWN} - {name.rpartition(".")[2] for name in listed}


def test_every_command_that_is_shown_exists():
    commands = set(typer.main.get_command(app).commands)
    seen = set()
    for page in [*WRITTEN, *READMES]:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^grpo-fast (.+)$", text, re.M):
            command, *words = line.split("#")[0].split()
            assert command in commands, f"{page.name}: {line}"
            seen.add(command)
            if command == "plan":
                plan(words[0], words[1:])  # raises an error for an invalid setting
            if command == "train" and words and words[0] in recipe_names() and "'" not in line:
                local = [w for w in words[1:] if "=" in w and not w.startswith(("data=", "model="))]
                load_recipe(words[0], local)  # raises an error for an invalid key or value
    assert {"train", "eval", "plan", "plot", "doctor"} <= seen


KEY = re.compile(r"[`'\s]([a-z_]+\.[a-z_0-9.]*(?:\{[a-z_, ]+\}|[a-z_0-9]))(?=[`=:])")


def is_unknown(key: str) -> bool:
    """Return True if the configuration has no setting with this dotted key."""
    try:
        load_recipe("sort", [f"{key}=null"])
    except ValueError as error:
        return "unknown key" in str(error)
    return False


def test_every_key_that_is_named_exists():
    seen, missing = set(), []
    pages = [*WRITTEN, *READMES, ROOT / "CONTRIBUTING.md", *(ROOT / "benchmarks").rglob("*.md")]
    for page in pages:
        for found in KEY.findall(page.read_text()):
            head, _, tail = found.partition("{")
            for key in [head + last.strip() for last in tail.rstrip("}").split(",")]:
                section, last = key.split(".")[0], key.rpartition(".")[2]
                if section in RunConfig.model_fields and last != "py":
                    seen.add(key)
                    missing += [f"{page.name}: {key}"] * is_unknown(key)
    assert not missing and len(seen) > 40


@pytest.mark.parametrize("page", [*WRITTEN, *READMES, *OTHERS], ids=names)
def test_links_lead_somewhere_and_prose_has_100_columns(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r"\{download\}`([^`]+)`", text):
        assert link.startswith("http") or (page.parent / link).exists(), link
    for listed in re.findall(r"```\{toctree\}\n(.*?)```", text, re.S):
        for entry in listed.split("\n"):
            target = entry.partition("<")[2].rstrip(">") or entry
            assert not entry or entry.startswith(":") or (DOCS / f"{target}.md").is_file(), entry
    lines = [] if page in WRITTEN else text.splitlines()
    assert not [line for line in lines if len(line) > 100 and not line.startswith("|")]


def test_every_folders_readme_is_a_page_and_none_is_copied():
    stated = {p: re.search(r"```\{readme\} (\S+)", p.read_text()) for p in PAGES}
    targets = {(DOCS / found[1]).resolve() for found in stated.values() if found}
    assert {*READMES} - {README} <= targets
    assert all(target.is_file() for target in targets)


@pytest.mark.parametrize("name", ["index", "quickstart", "losses", "trainer"])
def test_no_page_scrolls_sideways_and_the_scheme_is_the_readers(tmp_path, name):
    page = DOCS / "_build" / "html" / f"{name}.html"
    if not chromium.COMMAND or not page.is_file():
        pytest.skip("needs Chromium, and the site built by `make docs`")
    right = "page => page.querySelector('table')?.getBoundingClientRect().right ?? 0"
    measured = [x for y in chromium.SCHEMES for x in chromium.measured(tmp_path, page, y, right)]
    for width, fits, _, edge in measured:
        # The table of losses must not be cut off at the edge of the page.
        assert fits and (name != "losses" or 0 < edge <= width), (width, edge)
    assert len({color for _, _, color, _ in measured}) == 2


# ----------------------------------------------------------
# tests of the READMEs
def rows_of(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading, without its header row."""
    lines = text.partition(heading)[2].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 1 :])
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_the_readme_is_short_and_names_the_commands():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    assert "**One GPU so far.**" in text and "**No training run was made on a\n  GPU yet**" in text
    for part in ("make demo", "make test", "make bench", "grpo-fast train", "gpu_session.sh"):
        assert part in text, part


def test_badges_and_citation_say_what_the_project_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges, citation = ((ROOT / name).read_text() for name in ("docs/badges.svg", "CITATION.cff"))
    oldest = project["requires-python"].removeprefix(">=")
    assert f">{project['license']}<" in badges and f">{oldest} or newer<" in badges
    assert f"license: {project['license']}\n" in citation
    assert f"version: {__version__}\n" in citation


def test_the_tables_of_losses_and_recipes_are_those_of_the_code():
    text = (ROOT / "grpo_fast" / "objective" / "README.md").read_text()
    listed = {}
    for names, _, aggregation, _ in rows_of(text, "## Losses"):
        listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), aggregation)
    assert listed == {name: objective.aggregation for name, objective in OBJECTIVES.items()}
    tables = {"KL to a reference": KL_ESTIMATORS, "Aggregations": AGGREGATIONS, "Advantages": MODES}
    for heading, known in tables.items():
        names = [re.match(r"`([^`]+)`", row[0])[1] for row in rows_of(text, f"## {heading}")]
        assert names and set(names) == set(known), heading
    text = (ROOT / "grpo_fast" / "train" / "README.md").read_text()
    listed = [row[0].strip("`") for row in rows_of(text, "## Recipes")]
    assert sorted(listed) == recipe_names()


def test_texts_have_none_of_the_old_constructions():
    """Check that docstrings, comments and messages have none of the texts in plain_english.OLD."""
    lines = plain_english.found_in(ROOT / folder for folder in plain_english.FOLDERS)
    assert not lines, "\n".join(lines)
