"""Lightning's DDP and transformers' `Trainer` over two ranks beside plain torch on all rows."""

import copy
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from benchmarks.trainers import packages
from grpo_fast import LossConfig
from tests import grpo_reference
from tests.integrations import test_integration_examples as examples
from tests.integrations import test_lightning
from tests.integrations.two_trl import Result, outcome
from tests.tiny import tiny_model

SIZES = (8, 4)  # completions of each rank's batches
STEPS = 2


def over_the_batch(rewards: Tensor, group_size: int) -> Tensor:
    """The group's mean, and the deviation of all rewards."""
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / (rewards.std() + 1e-4)).flatten()


# What of the module differs → what of the tutorial does.
LIGHTNING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo", "beta": 0.05}, {}),
    "dapo": ({"loss_type": "dapo"}, {"by_token": True}),
    "batch": ({"loss_type": "dapo", "advantages": "batch"},
              {"by_token": True, "advantages": over_the_batch}),
}  # fmt: skip


def named(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def rows_of(rank: int, step: int) -> dict[str, Tensor]:
    batch = grpo_reference.rows(SIZES[rank], seed=10 * step + rank)
    if rank:  # fewer tokens per completion, too
        batch["labels"][:, 9:] = -100
    return batch


def both(step: int) -> dict[str, Tensor]:
    parts = [rows_of(rank, step) for rank in (0, 1)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def in_lightning(name: str, model: Any, reference: Any, folder: Path) -> tuple[Any, list[dict]]:
    lightning = importlib.import_module("lightning")
    base = importlib.import_module("grpo_fast.integrations.lightning").GRPOModule
    logged: list[dict] = []

    class Module(base):
        def configure_optimizers(self) -> Any:
            return test_lightning.sgd(self.model)

        def log_dict(self, metrics: dict[str, Tensor]) -> None:
            super().log_dict(metrics)
            logged.append({key: float(value) for key, value in metrics.items()})

    options = dict(LIGHTNING[name][0])
    mode = options.pop("advantages", "normalized")
    config = LossConfig(compute_entropy=True, **options)
    module = Module(model, config, group_size=4, inner_iterations=2, reference=reference,
                    advantages=mode)  # fmt: skip
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, default_root_dir=folder,
    )  # fmt: skip
    batches = [rows_of(distributed.get_rank(), step) for step in range(STEPS)]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return trainer, logged


def lightning_case(name: str, folder: Path) -> Result:
    model = tiny_model("qwen2", num_hidden_layers=1)
    reference = tiny_model("qwen2", num_hidden_layers=1, seed=1) if name == "grpo" else None
    twin = copy.deepcopy(model)
    trainer, logged = in_lightning(name, model, copy.deepcopy(reference), folder)
    optimizer, expected = test_lightning.sgd(twin), []
    for step in range(STEPS):
        given = twin, reference, both(step), optimizer
        options = {"group_size": 4, "inner_iterations": 2, **LIGHTNING[name][1]}
        expected.append(test_lightning.tutorial_step(*given, max_grad_norm=1.0, **options))
    wrapped, logs = type(trainer.strategy).__name__, [expected, logged]
    return outcome(wrapped, trainer.world_size, logs, named(twin), named(model))


def hf_case(folder: Path) -> Result:
    """`PolicyTrainer` of the examples: two steps of two micro-batches on each of two ranks."""
    home = importlib.import_module("grpo_fast.integrations.examples.hf_trainer")
    model = tiny_model("qwen2", num_hidden_layers=1)
    twin, data = copy.deepcopy(model), examples.examples(model)
    config = LossConfig(loss_type="dapo", compute_entropy=True)
    arguments = examples.arguments(folder, per_device_train_batch_size=1, max_grad_norm=100.0)
    trainer = home.PolicyTrainer(model, arguments, train_dataset=data, loss_config=config)
    trainer._get_train_sampler = lambda *_: list(range(8))
    trainer.train()
    expected = []
    for step in (data[:4], data[4:]):  # accelerate deals the rows out, one to each rank by turns
        loss = examples.tutorial_step(twin, step)
        norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
        tokens = float(sum((row["labels"][1:] != -100).sum() for row in step))
        expected.append(
            {"loss": float(loss), "grad_norm": float(norm), "active_tokens": tokens / 2}
        )
    return outcome(
        type(trainer.model_wrapped).__name__, trainer.accelerator.num_processes,
        [expected, trainer.state.log_history[:2]], named(twin), named(model),
    )  # fmt: skip


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Result]]]:
    yield "hf_trainer", partial(hf_case, folder)
    packages.require("lightning")
    for name in LIGHTNING:
        yield f"lightning-{name}", partial(lightning_case, name, folder)
