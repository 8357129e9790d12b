"""Cases that train with Lightning and with transformers' `Trainer` on two ranks.

For comparison, plain torch trains in one process on the rows of both ranks.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from grpo_fast import LossConfig
from tests import grpo_reference
from tests.integrations import packages
from tests.integrations import test_examples as examples
from tests.integrations.two_trl import Result, outcome
from tests.tiny import tiny_model

SIZES = (8, 4)  # number of completions in the batches of rank 0 and rank 1
STEPS = 2


# For each case, the options of our loss and the equivalent options of the plain torch reference.
LIGHTNING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo", "beta": 0.05}, {}),
    "dapo": ({"loss_type": "dapo"}, {"by_token": True}),
}
LOGGED = "loss", "grad_norm"


def sgd(model: Any) -> torch.optim.Optimizer:
    # Use SGD, because its step is linear in the gradient. AdamW would amplify rounding errors.
    return torch.optim.SGD(model.parameters(), lr=0.3)


def tutorial_step(model, reference, batch, optimizer, **options: Any) -> dict[str, float]:
    """Train on a batch in plain torch, and return the mean metrics of its two updates."""
    advantages = grpo_reference.group_advantages(batch["rewards"], 4)
    with torch.no_grad():
        ref = None if reference is None else grpo_reference.token_logps(reference, batch)[0]
    options |= {"beta": 0.05, "max_norm": 1.0}
    seen = examples.updates(model, batch, advantages, optimizer, ref, **options)
    return {name: float(sum(metrics[name] for metrics in seen)) / 2 for name in LOGGED}


def named(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def rows_of(rank: int, step: int) -> dict[str, Tensor]:
    batch = grpo_reference.rows(SIZES[rank], seed=10 * step + rank)
    if rank:  # shorten the completions of rank 1, so that the ranks' token counts differ
        batch["labels"][:, 9:] = -100
    return batch


def both(step: int) -> dict[str, Tensor]:
    parts = [rows_of(rank, step) for rank in (0, 1)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def in_lightning(name: str, model: Any, reference: Any, folder: Path) -> tuple[Any, list[dict]]:
    lightning = importlib.import_module("lightning")
    base = importlib.import_module("grpo_fast.examples.lightning_module").GRPOModule
    logged: list[dict] = []

    class Module(base):
        def configure_optimizers(self) -> Any:
            return sgd(self.model)

        def on_train_batch_end(self, *_: Any) -> None:
            seen = self.trainer.callback_metrics
            logged.append({key: float(seen[key]) for key in LOGGED})

    config = LossConfig(compute_entropy=True, **LIGHTNING[name][0])
    module = Module(model, config, group_size=4, inner_iterations=2, reference=reference)
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
    optimizer, expected = sgd(twin), []
    for step in range(STEPS):
        given = twin, reference, both(step), optimizer
        expected.append(tutorial_step(*given, **LIGHTNING[name][1]))
    wrapped, logs = type(trainer.strategy).__name__, [expected, logged]
    return outcome(wrapped, trainer.world_size, logs, named(twin), named(model))


def hf_case(folder: Path) -> Result:
    """Train with `PolicyTrainer` on two ranks, and return the comparison with plain torch.

    Each rank makes two optimizer steps of two micro-batches.
    """
    model = tiny_model("qwen2", num_hidden_layers=1)
    twin, data = copy.deepcopy(model), examples.examples(model)
    config = LossConfig(loss_type="dapo", compute_entropy=True)
    arguments = examples.arguments(folder, per_device_train_batch_size=1, max_grad_norm=100.0)
    trainer = examples.PolicyTrainer(model, arguments, train_dataset=data, loss_config=config)
    trainer._get_train_sampler = lambda *_: list(range(8))
    trainer.train()
    expected = []
    for step in (data[:4], data[4:]):  # accelerate gives each rank every second row
        loss = examples.tutorial_step(twin, step)
        norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
        expected.append({"loss": float(loss), "grad_norm": float(norm)})
    return outcome(
        type(trainer.model_wrapped).__name__, trainer.accelerator.num_processes,
        [expected, trainer.state.log_history[:2]], named(twin), named(model),
    )  # fmt: skip


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], Result]]]:
    yield "hf_trainer", partial(hf_case, folder)
    packages.require("lightning")
    for name in LIGHTNING:
        yield f"lightning-{name}", partial(lightning_case, name, folder)
