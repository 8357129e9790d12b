r"""Race to a held-out accuracy on a real model: grpo_fast, FastGRPOTrainer, and TRL's GRPOTrainer.

    make race SEEDS=1
    python -m benchmarks.race --model runs/capitals-data/model [--tasks capitals] [--seeds 3]

All trainers train the same model on the same prompts in the same order, with the same rewards,
hyperparameters, number of completions and maximum length. Each run has a separate process.
Every few steps it writes its weights, and this process measures the accuracy with one evaluator.
The clock of the run stops in the meantime. Building a trainer is not counted, either. TRL samples
with its own `generate` and has its fused head. A short sweep chooses the rows of its forward pass.

Results are stored after each evaluation, one file for each task, trainer and seed. If the command
is repeated, runs that have finished are not repeated, and an interrupted run starts again.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.options import new_parser, positive
from benchmarks.race import jobs
from benchmarks.report.tables import text_table
from grpo_fast.train.evaluate import mean_and_error
from grpo_fast.train.report import curves

Record = dict[str, Any]
Runs = dict[str, list[Record]]  # records of a task by trainer, one for each seed
LEVELS = (0.3, 0.5)
GIB = 2**30


def main(words: Sequence[str] | None = None, tasks: dict[str, jobs.Task] = jobs.TASKS) -> None:
    parser = new_parser(__doc__, "benchmarks.race")
    parser.add_argument("--model", required=True, help="folder of the pretrained model")
    parser.add_argument("--tasks", nargs="+", choices=list(tasks), default=list(tasks))
    trainers = [*jobs.TRAINERS, jobs.RECOMPUTING]
    parser.add_argument("--trainers", nargs="+", choices=trainers, default=list(jobs.TRAINERS))
    parser.add_argument("--seeds", type=positive(int), default=1)
    parser.add_argument("--threads", type=positive(int), default=2)
    parser.add_argument("--steps", type=positive(int), help="steps of a run (default: the task's)")
    parser.add_argument("-o", "--out", type=Path, default=Path("runs/race"))
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args(words)
    runs: dict[str, Runs] = {}
    for name in options.tasks:
        task = tasks[name]._replace(steps=options.steps or tasks[name].steps)
        runs[name] = defaultdict(list)
        for record in Race(options, name, task).records():
            runs[name][record["trainer"]].append(record)
    records = [record for found in runs.values() for each in found.values() for record in each]
    report = {**measure.header("race", "cpu"), "cases": records}
    measure.write(options.json or options.out / "race.json", report)
    draw(runs, options.out / "race.png")
    print(*map(table, runs.values()), options.out / "race.png", sep="\n\n")


# ------------------------------------------------------------------------------------------- runs
class Race:
    """The runs of one task.

    Args:
        options: options of the command.
        name: name of the task.
        task: the task.
    """

    def __init__(self, options: argparse.Namespace, name: str, task: jobs.Task) -> None:
        self.options = options
        self.name = name
        self.task = task
        self.data = options.out / f"{name}-data"
        task.write(self.data)

    def records(self) -> Iterator[Record]:
        """Run all trainers and seeds that have not finished. Yield the records of all runs."""
        for seed in range(self.options.seeds):
            for trainer in self.options.trainers:
                settings = {**self.task.settings(), "threads": self.options.threads}
                where = {"task": self.name, "trainer": trainer, "seed": seed, "settings": settings}
                path = self.options.out / f"{self.name}-{trainer}-{seed}.json"
                record = read(path)
                if not record.get("finished") or {key: record[key] for key in where} != where:
                    record = {**where, "commit": measure.commit(), "finished": False, "points": []}
                    self.run(record, path)
                yield record

    def run(self, record: Record, path: Path) -> None:
        """Run one trainer. Write its record after each evaluation."""
        self.add(record, path, {"step": 0, "cpu": 0.0, "wall": 0.0, "accuracy": self.start})
        rows = 1
        if record["trainer"] == "TRL":
            record["cpu_seconds_per_row"] = self.swept
            rows = min(self.swept, key=self.swept.__getitem__)
        record["rows"] = rows
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / "weights.safetensors"
            job = self.job(record["trainer"], record["seed"], rows, weights)
            for point in messages(jobs.work, job):
                self.evaluator.load(weights)
                self.add(record, path, {**point, "accuracy": self.accuracy()})
        record["finished"] = record["points"][-1]["step"] == self.task.steps
        measure.write(path, record)

    def add(self, record: Record, path: Path, point: Record) -> None:
        record["points"].append(point)
        measure.write(path, record)
        times = f"{point['cpu']:.1f} CPU s, {point['wall']:.1f} s, {point['accuracy']:.1%} right"
        run = f"{self.name} {record['trainer']} seed {record['seed']}"
        print(f"{run}: step {point['step']}, {times}", flush=True)

    def job(self, trainer: str, seed: int, rows: int, weights: Path) -> jobs.Job:
        config = self.task.config(self.options.model, self.data, seed, trainer)
        return jobs.Job(trainer, config, self.options.threads, rows, weights)

    @functools.cached_property
    def swept(self) -> dict[int, float]:
        """Return the CPU seconds per row of TRL's update, keyed by the rows of a forward pass."""
        [seconds] = messages(jobs.sweep, self.job("TRL", 0, 1, Path()))
        return seconds

    @functools.cached_property
    def evaluator(self) -> jobs.Evaluator:
        return jobs.Evaluator(self.options.model)

    @functools.cached_property
    def start(self) -> float:
        """Return the accuracy before training. Use this before the evaluator loads weights."""
        return self.accuracy()

    def accuracy(self) -> float:
        config = self.task.config(self.options.model, self.data, 0)
        asked = jobs.read_examples(config, self.evaluator.tokenizer).test[: self.task.questions]
        return self.evaluator.accuracy(asked, self.task.length)


def messages(target: Callable[[Any, jobs.Job], None], job: jobs.Job) -> Iterator[Any]:
    """Start a process, and yield the messages that it sends.

    The process waits until the caller requests the next message.

    Raises:
        RuntimeError: the process failed. Its error is on standard error.
    """
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, job))
    process.start()
    theirs.close()  # otherwise `recv` would wait forever after the end of the process
    try:
        while True:
            yield pipe.recv()
            pipe.send(None)
    except (EOFError, OSError):  # the process has ended
        process.join()
    finally:
        process.kill()
    if process.exitcode:
        raise RuntimeError(f"{job.trainer} ended with code {process.exitcode}")


def read(path: Path) -> Record:
    return json.loads(path.read_text()) if path.is_file() else {}


# -------------------------------------------------------------------------------- table and picture
def table(runs: Runs) -> str:
    """Return the table of a task.

    A time ends at the first evaluation with the accuracy. It is the mean over the seeds that reach
    this accuracy, or "–" if none does. The last level is the highest accuracy that all runs reach.
    """
    every = [record for records in runs.values() for record in records]
    common = min(max(point["accuracy"] for point in x["points"]) for x in every)
    levels = (*LEVELS, common)
    titles = ["", "seeds", *(f"{what} to {x:.0%}" for x in levels for what in ("CPU s", "s"))]
    rows = []
    for trainer, records in runs.items():
        times = [mean_time(records, level, clock) for level in levels for clock in ("cpu", "wall")]
        ends = [record["points"][-1] for record in records]
        speed, _ = mean_and_error([end["cpu"] / max(1, end["step"]) for end in ends])
        mean, error = mean_and_error([100 * end["accuracy"] for end in ends])
        final = f"{mean:.4g}" if math.isnan(error) else f"{mean:.4g} ± {error:.2g}"
        peak = max(end.get("peak", 0) for end in ends) / GIB
        rows.append(
            [trainer, str(len(records)), *times, f"{speed:.1f}", f"{final}%", f"{peak:.2f}"]
        )
    title = f"{every[0]['task']}, largest gap of two curves: "
    titles += ["CPU s a step", "final accuracy", "GiB"]
    return text_table(f"{title}{gap(runs):.1f} standard errors", titles, rows)


def mean_time(records: Sequence[Record], level: float, clock: str) -> str:
    """Return the mean over the seeds that reach the accuracy, and their number if some do not."""
    found = []
    for record in records:
        times = [point[clock] for point in record["points"] if point["accuracy"] >= level]
        found += times[:1]
    if not found:
        return "–"
    mean = f"{statistics.fmean(found):.0f}"
    return mean if len(found) == len(records) else f"{mean} ({len(found)} of {len(records)})"


def curve(records: Sequence[Record], field: str) -> tuple[list[float], list[float], list[float]]:
    """Return the mean of a field at each evaluation, and the ends of one standard error."""
    values = defaultdict(list)
    for record in records:
        for point in record["points"]:
            values[point["step"]].append(point[field])
    means, low, high = [], [], []
    for step in sorted(values):
        mean, error = mean_and_error(values[step])
        error = 0.0 if math.isnan(error) else error  # a single run has a band of width 0
        means.append(mean)
        low.append(mean - error)
        high.append(mean + error)
    return means, low, high


def gap(runs: Runs) -> float:
    """Return the largest difference of two trainers' accuracies at one step, in standard errors.

    The error is that of the questions, because the errors of few seeds are uncertain.
    """
    seeds = min(map(len, runs.values()))
    count = seeds * next(iter(runs.values()))[0]["settings"]["questions"]
    gaps = []
    for values in zip(*(curve(x, "accuracy")[0] for x in runs.values()), strict=False):
        mean, _ = mean_and_error(values)
        error = math.sqrt(max(2 * mean * (1 - mean) / count, 1e-9))
        gaps.append((max(values) - min(values)) / error)
    return max(gaps)


def draw(tasks: dict[str, Runs], path: Path) -> None:
    """Draw the accuracy over CPU seconds, one panel for each task."""
    with curves.picture(path, (4.6 * len(tasks), 3.2), (1, len(tasks))) as (_, panels):
        for axes, (name, runs) in zip(panels[0], tasks.items(), strict=True):
            for number, (trainer, records) in enumerate(runs.items()):
                seconds, _, _ = curve(records, "cpu")
                accuracy, low, high = curve(records, "accuracy")
                axes.plot(seconds, accuracy, marker=".", color=f"C{number}", label=trainer)
                axes.fill_between(seconds, low, high, color=f"C{number}", alpha=0.18, linewidth=0)
            axes.set(title=name, xlabel="CPU seconds")
        panels[0][0].set_ylabel("held-out accuracy")
        panels[0][0].legend()


if __name__ == "__main__":
    main()
