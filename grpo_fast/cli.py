"""The command-line program `grpo-fast`.

The commands are train, eval, export, doctor, bench, recipes, config, plan, plot and data. Each
command imports its modules only when it runs, so that `--help` and usage errors appear at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="grpo-fast",
    help="GRPO training of language models on a fused loss.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


USAGE_ERROR, RUN_ERROR, INTERRUPTED = 2, 1, 130
Words = list[str] | None  # the arguments `key=value` of a command
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from grpo_fast import __version__

        typer.echo(f"grpo-fast {__version__}")
        raise typer.Exit()


def _print_lines(*lines: str) -> None:
    # Escape control characters, because a completion could contain commands for the terminal.
    from grpo_fast.errors import escape_control

    for line in lines:
        typer.echo(escape_control(line))


def _launched_rank() -> str:
    """Return the rank that the launcher assigned, which is known even without a process group."""
    return os.environ.get("RANK") or "0"


def key_values(example: str) -> Any:
    """Declare the `key=value` arguments of a typer command, with an example as the help text."""
    return typer.Argument(metavar="[KEY=VALUE]...", help=example)


@contextlib.contextmanager
def print_errors(debug: bool, *failures: type[Exception], code: int = RUN_ERROR) -> Iterator[None]:
    """Print an error raised in this context as one line on stderr, and exit with a status code.

    For a ValueError the status is USAGE_ERROR, because the user can correct the cause. For an
    unexpected error the line includes the class of the error.

    Args:
        debug: True also prints the traceback.
        *failures: further expected classes of errors, which exit with the status `code`.
        code: exit status for `failures`.
    """
    try:
        yield
    except ValueError as error:
        refuse(error, debug)
    except failures as error:
        refuse(error, debug, code)
    except KeyboardInterrupt as error:
        refuse(error, debug, INTERRUPTED, "interrupted")
    except ModuleNotFoundError:  # `grpo_fast.__main__` tells the user which extra to install
        raise
    except Exception as error:
        refuse(error, debug, RUN_ERROR, f"unexpected {type(error).__name__}: ")


def refuse(
    error: BaseException, debug: bool | None = None, code: int = USAGE_ERROR, start: str = ""
) -> NoReturn:
    """Print an error and its notes as one line without control characters, and exit.

    Args:
        error: the error.
        debug: True also prints the traceback. None means that the command has no option --debug.
        code: the exit status.
        start: text before the message.
    """
    from grpo_fast.errors import escape_control

    if debug:
        typer.echo(escape_control("".join(traceback.format_exception(error))), err=True)
    shown = "; ".join([start + str(error), *getattr(error, "__notes__", ())])
    rank = _launched_rank()
    shown = shown if rank == "0" else f"rank {rank}: {shown}"
    hint = "  (--debug shows where)" if debug is False else ""
    typer.echo(f"grpo-fast: {escape_control(shown)}{hint}", err=True)
    sys.exit(code)


Version = Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version)]


@app.callback()
def main(version: Version = False) -> None:
    """Define the options that `grpo-fast` accepts without a command, such as --version."""


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe (sort, gsm8k-tiny, …) or a YAML file.")],
    settings: Annotated[
        Words, key_values("Changes to the recipe: steps=50 optim.lr=1e-4 …")
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a model with a recipe. Write metrics, curves and the model to the recipe's output_dir.

    `grpo-fast config` lists all keys.
    """
    from grpo_fast.errors import SAVED, RunError, Stopped
    from grpo_fast.train import loop
    from grpo_fast.train.config import load_recipe, recipe_names
    from grpo_fast.train.folder import free_folder

    with print_errors(debug, RunError):
        words = settings or []
        config = load_recipe(recipe, words)
        says_where = config.resume == "auto" or any(w.startswith("output_dir=") for w in words)
        if recipe in recipe_names() and not says_where:
            usual = config.output_dir
            config.output_dir = str(free_folder(usual))
            if config.output_dir != usual and _launched_rank() == "0":
                typer.echo(f"{usual} holds another run; this run goes to {config.output_dir}")
        try:
            loop.train(config)
        except Stopped as stopped:
            # The first signal has stopped the run. Restore the default action of SIGINT, so that a
            # second Ctrl-C ends the process at once, even while Python shuts down.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if stopped.code != SAVED and _launched_rank() == "0":
                typer.echo(f"{stopped.name}: ended before there was anything to save", err=True)
            raise


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A model's folder or hub id, or a run's folder.")],
    settings: Annotated[
        Words,
        key_values(
            "recipe=NAME data=FILE|FOLDER|HUB_ID task=gsm8k n=200 samples=8 temperature=0.7 "
            "max_new_tokens=300 out=metrics.json"
        ),
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Run code that the model or recipe names.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Measure the accuracy of a model on held-out questions.

    The answers are decoded greedily. With samples=N, answers are also sampled for pass@k and maj@k.
    """
    from grpo_fast.errors import RunError
    from grpo_fast.train.evaluate import run_eval

    with print_errors(debug, RunError, OSError):
        run_eval(model, settings or [], allow_code=allow_code, say=_print_lines)


@app.command()
def export(
    checkpoint: Annotated[
        str, typer.Argument(help="A run's folder (its newest checkpoint) or a checkpoint.")
    ],
    out: Annotated[str, typer.Argument(help="A new folder.")],
    debug: Debug = False,
) -> None:
    """Export the model of a checkpoint in transformers format. A LoRA adapter is merged."""
    from grpo_fast.errors import RunError
    from grpo_fast.train.checkpoint import export as write

    with print_errors(debug, RunError, OSError):
        typer.echo(str(write(os.path.expanduser(checkpoint), os.path.expanduser(out))))


@app.command()
def doctor(
    words: Annotated[
        Words,
        typer.Argument(
            metavar="[MODEL] [URL] [KEY=VALUE]...",
            help="recipe=NAME n=8 samples=2 tokens=32 threshold=0.001 "
            "rollout.temperature=0.7 model.dtype=bfloat16 …",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Test this machine. With a model, compare the log-probs of its sampler and trainer.

    The exit status is 1 if a self-test fails, or if the mean difference of the log-probs exceeds
    the threshold.
    """
    with print_errors(debug, RuntimeError, OSError):
        from grpo_fast.doctor.command import run

        ok = run(words or [])
    sys.exit(0 if ok else 1)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)
def bench(context: typer.Context) -> None:
    """Compare the speed of kernels, rollouts and steps with other libraries. Needs a checkout.

    The installed package does not contain the benchmarks, because they import the other libraries,
    read the git commit and write to benchmarks/results/.
    """
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / "benchmarks" / "command.py").is_file():
        expected = "a checkout, which has the folder benchmarks/"
        refuse(ValueError(f"bench: expected {expected}, got an installed package in {checkout}"))
    sys.path.insert(0, str(checkout))
    from benchmarks.command import main as run_benchmarks

    sys.exit(run_benchmarks(context.args))


@app.command()
def recipes() -> None:
    """List the recipes, each with its subject, size, time and requirements."""
    from grpo_fast.train.config import recipe_table

    for command, subject, size, time, needs in recipe_table():
        typer.echo(f"grpo-fast {command}\n    {subject}; {size}; {time}; needs {needs}")


@app.command()
def config(
    section: Annotated[str, typer.Argument(help="A section such as optim, or a key.")] = "",
    debug: Debug = False,
) -> None:
    """List every setting of a run, with its type, default and description."""
    from grpo_fast.train.config import RunConfig
    from grpo_fast.train.config.words import listed_keys

    with print_errors(debug):
        _print_lines(*listed_keys(RunConfig, section))


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A recipe, hub id, model's folder, or qwen2.5-7b, …")
    ],
    settings: Annotated[
        Words, key_values("gpu=80 (GB of memory) prompt=8192 model.dtype=bfloat16 …")
    ] = None,
    debug: Debug = False,
) -> None:
    """Predict how many tokens of a micro-batch fit into memory with different settings.

    No weights are loaded. Without gpu=…, the prediction is for this machine's GPU, or for its main
    memory if it has no GPU.
    """
    from grpo_fast.train.plan import plan as predict

    with print_errors(debug):
        _print_lines(*predict(model, settings or []))


@app.command()
def plot(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders of runs, or their metrics.jsonl.")
    ],
    out: Annotated[str | None, typer.Option("-o", "--out", help="A .png, .svg or .pdf.")] = None,
    debug: Debug = False,
) -> None:
    """Draw the metrics of one or more runs as curves in a single figure."""
    from grpo_fast.errors import RunError

    with print_errors(debug, RunError, OSError, code=USAGE_ERROR):
        from grpo_fast.train.report.curves import plot_runs

        path = None if out is None else os.path.expanduser(out)
        typer.echo(str(plot_runs([os.path.expanduser(run) for run in runs], path)))


@app.command()
def data(
    source: Annotated[str, typer.Argument(help="A file, a folder, or a hub id owner/name.")],
    settings: Annotated[
        Words, key_values("model=MODEL columns={prompt: title, answer: truth} prompt_template=hash")
    ] = None,
    debug: Debug = False,
) -> None:
    """Show how a run reads a data set: row counts, skipped rows, prompts and gold answers."""
    from grpo_fast.train.evaluate import data_lines

    with print_errors(debug, OSError):
        _print_lines(*data_lines(source, settings or []))
