"""All that a run is at a moment, into the folder of a checkpoint and out of it.

model/            the policy in transformers format; with LoRA its adapter as peft saves it
reference/        where it cannot be built again: one that is synced, or follows a warm start
critic/           its value head, and a trunk of its own
*_optimizer.safetensors, random.safetensors
state.json        counters, the place in the data, β, windows of rewards, the configuration
step.safetensors  of a step that is under way: its completions' numbers
ahead.safetensors the same of the next step, where they are sampled ahead
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_fast.errors import CheckpointError
from grpo_fast.train.collect.collector import Collector
from grpo_fast.train.models.policy import Policy
from grpo_fast.train.ranks import distributed
from grpo_fast.train.report.report import RunReport
from grpo_fast.train.runs.checkpoint import STATE, name_of, prune, read_state, write_checkpoint
from grpo_fast.train.step import Step, restore
from grpo_fast.train.update.critic import HEAD_FILE, Critic
from grpo_fast.train.update.trainer import Trainer
from grpo_fast.train.update.weights import (
    load_optimizer,
    load_parts,
    load_weights,
    optimizer_state,
    save_moments,
    save_weights,
)


class RunState:
    """A run between two updates.

    Attributes:
        step: finished steps.
        before, after: metrics of the first and of the latest evaluation.
        metrics: of the latest finished step.
    """

    def __init__(self, collector: Collector, trainer: Trainer, report: RunReport) -> None:
        self.collector, self.trainer, self.report = collector, trainer, report
        self.step = 0
        self.underway: Step | None = None  # the step that has its completions
        self.before: dict[str, float] | None = None
        self.after: dict[str, float] | None = None
        self.metrics: dict[str, float] = {}
        self.mark()

    def mark(self) -> None:
        """Remember what a rollout and an evaluation move on before they come to their end.

        A run that is ended in the middle of one starts it again, from here.
        """
        self.collector.mark()
        self.random = _random_state()
        self.marked = {"lengths": self.report.lengths()}

    def finish_step(
        self, step: int, metrics: dict[str, float], after: dict[str, float] | None
    ) -> None:
        """A step is written down, with the evaluation behind it if there was one."""
        self.step, self.metrics, self.after = step, metrics, after or self.after
        self.underway = None
        self.mark()

    def save(self) -> Path:
        """Write a checkpoint of the latest mark, and prune the older ones: rank 0, for all."""
        config = self.trainer.config
        if config.optim.states != "full":
            expected = "expected optim.states: full, whose moments a file can hold"
            raise CheckpointError(f"checkpoint: {expected}, got {config.optim.states}")
        underway = self.underway
        name = name_of(self.step, 0 if underway is None else underway.place)
        wanted = config.checkpoint.best
        value = self.metrics.get(wanted) if wanted is not None and underway is None else None
        self.report.sync()
        about = {"step": self.step, "value": value}
        pieces = self._pieces()

        def written() -> str:
            fill = partial(self._fill, **pieces)
            path = write_checkpoint(self.report.folder, name, fill, about)
            prune(path, config.checkpoint.keep)
            return str(path)

        return Path(distributed.from_main(written))

    def _pieces(self) -> dict[str, Any]:
        """What the ranks put together before rank 0 writes: all of them come here."""
        trainer, critic = self.trainer, self.trainer.critic
        underway, optimizers = self.underway, trainer.optimizers_by_name()
        stored = self._stores_reference()
        return {
            "policy": trainer.policy.gathered(),
            "reference": trainer.reference.copy.gathered() if stored else None,
            "critic": None if critic is None else critic.gathered(),
            "underway": (None, {}) if underway is None else underway.state(),
            "ahead": self.collector.ahead.state(),
            "optimizers": {who: optimizer_state(each) for who, each in optimizers.items()},
        }

    def _fill(
        self,
        folder: Path,
        policy: Policy,
        reference: Policy | None,
        critic: Critic | None,
        underway: tuple[Any, dict[str, torch.Tensor]],
        ahead: tuple[Any, dict[str, torch.Tensor]],
        optimizers: dict[str, tuple[dict[str, int], dict[str, torch.Tensor]]],
    ) -> None:
        from safetensors.torch import save_file

        trainer = self.trainer
        save_weights(policy, folder / "model")
        if reference is not None:
            save_weights(reference, folder / "reference")
        if critic is not None:
            (folder / "critic").mkdir()
            if not critic.is_shared:
                save_weights(critic.trunk, folder / "critic")
            head = {n: x.detach().cpu() for n, x in critic.head.state_dict().items()}
            save_file(head, folder / "critic" / HEAD_FILE)
        for who, (_, moments) in optimizers.items():
            save_moments(moments, folder / f"{who}_optimizer.safetensors")
        save_file(self.random, folder / "random.safetensors")
        numbers, tensors = underway
        if numbers is not None:
            save_file(tensors, folder / "step.safetensors")
        coming, tensors = ahead
        if coming is not None:
            save_file(tensors, folder / "ahead.safetensors")
        state = {
            "step": self.step, "before": self.before, "after": self.after, "metrics": self.metrics,
            "training_set": len(self.collector.queue.examples),
            **self.collector.state_dict(), **self.marked,
            "optimizers": {who: counters for who, (counters, _) in optimizers.items()},
            "trainer": trainer.state_dict(), "underway": numbers, "ahead": coming,
            "fallback": self.collector.engine.fallback,
            "config": trainer.config.model_dump(mode="json"),
        }  # fmt: skip
        (folder / STATE).write_text(json.dumps(state) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint. Weights of another shape or a missing file raise ValueError."""
        try:
            with distributed.together():
                self._load(folder, read_state(folder))
        except (OSError, KeyError, RuntimeError) as error:
            said = "expected a checkpoint of this configuration"
            raise ValueError(f"resume: {said} in {folder}, got {error}") from error
        self.report.note(f"goes on from {folder}")

    def _load(self, folder: Path, state: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        trainer = self.trainer
        load_weights(trainer.policy, folder / "model")
        if self._stores_reference():
            load_weights(trainer.reference.copy, folder / "reference")
        if trainer.critic is not None:
            if not trainer.critic.is_shared:
                load_weights(trainer.critic.trunk, folder / "critic")
            load_parts(trainer.critic.head, load_file(folder / "critic" / HEAD_FILE))
        for who, optimizer in trainer.optimizers_by_name().items():
            moments = load_file(folder / f"{who}_optimizer.safetensors")
            load_optimizer(optimizer, state["optimizers"][who], moments)
        self.step, self.before, self.after = (state[key] for key in ("step", "before", "after"))
        self.metrics = state["metrics"]
        self.collector.load_state_dict(state)
        trainer.load_state_dict(state["trainer"])
        if state["underway"] is not None:
            tensors = load_file(folder / "step.safetensors")
            self.underway = restore(
                state["underway"], tensors, self.collector.queue.examples,
                trainer.config.minibatches,
                **trainer.batch_options(),
            )  # fmt: skip
        if state["ahead"] is not None:
            self.collector.ahead.load(state["ahead"], load_file(folder / "ahead.safetensors"))
        if state.get("fallback") is not None:
            self.collector.engine.fallback = state["fallback"]
        elif "fallback" in state and self.collector.engine.fallback is not None:
            now = "which this one cannot take: its bits are others from here on"
            self.report.note(f"resume: the run before sampled by its own loop, {now}")
        _set_random_state(load_file(folder / "random.safetensors"))
        self.mark()

    def _stores_reference(self) -> bool:
        config, copy = self.trainer.config, self.trainer.reference.copy
        is_new = config.reference.kind == "synced" or config.warm_start is not None
        return copy is not None and config.reference.path is None and is_new


def _random_state() -> dict[str, torch.Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _set_random_state(saved: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(saved["cpu"])
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
