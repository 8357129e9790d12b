"""All that a run is at a moment, into the folder of a checkpoint and out of it.

weights/          policy and moments; a critic; a reference that cannot be built again (one that is
                  synced, or follows a warm start); with LoRA the adapters alone
state.json        counters, the place in the data, β, windows of rewards, the configuration
state.safetensors random numbers; of a step under way, or sampled ahead, its completions' numbers
tokenizer/        for `grpo-fast export`
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_fast.errors import CheckpointError, RankError
from grpo_fast.rollout.completions import split_tensors
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.config import RunConfig
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.runs import storage
from grpo_fast.train.runs.checkpoint import (
    STATE,
    WEIGHTS,
    name_of,
    prune,
    read_manifest,
    read_state,
    write_checkpoint,
)
from grpo_fast.train.update.step import Step, restore
from grpo_fast.train.update.trainer import Trainer

STATE_TENSORS, TOKENIZER = "state.safetensors", "tokenizer"
# Of a state; another machine may have no GPU, or more of them.
MAY_CHANGE = {"config", "fingerprints", "training_set", "fallback", "random"}


class RunState:
    """A run between two updates.

    Attributes:
        step: finished steps.
        before, after: metrics of the first and of the latest evaluation.
        metrics: of the latest finished step.
        run: by which the run knows its own checkpoints.
    """

    def __init__(
        self, collector: Collector, trainer: Trainer, report: RunReport,
        fingerprints: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.collector, self.trainer, self.report = collector, trainer, report
        self.underway: Step | None = None  # the step that has its completions
        self.fingerprints = fingerprints or {}
        self.run = uuid.uuid4().hex
        self.step = 0
        self.before: dict[str, float] | None = None
        self.after: dict[str, float] | None = None
        self.metrics: dict[str, float] = {}
        self.mark()

    def mark(self) -> None:
        """Remember what a rollout and an evaluation move on before they come to their end.

        A run that is ended in the middle of one starts it again, from here.
        """
        self.collector.mark()
        self.random, self.lengths = _random_state(), self.report.lengths()

    def finish_step(
        self, step: int, metrics: dict[str, float], after: dict[str, float] | None
    ) -> None:
        """A step is written down, with the evaluation behind it if there was one."""
        self.step, self.metrics, self.after = step, metrics, after or self.after
        self.underway = None
        self.mark()

    def save(self) -> Path:
        """Write a checkpoint of the latest mark, and prune the older ones. Collective."""
        trainer, config = self.trainer, self.trainer.config
        if config.optim.states != "full":
            expected = "expected optim.states: full, whose moments a file can hold"
            raise CheckpointError(f"checkpoint: {expected}, got {config.optim.states}")
        name = name_of(self.step, 0 if self.underway is None else self.underway.place)
        best = config.checkpoint.best if self.underway is None else None
        value = None if best is None else self.metrics.get(best)
        self.report.sync()
        about = {"run": self.run, "step": self.step, "value": value}
        tensors: dict[str, Tensor] = {}
        state = split_tensors(self._state(), tensors)
        weights = self._weights()
        names = {tensor: name for name, tensor in weights.items()}  # tensors hash by identity
        for who, optimizer in trainer.optimizers_by_name().items():
            weights |= _prefixed(f"optimizer.{who}", optimizer.moments(names))

        def fill(folder: Path) -> None:
            from safetensors.torch import save_file

            trainer.policy.tokenizer.save_pretrained(folder / TOKENIZER)
            save_file(tensors, folder / STATE_TENSORS)
            (folder / STATE).write_text(json.dumps(state) + "\n", encoding="utf-8")

        path = write_checkpoint(self.report.folder, name, weights, fill, about)
        distributed.from_main(lambda: prune(path, config.checkpoint.keep))
        return path

    def _weights(self) -> dict[str, Tensor]:
        """The weights of a checkpoint by name, as they lie in the models."""
        trainer, config = self.trainer, self.trainer.config
        weights = _prefixed("policy", trainer.policy.weights())
        copy = trainer.reference.copy
        is_new = config.reference.kind == "synced" or config.warm_start is not None
        if copy is not None and config.reference.path is None and is_new:
            weights |= _prefixed("reference", copy.weights())
        if trainer.critic is not None:
            weights |= _prefixed("critic", trainer.critic.weights())
        return weights

    def _state(self) -> dict[str, Any]:
        """All of a checkpoint but the weights. Collective: a rank has its own part of a step."""
        trainer = self.trainer
        optimizers = trainer.optimizers_by_name().items()
        return {
            "step": self.step, "before": self.before, "after": self.after, "metrics": self.metrics,
            "training_set": len(self.collector.queue.examples), "lengths": self.lengths,
            **self.collector.state_dict(),
            "optimizers": {who: optimizer.counters() for who, optimizer in optimizers},
            "trainer": trainer.state_dict(),
            "underway": None if self.underway is None else self.underway.state(),
            "ahead": self.collector.ahead.state(), "random": self.random,
            "fallback": self.collector.engine.fallback,
            "fingerprints": self.fingerprints, "config": trainer.config.model_dump(mode="json"),
        }  # fmt: skip

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint. Collective.

        Raises ValueError for one that does not fit: nothing is filled in.
        """
        from safetensors.torch import load_file

        trainer = self.trainer
        with _refused(folder), distributed.together():
            state = read_state(folder, load_file(folder / STATE_TENSORS))
            weights = self._weights()
            names, own = storage.stored_names(folder / WEIGHTS), dict(weights)
            for who, optimizer in trainer.optimizers_by_name().items():
                start = f"optimizer.{who}."
                stored = [name.removeprefix(start) for name in names if name.startswith(start)]
                room = optimizer.room_for_moments(stored, own)
                weights |= _prefixed(f"optimizer.{who}", room)
        with _refused(folder):
            storage.read_tensors(folder / WEIGHTS, weights)
        with _refused(folder), distributed.together():
            self._load_state(folder, state)
        with _refused(folder):
            again = self._state()
        with _refused(folder), distributed.together():
            if distributed.is_main():
                _check_round_trip(again, state)
            _set_random_state(state["random"])
            self.random = _random_state()

    def _load_state(self, folder: Path, state: dict[str, Any]) -> None:
        trainer = self.trainer
        for who, optimizer in trainer.optimizers_by_name().items():
            optimizer.load_counters(state["optimizers"][who])
        self.step, self.before, self.after = (state[key] for key in ("step", "before", "after"))
        self.metrics = state["metrics"]
        self.collector.load_state_dict(state)
        trainer.load_state_dict(state["trainer"])
        rollouts = [x["rollout"] for x in (state["underway"], state["ahead"]) if x is not None]
        _check_ids(rollouts, trainer.policy.head.weight.shape[0])
        if state["underway"] is not None:
            _check_place(state["underway"], trainer.config, self.step + 1)
            self.underway = restore(
                state["underway"], self.collector.queue.examples, trainer.config.minibatches,
                **trainer.batch_options(),
            )  # fmt: skip
        if state["ahead"] is not None:
            self.collector.ahead.load(state["ahead"])
        self._load_path(state["fallback"])
        if folder.parent.parent.resolve() == Path(self.report.folder).resolve():
            self.run = read_manifest(folder).run
        self.mark()

    def _load_path(self, fallback: str | None) -> None:
        """Sample as the run before did: by transformers' `generate` where its own loop was not."""
        engine = self.collector.engine
        if fallback is not None:
            engine.fallback = fallback
        elif engine.fallback is not None:
            now = "which this one cannot take: its bits are others from here on"
            self.report.note(f"resume: the run before sampled by its own loop, {now}")


def _check_round_trip(again: dict[str, Any], state: dict[str, Any]) -> None:
    """Raise a ValueError unless what was loaded, stored again, is what was read.

    Nothing is passed over, then, and nothing is filled in. What may change is left out.
    """
    for key in sorted(again.keys() - MAY_CHANGE):
        ours, theirs = (
            json.dumps(split_tensors(x[key], {}), sort_keys=True) for x in (again, state)
        )
        if ours != theirs:
            raise ValueError(f"{STATE}: {key} holds what this configuration has no place for")


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _check_ids(rollouts: Iterable[dict[str, Any]], rows: int) -> None:
    """Raise a ValueError for a token that the model has no row for."""
    lists = (x for one in rollouts for x in (*one["prompt_ids"], *one["completion_ids"]))
    largest = max((max(ids, default=0) for ids in lists), default=0)
    if largest >= rows:
        raise ValueError(f"{STATE}: rollout: expected token ids below {rows}, got {largest}")


def _check_place(underway: dict[str, Any], config: RunConfig, step: int) -> None:
    """Raise a ValueError for another step than this one, or for one without its updates."""
    epoch, minibatch, per_pass = underway["epoch"], underway["minibatch"], config.minibatches
    made, is_ended = len(underway["updates"]["losses"]), epoch == config.inner_iterations
    fits = epoch < config.inner_iterations and made == epoch * per_pass + minibatch
    fits = (fits and minibatch <= per_pass) or (is_ended and not minibatch and made > 0)
    if not fits or underway["number"] != step:
        came = f"step {underway['number']}, epoch {epoch}, minibatch {minibatch}, {made} updates"
        raise ValueError(f"{STATE}: underway: expected a place in step {step}, got {came}")


@contextmanager
def _refused(folder: Path) -> Iterator[None]:
    """Name the checkpoint that does not fit."""
    try:
        yield
    except Exception as error:  # the readers of safetensors have classes of their own
        is_of_ranks = isinstance(error, (torch.distributed.DistError, RankError))
        if is_of_ranks or isinstance(error, MemoryError) or "gloo/" in str(error):
            raise
        text = f"{type(error).__name__} {error}" if isinstance(error, LookupError) else str(error)
        said = f"expected a checkpoint of this configuration in {folder}"
        raise ValueError(f"resume: {said}, got another: {text}") from error


def _random_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_state(saved: dict[str, Tensor]) -> None:
    torch.set_rng_state(saved["cpu"])
    if saved.get("cuda") is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
