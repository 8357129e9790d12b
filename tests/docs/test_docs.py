"""Tests of the documentation.

They check that code blocks run, commands and links exist, tables match the code and the results,
and the API reference is complete. The code of docs/distributed.md must give the gradients of one
process on two ranks.

Every measured figure of README.md must come from a committed file of results. A figure is a number
with a unit of measurement: ×, %, ms, s or MiB. Each of them must be computed by a function of this
file, so that a new figure without results fails. The table of the loss is tested in
tests/benchmarks/test_bench_tool.py.
"""

import importlib
import inspect
import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torch.nn.parallel import DistributedDataParallel

from grpo_fast import __version__, rewards
from grpo_fast.cli import app
from grpo_fast.data.tokenizer import build_bpe_tokenizer
from grpo_fast.objective.advantages import MODES
from grpo_fast.objective.aggregation import AGGREGATIONS
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.train.config import RunConfig, load_recipe, recipe_names
from grpo_fast.train.evaluate import mean_and_error
from grpo_fast.train.plan import plan
from tests import chromium, rank_server
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
    tests/attention/test_trees.py runs the README of attention.
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


RESULTS = ROOT / "benchmarks" / "results"
TEXT = README.read_text()
OURS = "grpo_fast (auto)"
# Figures that describe a task or a setting, and not a measurement.
STATED = {"512 MiB", "50%", "45%"}


def read(name: str) -> Any:
    """Return a file of results. Refuse one that was measured with uncommitted changes."""
    report = json.loads((RESULTS / f"{name}.json").read_text())
    assert "+changes" not in str(report.get("commit")), name
    return report


def gpu_reports(part: str) -> list[dict[str, Any]]:
    return read("gpu_session")["parts"][part]["reports"]


def ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio_to_limit']:.2f}×"


def gpu_case(part: str, shape: list[int]) -> dict[str, Any]:
    """Return the rows of `linear_grpo_loss` that were measured on the H100."""
    return next(
        case["rows"]
        for report in gpu_reports(part)
        for case in report["cases"]
        if case["shape"] == shape and case["operation"] == "linear_grpo_loss"
        and case["active"] == 1 and case["allocator"] != "fair"
    )  # fmt: skip


def share(case: dict[str, Any], ours: str = "grpo_fast", theirs: str = "TRL") -> str:
    return f"{case[ours]['median_ms'] / case[theirs]['median_ms']:.2f}"


def steps(name: str) -> dict[str, dict[str, Any]]:
    return {case["shape"]: case["step"] for case in read(name)["cases"]}


def test_the_table_of_steps():
    loops = [steps(name) for name in ("cpu-loop", "cpu-loop-zen4")]
    update = gpu_reports("step")[0]["providers"]
    expected = [
        ", ".join(share(loop["short"]) for loop in loops),
        ", ".join(share(loop["12-shot"]) for loop in loops),
        share(steps("cpu-loop-real")["short"]),
        share(steps("cpu-loop-real-12shot")["12-shot"]),
        share(update, "shared"),
    ]
    table = rows_of(TEXT, "of GRPO with its rollout")
    assert [row[-1].strip("*") for row in table] == expected


def figures() -> set[str]:
    """Return all figures that the text may contain, computed from the files of results."""
    rows = gpu_case("peers", [8192, 4096, 151936])
    compiled, small = rows["torch.compile"], gpu_case("bars", [1024, 896, 151936])[OURS]
    times = [
        f"{row['median_ms']:.1f} ± {row['spread_ms']:.1f} ms" for row in (rows[OURS], compiled)
    ]
    memory = [f"{compiled['workspace_mib']:,.0f} MiB", f"{rows[OURS]['workspace_mib']:,.0f}"]
    ours = [points[-1]["accuracy"] for points in races("capitals", "grpo_fast")]
    mean, error = mean_and_error([100 * accuracy for accuracy in ours])
    first = races("capitals", "grpo_fast")[0][0]["accuracy"]
    return {*times, *memory, ratio(small), f"{first:.1%}", f"{mean:.1f} ± {error:.1f}%"}


def races(task: str, trainer: str) -> list[list[dict[str, float]]]:
    """Return the evaluations of a trainer in a task of the race, for each seed."""
    cases = read("race")["cases"]
    return [x["points"] for x in cases if (x["task"], x["trainer"]) == (task, trainer)]


def seconds_to(level: float, task: str, trainer: str) -> tuple[str, str]:
    """Return the mean CPU seconds until an accuracy, and how many of the seeds reach it."""
    runs = races(task, trainer)
    reached = [[x["cpu"] for x in run if x["accuracy"] >= level] for run in runs]
    times = [found[0] for found in reached if found]
    return f"{sum(times) / len(times):,.0f}", f"({len(times)} of {len(runs)} seeds"


def test_the_race():
    shown = re.sub(r"[\s*]+", " ", TEXT)
    for task, level in (("capitals", 0.5), ("examples", 0.45)):
        ours, our_seeds = seconds_to(level, task, "grpo_fast")
        theirs, their_seeds = seconds_to(level, task, "TRL")
        assert f"reaches {level:.0%} after {ours} CPU seconds {our_seeds}), and TRL" in shown
        assert re.search(rf"and TRL( 1.16)? after {theirs} {re.escape(their_seeds)}", shown)
    slower, _ = seconds_to(0.5, "capitals", "grpo_fast-recomputing")
    ours, theirs = (
        max(run[-1]["peak"] for run in races("capitals", trainer))
        for trainer in ("grpo_fast-recomputing", "TRL")
    )
    assert f"activations it takes {slower}, and {ours / theirs:.2f} of TRL's memory" in shown


FIGURE = re.compile(r"[\d.,]*\d(?: ± [\d.]+)?(?:×|%| ms\b| MiB\b)")


def test_every_figure_in_the_text_is_computed_from_results():
    prose = "\n".join(line for line in TEXT.splitlines() if not line.startswith("|"))
    found = set(FIGURE.findall(re.sub(r"\s+", " ", prose)))
    assert len(found) >= 7
    assert found - STATED <= figures(), found - STATED - figures()


PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
(CODE,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
LENGTHS = [12, 3, 7, 9, 5, 12, 4, 11]  # tokens of each completion, unequal on the two ranks
PROMPT = 3


def micro_batches(rank: int, ranks: int) -> list[tuple[torch.Tensor, ...]]:
    """Return the completions of one rank in two micro-batches."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(61, (len(LENGTHS), PROMPT + max(LENGTHS)), generator=generator)
    columns = torch.arange(ids.shape[1])
    mask = (columns >= PROMPT) & (columns < PROMPT + torch.tensor(LENGTHS)[:, None])
    advantages = torch.randn(len(LENGTHS), generator=generator)
    share = len(LENGTHS) // ranks
    rows = torch.arange(rank * share, (rank + 1) * share)
    return [(ids[part], mask[part], advantages[part]) for part in rows.chunk(2)]


def gradients(kind: str) -> list[list[float]]:
    """Run the code of the page on this rank, and return the full gradient of each parameter."""
    names: dict[str, Any] = {}
    exec(compile(CODE, PAGE.name, "exec"), names)
    module = names["PolicyLoss"](tiny_model("llama"), names["LossConfig"](loss_type="dapo"))
    policy = module
    if kind == "ddp":
        policy = DistributedDataParallel(module)
    elif kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in module.lm.model.layers:
            fully_shard(layer, mesh=mesh)
        policy = fully_shard(module, mesh=mesh)
    is_alone = kind == "one process"
    rank, ranks = (0, 1) if is_alone else (torch.distributed.get_rank(), 2)
    names["step"](policy, micro_batches(rank, ranks))
    full = (p.grad.full_tensor() if kind == "fsdp2" else p.grad for p in module.parameters())
    return [gradient.flatten().tolist() for gradient in full]


def test_two_ranks_have_the_gradients_of_one_process(tmp_path):
    with rank_server.Ranks(tmp_path) as server:
        found = server(2, [gradients, "ddp"], [gradients, "fsdp2"])
    expected = gradients("one process")
    for ours in (gradient for rank in found for gradient in rank):
        for pair in zip(ours, expected, strict=True):
            torch.testing.assert_close(*map(torch.tensor, pair), rtol=1e-4, atol=1e-7)
