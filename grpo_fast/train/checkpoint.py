"""Checkpoints of a run: saving at the end of a step, resuming, endings that save, and export.

A checkpoint is a folder with the following files:

- weights/: safetensors files that torch.distributed.checkpoint (DCP) writes and reads. They contain
  the policy (with LoRA only the adapter), the optimizer's moments, the critic, and the reference if
  it cannot be loaded from a path. No random state is stored, because the random numbers of a step
  depend only on the seed and the number of the step.
- state.json: the fields of `State`.
- tokenizer/: the tokenizer, which `grpo-fast export` needs.

It is first written into a folder with a temporary name, which gets its final name at the end. A
process that is killed during writing therefore never leaves an incomplete checkpoint with a final
name. A run changes no file in its folder before it has loaded its checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed.checkpoint as dcp
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from grpo_fast.errors import SAVED, NonFiniteLogits, Stopped, WriteError, require
from grpo_fast.kernels.agree import is_out_of_memory
from grpo_fast.train import folder, ranks
from grpo_fast.train.config import CheckpointConfig, Count, ModelConfig, RunConfig, load_saved
from grpo_fast.train.config.words import validated
from grpo_fast.train.folder import check_regular, sync, written
from grpo_fast.train.policy import Policy, load_policy, load_tokenizer
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.run import Run

log = logging.getLogger(__name__)

UNFINISHED = ".unfinished"
WEIGHTS = "weights"
TOKENIZER = "tokenizer"
STATE = "state.json"
# Approximate size of a tensor file. While a file is written, two copies of it are in memory.
FILE_BYTES = 1 << 28


# ------------------------------------------------------------------------------ State and tensors
@dataclass
class State:
    """The state of a run at the end of a step, without tensors. It is stored as state.json."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    format: Literal[14]  # other versions of the package write other formats
    length: Count  # length of metrics.jsonl in bytes
    settings: dict[str, Any]  # the configuration, and fingerprints of the files that it names
    step: Count  # finished steps
    consumed: Count  # number of prompts that were taken from PromptQueue
    # Maps the name of a reward function to one tuple for each of its latest calls: the number of
    # samples without a reward, and the number of all samples.
    lost_rewards: dict[str, list[tuple[Count, Count]]]
    baseline: dict[str, float | None] | None  # running baseline of the advantages
    num_tokens: Count  # trunk tokens trained so far
    optimizers: dict[str, dict[str, Count]]  # counters of the optimizers of policy and critic
    before: dict[str, float] | None  # metrics of the first evaluation
    after: dict[str, float] | None  # metrics of the latest evaluation
    unlogged: dict[str, float] | None  # metrics of a step that was finished and not yet logged


def read_state(checkpoint: Path) -> State:
    """Read the state of a checkpoint.

    Raises:
        ValueError: a field of the file is invalid, or another version of the package wrote it. The
            message names the field.
    """
    try:
        return TypeAdapter(State).validate_json(check_regular(checkpoint / STATE).read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        hint = "; use the version of grpo_fast that wrote it" if where == "format" else ""
        raise ValueError(f"{STATE}: {where}: {first['msg']}{hint}") from error


@contextmanager
def refused(argument: str, checkpoint: Path) -> Iterator[None]:
    """Convert an error inside this context to a ValueError about an unusable checkpoint.

    Out-of-memory errors are not converted, because the checkpoint does not cause them.

    Args:
        argument: name of the argument that selected the checkpoint, for the message.
        checkpoint: folder of the checkpoint, for the message.
    """
    try:
        yield
    # safetensors and torch raise many exception classes.
    except (Exception, CheckpointException) as error:
        if is_out_of_memory(error):
            raise
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        said = f"expected a checkpoint of this configuration in {checkpoint}"
        raise ValueError(f"{argument}: {said}, got another: {text}") from error


def write_tensors(place: Path, tensors: Mapping[str, Tensor], is_sharded: bool) -> None:
    """Write tensors into safetensors files of about FILE_BYTES each.

    Args:
        place: the folder of the files.
        tensors: the tensors, keyed by name.
        is_sharded: True if all ranks call this function, and each rank writes its shards.
    """
    size = 0
    numbers: dict[str, int] = {}  # number of the file that stores each tensor
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        numbers[name] = size // FILE_BYTES + 1
        size += tensor.nbytes
        whole[name] = tensor.detach().contiguous()
    writer = dcp.HuggingFaceStorageWriter(str(place), numbers, save_distributed=is_sharded)
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(whole, storage_writer=writer, planner=planner, no_dist=not is_sharded)


@torch.no_grad()
def read_tensors(
    place: Path, into: Mapping[str, Tensor], prefix: str = "", is_sharded: bool = False
) -> None:
    """Copy stored tensors into existing tensors of the same names.

    Args:
        place: the folder of the files.
        into: the tensors to fill, keyed by name. For a sharded tensor, only this rank's shard is
            filled.
        prefix: only stored tensors whose names begin with the prefix are read.
        is_sharded: True if all ranks call this function.

    Raises:
        ValueError: a tensor is missing in the files or in `into`, or its dtypes or shapes differ.
    """
    for file in place.glob("*.safetensors"):  # the reader opens even files without a stored hash
        check_regular(file)
    reader = dcp.HuggingFaceStorageReader(str(place))
    found: Any = reader.read_metadata().state_dict_metadata
    stored = {
        name: f"{x.properties.dtype} {tuple(x.size)}"
        for name, x in found.items() if name.startswith(prefix)
    }  # fmt: skip
    wanted = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in into.items()}
    for name in sorted(stored.keys() | wanted.keys()):
        expected = wanted.get(name, "no such tensor")
        came = stored.get(name, "none")
        require(expected == came, f"the tensor {name}", expected, came)
    with warnings.catch_warnings(action="ignore"):
        dcp.load(dict(into), storage_reader=reader, no_dist=not is_sharded)


# ------------------------------------------------------------------------------- Start of a run
@contextmanager
def opened(config: RunConfig) -> Iterator[tuple[Path | None, State | None]]:
    """Lock the folder of a run, and find the checkpoint from which the run resumes.

    Yields:
        The folder of the checkpoint and its state. Both are None if the run starts at step 0.

    Raises:
        ValueError: the folder is in use, it contains a different run, or the newest checkpoint is
            damaged or has another format.
    """
    with ExitStack() as until_the_end:
        ranks.from_main(lambda: until_the_end.enter_context(folder.locked(config.output_dir)))
        found = ranks.from_main(lambda: _find(config))
        if found is None:
            yield None, None
            return
        with refused("resume", found):
            state = read_state(found)
            expected = f"{folder.step_of(found)}, as its name says"
            require(state.step == folder.step_of(found), f"{STATE}: step", expected, state.step)
        metrics = check_regular(Path(config.output_dir, "metrics.jsonl"))
        size = metrics.stat().st_size if metrics.exists() else 0
        expected = f"at least {state.length} bytes"
        require(size >= state.length, str(metrics), expected, f"{size} bytes")
        finished = f"at least {state.step} steps, which the run has finished"
        require(config.steps >= state.step, "steps", finished, config.steps)
        yield found, state


def _find(config: RunConfig) -> Path | None:
    """Return the checkpoint from which the run resumes, or None if it starts at step 0.

    Raises:
        ValueError: the run must start at step 0, but its folder contains a finished run, a run with
            other settings, or other files.
    """
    run = Path(config.output_dir)
    if config.resume is None or not folder.is_occupied(run):
        folder.check_folder(run)
        return None
    checkpoints = folder.checkpoints_in(run)
    if checkpoints:
        return checkpoints[0]
    if (run / "summary.json").exists() or not (run / folder.CONFIG).is_file():
        folder.check_folder(run)
    # The folder has an unfinished run without checkpoints, which starts over.
    was = load_saved(run / folder.CONFIG)
    folder.check_same(was.model_dump(mode="json"), config.model_dump(mode="json"))
    return None


# ------------------------------------------------------------------------------- The end of a step
@dataclass
class Checkpoints:
    """Recorder of a run's state after each step, which also writes checkpoints of this state.

    The method `mark` does not copy the weights. The recorded state is therefore only valid until
    the next optimizer step changes the weights. A checkpoint that is written later would mix two
    steps.

    Args:
        run: the run.
        report: the writer of the logs. It knows the length of metrics.jsonl.
        config: the section `checkpoint` of the configuration.
        settings: the configuration, and fingerprints of the files that it names.
    """

    run: Run
    report: RunReport
    config: CheckpointConfig
    settings: dict[str, Any]
    is_ending: bool = False  # True while an error or a signal ends the run

    def __post_init__(self) -> None:
        self.saved_at = time.monotonic()
        self.mark()

    def resume(self, checkpoint: Path, state: State) -> None:
        """Load a checkpoint into the run. The caller must begin the report afterwards.

        Raises:
            ValueError: the checkpoint does not fit the configuration.
        """
        run = self.run
        with refused("resume", checkpoint):
            read_tensors(checkpoint / WEIGHTS, run.tensors(), is_sharded=run.config.is_sharded)
            run.load_state_dict(vars(state))

    def mark(self, **changes: Any) -> None:
        """Record the current state of the run.

        Args:
            **changes: new values of attributes of the run, for example `step`.
        """
        run = self.run
        vars(run).update(changes)
        self.state = State(14, self.report.length, self.settings, **run.state_dict())
        for optimizer in run.optimizers.values():
            optimizer.has_moved = False

    def is_due(self) -> bool:
        """Return True if `checkpoint.every` or `checkpoint.every_minutes` requires a checkpoint.

        All ranks use the clock of rank 0, so that they get the same result.
        """
        plan = self.config
        by_step = plan.every and self.state.step % plan.every == 0
        seconds = 60 * plan.every_minutes
        is_late = ranks.from_main(lambda: 0 < seconds <= time.monotonic() - self.saved_at)
        return bool(by_step or is_late)

    def save(self, on_main: Callable[[Callable[[], Any]], Any] = ranks.from_main) -> Path:
        """Write a checkpoint of the recorded state, and delete old checkpoints.

        Args:
            on_main: function that calls its argument on rank 0.

        Returns:
            The folder of the checkpoint.

        Raises:
            WriteError: the disk is full or read-only. Older checkpoints stay intact.
        """
        root = self.report.folder / folder.FOLDER
        final = root / f"{folder.STEP}{self.state.step:06d}"
        part = final.with_name(final.name + UNFINISHED)
        is_sharded = self.run.config.is_sharded

        def begin() -> bool:
            """Write all files except the tensors. Return False if the checkpoint exists."""
            if final.exists():
                return False
            for unfinished in root.glob(f"*{UNFINISHED}"):
                # An old folder that cannot be deleted takes only space, but this one must be empty.
                shutil.rmtree(unfinished, ignore_errors=unfinished != part)
            (part / WEIGHTS).mkdir(parents=True)
            self.run.policy.tokenizer.save_pretrained(part / TOKENIZER)
            text = json.dumps(dataclasses.asdict(self.state))
            (part / STATE).write_text(text + "\n", encoding="utf-8")
            return True

        def write() -> None:
            write_tensors(part / WEIGHTS, self.run.tensors(), is_sharded)

        def finish() -> None:
            """Give the checkpoint its final name, and delete old checkpoints."""
            metrics = self.report.folder / "metrics.jsonl"
            if metrics.is_file():  # the run continues if its log was moved or deleted
                sync(metrics)  # the state counts its bytes, which a power cut could lose
            _finish(part, final)
            for path in folder.checkpoints_in(self.report.folder)[self.config.keep :]:
                with suppress(OSError):
                    # Rename it first. If the process is killed while it deletes the files, no
                    # damaged checkpoint must remain under a final name.
                    shutil.rmtree(path.rename(path.with_name(path.name + UNFINISHED)))

        try:
            with written(part):
                if on_main(begin):
                    write() if is_sharded else on_main(write)
                    on_main(finish)
        except WriteError:
            if ranks.is_main():
                shutil.rmtree(part, ignore_errors=True)
            raise
        self.saved_at = time.monotonic()
        return final

    @contextmanager
    def saved_when_it_ends(self) -> Iterator[None]:
        """Save the recorded state if an error or a signal ends the run inside this context.

        A note on the error names the checkpoint from which the run can resume.
        """
        try:
            yield
        except BaseException as error:
            self.is_ending = True
            said = self._save_at_the_end(error)
            if isinstance(error, Stopped):
                self.report.note(f"{error.name}: {said}")
            else:
                error.add_note(said)
            raise

    def _save_at_the_end(self, error: BaseException) -> str:
        """Save the recorded state if possible. Return a sentence that says what was saved."""
        run = self.run
        is_common = ranks.is_common(error)
        why = ""
        if isinstance(error, NonFiniteLogits):
            # Do not save a checkpoint, because the weights are broken. Old checkpoints, which are
            # deleted after each save, may be the only ones with finite weights.
            advice = "a lower optim.lr or model.dtype=float32 may help"
            why = f"this happened after {run.step} steps; {advice}"
        elif run.has_moved:
            why = "the step was not finished"
        elif not is_common and run.config.is_sharded:
            why = "one rank alone cannot save the run"
        elif not is_common and not ranks.is_main():
            return "rank 0 saves the run"
        else:
            run.forget_gradients()  # free memory for saving
            try:
                saved = self.save() if is_common else self.save(on_main=lambda work: work())
                if isinstance(error, Stopped):
                    error.code = SAVED
                return f"saved in {saved}; resume=auto continues from there"
            except WriteError as failed:
                why = str(failed)
        saves = folder.checkpoints_in(self.report.folder)
        if not saves:
            return f"{why}; there is no checkpoint: resume=auto starts over"
        return f"{why}; the newest checkpoint is {saves[0]}: resume=auto repeats the steps after it"


def _finish(part: Path, final: Path) -> None:
    """Flush all files of a checkpoint to disk, and give the folder its final name."""
    # Flush files and directory entries before the rename. Otherwise a power cut could leave a
    # checkpoint with its final name and empty files.
    for path in (*part.rglob("*"), part):
        sync(path)
    os.replace(part, final)
    sync(final.parent)
    sync(final.parent.parent)


# ---------------------------------------------------------------------------------- Trained models
def export(source: str | Path, out: str | Path) -> Path:
    """Export the policy of a checkpoint to a folder that transformers can load.

    A LoRA adapter is merged into the weights.

    Args:
        source: folder of a checkpoint or of a run. For a run, the newest checkpoint is used.
        out: a new or empty folder.

    Returns:
        The folder `out`.

    Raises:
        ValueError: the checkpoint is damaged, has non-finite weights, or was written by another
            version of the package. Also raised if the folder `out` is not empty.
    """
    # 1. Find the checkpoint.
    path = Path(source)
    checkpoint = next(iter(folder.checkpoints_in(path)), path)
    trained = f"; its trained model is {path / 'model'}" if (path / "model").is_dir() else ""
    came = f"{path}, which has no {STATE}{trained}"
    fits = (checkpoint / STATE).exists()
    require(fits, "export", "a run with a checkpoint, or a checkpoint", came)
    with folder.locked(out) as target:
        require(not folder.is_occupied(target), "OUT", "a new or empty folder", target)
        # 2. Build the model and load its weights.
        with refused("export", checkpoint):
            settings = read_state(checkpoint).settings
            settings.pop(folder.FILES)
            config = validated(RunConfig, settings)
            # The checkpoint may come from an untrusted source, so loading must not run custom code.
            plain = config.model.model_copy(update={"trust_remote_code": False})
            policy = _trained(checkpoint, plain)
        # 3. Reject non-finite weights, then write the model.
        broken = [name for name, weight in policy.weights().items() if not weight.isfinite().all()]
        came = f"NaN or infinity in {', '.join(broken[:3])} of {checkpoint}"
        require(not broken, "export", "finite weights (take an earlier checkpoint)", came)
        with written(target):
            policy.save(target)
    return target


def _trained(checkpoint: Path, model: ModelConfig) -> Policy:
    """Return the policy of a checkpoint on a CPU, with unsharded weights."""
    tokenizer = load_tokenizer(ModelConfig(path=str(checkpoint / TOKENIZER)))
    policy = load_policy(model.model_copy(update={"device": "cpu"}), tokenizer)
    weights = {f"policy.{name}": tensor for name, tensor in policy.weights().items()}
    read_tensors(checkpoint / WEIGHTS, weights, "policy.")
    return policy


def save_model(run: Run, checkpoint: Path | None) -> None:
    """Save the trained policy to the subfolder `model` of a run.

    Args:
        run: the run.
        checkpoint: the last checkpoint. If the weights are sharded, they are read from it.
    """
    policy = run.policy
    if run.config.is_sharded:
        assert checkpoint is not None
        policy = _trained(checkpoint, run.config.model)
    with written(Path(run.config.output_dir, "model")):
        policy.save(Path(run.config.output_dir, "model"))
