"""Commands that show something and train nothing: `grpo-fast recipes`, `config`, `plan`, `plot`,
`audit`.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from grpo_fast.train.report.endings import USAGE_ERROR, Debug, Worded, Words, key_values, told

views = typer.Typer()


@views.command()
def recipes() -> None:
    """List the recipes: what each trains, its size, its time, what it needs."""
    from grpo_fast.train.config.recipes import recipe_table

    for command, what, size, time, needs in recipe_table():
        typer.echo(f"grpo-fast {command}\n    {what}; {size}; {time}; needs {needs}")


@views.command()
def config(
    section: Annotated[str, typer.Argument(help="A section such as optim, or a key.")] = "",
    debug: Debug = False,
) -> None:
    """List every key of a run's configuration: its type, its default and what it means."""
    from grpo_fast.train.config import RunConfig
    from grpo_fast.train.config.listing import listed_keys

    with told(debug):
        typer.echo("\n".join(listed_keys(RunConfig, section)))


@views.command(cls=Worded)
def plan(
    model: Annotated[str, typer.Argument(help="A recipe, hub id, model's folder, qwen2.5-7b, …")],
    settings: Annotated[
        Words, key_values("gpu=H100 or gpu=141 (GB) prompt=8192 optim.states=8bit …")
    ] = None,
    debug: Debug = False,
) -> None:
    """Predict what fits into memory: tokens per micro-batch under each option, without weights.

    Without gpu=… it plans for this machine: its GPU, or its main memory if it has none.
    """
    from rich.console import Console

    from grpo_fast.train.planning.plan import plan as predict
    from grpo_fast.train.planning.plan import render

    with told(debug):
        Console().print(*render(predict(model, settings or [])), sep="", highlight=False)


@views.command(cls=Worded)
def plot(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... | losses [NAME,...] [KEY=VALUE]...",
            help="Folders of runs, or their metrics.jsonl; or loss types, drawn over the ratio: "
            "losses grpo,cispo,sapo advantage=1,-1 epsilon_low=0.2",
        ),
    ],
    out: Annotated[str | None, typer.Option("-o", "--out", help="A .png, .svg or .pdf.")] = None,
    debug: Debug = False,
) -> None:
    """Draw the curves of runs in one picture, or value and slope of any losses over the ratio."""
    with told(debug, OSError, code=USAGE_ERROR):
        if what[0] == "losses":
            from grpo_fast.train.report.loss_curves import plot_losses

            path = plot_losses(what[1:], os.path.expanduser(out or "losses.png"))
        else:
            from grpo_fast.train.report.curves import plot_runs, usual_picture

            runs = [os.path.expanduser(run) for run in what]
            path = plot_runs(runs, os.path.expanduser(out) if out else usual_picture(runs))
        typer.echo(str(path))


@views.command()
def audit(
    run: Annotated[str, typer.Argument(help="The folder of a run, finished or not.")],
    debug: Debug = False,
) -> None:
    """List how each prompt that a run has drawn ended; status 1 where one was skipped."""
    from grpo_fast.train.runs.audit import audit as follow

    with told(debug):
        prompts = follow(os.path.expanduser(run))
        for line in prompts.lines():
            typer.echo(line)
    sys.exit(1 if prompts.problems else 0)


@views.command(cls=Worded)
def data(
    source: Annotated[str, typer.Argument(help="A file, a folder, or a hub id owner/name.")],
    settings: Annotated[
        Words, key_values("model=MODEL columns={prompt: title, answer: truth} prompt_template=hash")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show a data set as a run reads it: counts, skipped rows, prompts, gold answers."""
    from grpo_fast.data import escape_control
    from grpo_fast.train.evaluation.data_view import data_lines

    with told(debug, OSError):
        typer.echo("\n".join(map(escape_control, data_lines(source, settings or []))))
