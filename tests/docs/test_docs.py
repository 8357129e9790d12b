"""The pages of docs/: code runs, commands exist, and the reference leaves nobody out."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import get_args, get_origin

import pytest

from grpo_fast.train.config import RunConfig
from tests import chromium

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WRITTEN = [page for page in PAGES if "```{readme}" not in page.read_text()]
READMES = sorted([ROOT / "README.md", *(ROOT / "grpo_fast").rglob("README.md")])
# The doors of the package: all that their __all__ names is public.
DOORS = ("grpo_fast", "grpo_fast.attention", "grpo_fast.rollout", "grpo_fast.rewards")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
NOT_RUN = "# not run: needs "


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in WRITTEN if "```python" in p.read_text()], ids=names)
def test_the_code_of_a_page_runs_from_top_to_bottom(page):
    blocks = BLOCK.findall(page.read_text())
    assert blocks
    known: dict = {}
    if page.stem == "index":  # names of the reader's own stand there
        blocks = [f"{NOT_RUN}them\n{block}" for block in blocks]
    for block in blocks:
        code = compile(block, page.name, "exec")
        if not block.startswith(NOT_RUN):
            exec(code, known)


def test_the_notebook_runs(tmp_path, monkeypatch):
    """With two steps; `make notebook` runs it as it stands."""
    IPython = pytest.importorskip("IPython", reason="the extra docs brings ipykernel")
    monkeypatch.setattr(IPython.display, "Image", lambda filename: Path(filename).read_bytes()[:4])
    cells = json.loads((DOCS / "quickstart.ipynb").read_text())["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    assert code.count("steps=200") == 1 and not any(c.get("outputs") for c in cells)
    exec(compile(code.replace("steps=200", "steps=2"), "quickstart.ipynb", "exec"), {})


def documented() -> str:
    """What the reference lists, one full name a line."""
    text = (DOCS / "api.md").read_text()
    listed = re.findall(r"\.\. auto(?:function|class|exception|data):: (\S+)", text)
    for module, options in re.findall(r"\.\. automodule:: (\S+)\n((?:   :.*\n)*)", text):
        if ":members:" not in options:
            continue
        chosen = re.search(r":members: (.+)", options)
        door = importlib.import_module(module)
        own = chosen[1].split(", ") if chosen else getattr(door, "__all__", None) or [
            name for name, value in vars(door).items()
            if callable(value) and not name.startswith("_") and value.__module__ == module
        ]  # fmt: skip
        listed += [f"{module}.{name}" for name in own]
    return "\n".join(listed)


@pytest.mark.parametrize("door", DOORS)
def test_the_reference_has_every_public_name(door):
    module, listed = importlib.import_module(door), documented().splitlines()
    missing = [name for name in module.__all__ if f"{door}.{name}" not in listed]
    assert not missing
    silent = [
        name for name in module.__all__
        if inspect.isroutine(value := getattr(module, name)) or inspect.isclass(value)
        if not (value.__doc__ or "").strip()
    ]  # fmt: skip
    assert not silent, "no docstring"


def test_the_reference_has_every_name_that_a_page_imports():
    """What a document shows is public, wherever it lies."""
    listed = documented().splitlines()
    shown = set()
    for page in [*WRITTEN, *READMES]:
        for block in BLOCK.findall(page.read_text()):
            for module, what in re.findall(r"^from (grpo_fast\S*) import (.+)$", block, re.M):
                words = what.split("#")[0].strip("() ").split(",")
                shown |= {(module, word.split(" as ")[0].strip()) for word in words}
    assert len(shown) > 8
    assert not [f"{m}.{n}" for m, n in sorted(shown) if n and f"{m}.{n}" not in listed]


def test_every_name_of_the_reference_is_there():
    for full in documented().splitlines():
        module, _, name = full.rpartition(".")
        if any(part in full for part in ("integrations.trl", "openrlhf", "lightning", "verl")):
            continue  # their trainers may not be installed
        assert hasattr(importlib.import_module(module), name), full


def test_the_reference_has_every_built_in_reward():
    from grpo_fast.rewards import REWARDS, WORKERS

    listed = {name.rpartition(".")[2] for name in documented().splitlines()}
    assert {*REWARDS, *WORKERS} <= listed


def test_every_command_that_is_shown_exists():
    import typer.main

    from grpo_fast.cli import app
    from grpo_fast.train.config.recipes import load_recipe, recipe_names

    commands = set(typer.main.get_command(app).commands)
    seen = set()
    for page in [*WRITTEN, *READMES]:
        for line in re.findall(r"^grpo-fast (.+)$", page.read_text(), re.M):
            command, *words = line.split("#")[0].split()
            assert command in commands, f"{page.name}: {line}"
            seen.add(command)
            if command == "train" and words and words[0] in recipe_names() and "'" not in line:
                local = [w for w in words[1:] if "=" in w and not w.startswith(("data=", "model="))]
                load_recipe(words[0], local)  # every key and value fits
    assert {"train", "eval", "plan", "plot", "compare", "doctor"} <= seen


KEY = re.compile(r"[`'\s]([a-z_]+\.[a-z_0-9.]*(?:\{[a-z_, ]+\}|[a-z_0-9]))(?=[`=:])")


def has_key(model: object, key: list[str]) -> bool:
    """Whether `key` leads somewhere below a type of the configuration."""
    if not key:
        return True
    fields = getattr(model, "model_fields", None)
    if fields is not None:
        return key[0] in fields and has_key(fields[key[0]].annotation, key[1:])
    inner = [kind for kind in get_args(model) if kind is not type(None)]
    # an element's number in a list; free names in a dict
    key = key[1:] if get_origin(model) is list and key[0].isdigit() else key
    return get_origin(model) is dict or any(has_key(kind, key) for kind in inner)


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
                    missing += [f"{page.name}: {key}"] * (not has_key(RunConfig, key.split(".")))
    assert not missing and len(seen) > 50


@pytest.mark.parametrize("page", WRITTEN, ids=names)
def test_the_links_of_a_page_lead_somewhere(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r"\{download\}`([^`]+)`", text):
        assert link.startswith("http") or (DOCS / link).exists(), link
    for listed in re.findall(r"```\{toctree\}\n(.*?)```", text, re.S):
        for entry in listed.split("\n"):
            page = entry.partition("<")[2].rstrip(">") or entry
            assert not entry or entry.startswith(":") or (DOCS / f"{page}.md").is_file(), entry


def test_every_folders_readme_is_a_page_and_none_is_copied():
    stated = {p: re.search(r"```\{readme\} (\S+)", p.read_text()) for p in PAGES}
    targets = {(DOCS / found[1]).resolve() for found in stated.values() if found}
    assert {p for p in READMES if p != ROOT / "README.md"} <= targets
    assert all(target.is_file() for target in targets)


def test_no_page_scrolls_sideways_and_the_scheme_is_the_readers(tmp_path):
    """Of the site as `make docs` built it, before this."""
    built = DOCS / "_build" / "html"
    if not chromium.COMMAND or not built.is_dir():
        pytest.skip("needs Chromium, and the site built by `make docs`")
    with chromium.browser(tmp_path) as browser:
        for page in ("index", "quickstart", "losses", "trainer"):
            for width in (390, 1280):
                seen = set()
                for scheme in ("light", "dark"):
                    browser.open(built / f"{page}.html", width, scheme)
                    size = browser.call("Page.getLayoutMetrics")["cssContentSize"]
                    assert size["width"] == width, page
                    color = "getComputedStyle(document.body).backgroundColor"
                    seen.add(browser.evaluate(color))
                assert len(seen) == 2, page
