"""The documents: the example runs, links lead somewhere, tables say what code and results say."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from grpo_fast import __version__
from grpo_fast.objective.advantages import MODES
from grpo_fast.objective.aggregation import AGGREGATIONS
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES

ROOT = Path(__file__).resolve().parent
while not (ROOT / "pyproject.toml").is_file():
    ROOT = ROOT.parent
README = ROOT / "README.md"
ROOMS = ("objective", "train", "attention", "integrations", "doctor")
PAGES = [
    README,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *(ROOT / "grpo_fast" / room / "README.md" for room in ROOMS),
]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def rows_of(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    lines = text.partition(heading)[2].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    table = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return table


def test_the_readme_opens_the_door():
    text = README.read_text()
    assert len(text.splitlines()) <= 95
    assert "Not measured on a GPU yet" in "\n".join(text.splitlines()[:20])
    for part in ("make demo", "make test", "make bench", "grpo-fast train", "gpu_session.sh"):
        assert part in text, part


def test_badges_and_citation_say_what_the_project_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges, citation = ((ROOT / name).read_text() for name in ("docs/badges.svg", "CITATION.cff"))
    oldest = project["requires-python"].removeprefix(">=")
    assert f">{project['license']}<" in badges and f">{oldest} or newer<" in badges
    assert f"license: {project['license']}\n" in citation
    assert f"version: {__version__}\n" in citation


def test_the_example_runs_as_it_stands(capsys):
    (example,) = blocks(README.read_text(), "python")
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) == 10
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["hidden"].grad.abs().sum() > 0 and names["head"].weight.grad.abs().sum() > 0
    assert "active_tokens': 40.0" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_prose_has_100_columns(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link
    long = [line for line in text.splitlines() if len(line) > 100 and not line.startswith("|")]
    assert not long, long


def test_the_measured_table_is_the_results():
    cases = [
        case
        for name in ("loss", "loss-large", "bf16")
        for case in json.loads((ROOT / f"benchmarks/results/cpu-{name}.json").read_text())["cases"]
    ]
    table = rows_of(README.read_text(), "## Measured")
    assert len(table) == 5
    for what, ours, best in table:
        *shape, last = what.split(", ")
        shape, dtype = [*map(int, shape), int(last.split()[0])], last.split()[1]
        rows = next(c["rows"] for c in cases if c["shape"] == shape and c["dtype"] == dtype)
        timed = {n: r["ratio_to_limit"] for n, r in rows.items() if "ratio_to_limit" in r}
        peers = {n: ratio for n, ratio in timed.items() if rows[n]["role"] == "peer"}
        name = min(peers, key=lambda name: peers[name])
        assert ours.strip("*") == f"{timed['grpo_fast (auto)']:.2f}×", what
        assert best == f"{peers[name]:.2f}× {name}", what


def test_the_table_of_losses_is_the_table_of_the_code():
    text = (ROOT / "grpo_fast" / "objective" / "README.md").read_text()
    listed = {}
    for names, _, aggregation, _ in rows_of(text, "## Losses"):
        listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), aggregation)
    assert listed == {name: objective.aggregation for name, objective in OBJECTIVES.items()}
    for heading, known in (
        ("## KL to a reference", KL_ESTIMATORS),
        ("## Aggregations", AGGREGATIONS),
        ("## Advantages", MODES),
    ):
        names = [re.match(r"`([^`]+)`", row[0])[1] for row in rows_of(text, heading)]
        assert names and set(names) == set(known), heading


def test_every_recipe_is_listed():
    from grpo_fast.train.config.recipes import recipe_names

    text = (ROOT / "grpo_fast" / "train" / "README.md").read_text()
    listed = [row[0].strip("`") for row in rows_of(text, "## Recipes")]
    assert sorted(listed) == recipe_names()
