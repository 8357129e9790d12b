"""`GRPOModule` over a stand-in for `LightningModule`: its step is a tutorial's in plain torch.

test_two_processes runs it under Lightning itself.
"""

import concurrent.futures
import copy
import functools
import importlib
import sys
import threading
import types

import pytest
import torch

from grpo_fast import LossConfig
from tests import grpo_reference
from tests.tiny import tiny_model

HOME = "grpo_fast.integrations.lightning"
CONFIG = LossConfig(loss_type="grpo", beta=0.05, compute_entropy=True)


class StandIn(torch.nn.Module):
    """`LightningModule` without a Trainer."""

    trainer = types.SimpleNamespace(world_size=1)

    def optimizers(self):
        self.__dict__.setdefault("optimizer", self.configure_optimizers())
        return self.optimizer

    def manual_backward(self, loss):
        loss.backward()

    def log_dict(self, metrics):
        self.__dict__.setdefault("logged", []).append({k: float(v) for k, v in metrics.items()})


@pytest.fixture
def stand_in(monkeypatch):
    """The module's class over `StandIn`."""
    lightning = types.ModuleType("lightning")
    lightning.LightningModule = StandIn
    monkeypatch.setitem(sys.modules, "lightning", lightning)
    monkeypatch.delitem(sys.modules, HOME, raising=False)
    yield importlib.import_module(HOME).GRPOModule
    sys.modules.pop(HOME, None)


@pytest.fixture(scope="module")
def models():
    model = tiny_model("qwen2", num_hidden_layers=1)
    return model, tiny_model("qwen2", num_hidden_layers=1, seed=1)


def tutorial_step(
    model, reference, batch, optimizer, *, group_size, inner_iterations, max_grad_norm,
    advantages=grpo_reference.group_advantages, **loss_options,
) -> dict:  # fmt: skip
    """Old and reference logps once, then μ updates; the means of the metrics."""
    advantages = advantages(batch["rewards"], group_size)
    with torch.no_grad():
        old, _, _ = grpo_reference.token_logps(model, batch)
        ref = None if reference is None else grpo_reference.token_logps(reference, batch)[0]
    seen = []
    for _ in range(inner_iterations):
        given = model, batch, advantages, old, ref
        loss, _, metrics = grpo_reference.grpo(*given, beta=0.05, **loss_options)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        seen.append({**metrics, "loss": loss.detach(), "grad_norm": norm})
    result = {name: float(torch.stack([s[name] for s in seen]).mean()) for name in seen[0]}
    return result | {"reward": float(batch["rewards"].mean())}


def sgd(model) -> torch.optim.Optimizer:
    # Linear in the gradient, so that weights can be compared.
    return torch.optim.SGD(model.parameters(), lr=0.3)


@pytest.mark.parametrize("inner_iterations", [1, 3])
@pytest.mark.parametrize("with_reference", [True, False])
def test_training_step_equals_the_tutorial(stand_in, models, inner_iterations, with_reference):
    model, reference = copy.deepcopy(models[0]), models[1] if with_reference else None
    config = CONFIG if with_reference else CONFIG.replace(beta=0.0)
    options = {"group_size": 4, "inner_iterations": inner_iterations}
    module = stand_in(model, config, reference=reference, **options)
    twin = copy.deepcopy(model)
    module.optimizer, optimizer = sgd(model), sgd(twin)
    for index in (0, 1):
        batch = grpo_reference.rows(8, seed=index)
        module.training_step(batch, index)
        expected = tutorial_step(twin, reference, batch, optimizer, max_grad_norm=1.0, **options)
        for name, value in expected.items():
            assert module.logged[index][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    clipped = [logs["clip_ratio/region_mean"] for logs in module.logged]
    assert (max(clipped) > 0) == (inner_iterations > 1)
    assert "reward_std" in module.logged[0] and ("kl" in module.logged[0]) == with_reference


def test_rollout_gets_the_loaders_batch(stand_in, models):
    seen = []

    def rollout(prompts):
        assert not torch.is_grad_enabled()
        seen.append(prompts)
        return grpo_reference.rows(4)

    config = LossConfig(loss_type="grpo")
    module = stand_in(copy.deepcopy(models[0]), config, group_size=4, rollout=rollout)
    loss = module.training_step("prompts", 0)
    assert seen == ["prompts"] and not loss.requires_grad
    assert not any(map(torch.equal, module.model.parameters(), models[0].parameters()))


class Together:
    """`all_gather` of modules that take their steps side by side, each in a thread of its own."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.slots = threading.Barrier(ranks, timeout=60), [None] * ranks

    def join(self, module, rank: int):
        module.trainer = types.SimpleNamespace(world_size=len(self.slots), global_rank=rank)
        module.all_gather = functools.partial(self.gather, rank)
        return module

    def gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        self.slots[rank] = x
        self.barrier.wait()
        every = torch.stack(self.slots)
        self.barrier.wait()
        return every

    def step(self, modules, batches) -> None:
        def one(rank: int) -> None:
            try:
                modules[rank].training_step(batches[rank], 0)
            except BaseException:
                self.barrier.abort()
                raise

        with concurrent.futures.ThreadPoolExecutor(len(modules)) as pool:
            list(pool.map(one, range(len(modules))))


def in_one(batches: list[dict]) -> dict:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.parametrize("mode", ["normalized", "batch"])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean_global", "fixed_length"])
@pytest.mark.parametrize("tokens", ["uneven", "none"])
def test_two_ranks_take_the_step_of_one(stand_in, models, aggregation, mode, tokens):
    """8 and 4 completions, the second rank with few tokens or none: means are one process's."""
    batches = [grpo_reference.rows(8, seed=1), grpo_reference.rows(4, seed=2)]
    batches[1]["labels"][:, 9 if tokens == "uneven" else 0 :] = -100
    config = CONFIG.replace(aggregation=aggregation, max_completion_length=14)
    still = functools.partial(torch.optim.SGD, lr=0.0)

    def module():
        made = stand_in(
            copy.deepcopy(models[0]), config, group_size=4, advantages=mode, max_grad_norm=0.0,
            reference=copy.deepcopy(models[1]),
        )  # fmt: skip
        made.optimizer = still(made.model.parameters())
        return made

    together, ranks, one = Together(2), [module(), module()], module()
    together.step([together.join(m, rank) for rank, m in enumerate(ranks)], batches)
    one.training_step(in_one(batches), 0)
    assert ranks[0].logged == ranks[1].logged
    for name, value in one.logged[0].items():
        if name != "grad_norm":  # of gradients that DDP has made one
            assert ranks[0].logged[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for whole, *parts in zip(*(m.model.parameters() for m in (one, *ranks)), strict=True):
        mean = torch.stack([p.grad for p in parts]).mean(0)
        torch.testing.assert_close(mean, whole.grad, rtol=1e-4, atol=1e-6)


def test_refusals_name_the_option(stand_in, models):
    for model in (None, torch.nn.Linear(2, 3)):
        name = type(model).__name__
        with pytest.raises(ValueError, match=f"model: expected a transformers .* got {name}"):
            stand_in(model, LossConfig(), group_size=4)
    with pytest.raises(ValueError, match="config: expected a LossConfig, got dict"):
        stand_in(models[0], {"loss_type": "grpo"}, group_size=4)
    with pytest.raises(ValueError, match="inner_iterations: expected a number >= 1, got 0"):
        stand_in(models[0], LossConfig(), group_size=4, inner_iterations=0)
    with pytest.raises(
        ValueError, match="reference, NoneType, conflicts with beta=0.05: pass a model"
    ):
        stand_in(models[0], CONFIG, group_size=4)
    module = stand_in(models[0], LossConfig(), group_size=3)
    with pytest.raises(ValueError, match="rewards: expected groups of 3, got 4 rewards"):
        module.training_step(grpo_reference.rows(4), 0)
    with pytest.raises(ValueError, match="reference, Qwen2For.*, conflicts with beta=0.0"):
        stand_in(models[0], LossConfig(), group_size=4, reference=models[1])


@pytest.mark.parametrize(
    ("strategy", "precision", "pattern"),
    [
        ("FSDPStrategy", "32-true", "strategy: expected .* got FSDPStrategy"),
        ("DeepSpeedStrategy", "bf16-mixed", "strategy: expected"),
        ("SingleDeviceStrategy", "16-mixed", "precision: expected .* got 16-mixed"),
    ],
)
def test_what_the_step_cannot_honour_is_refused(stand_in, models, strategy, precision, pattern):
    module = stand_in(models[0], LossConfig(), group_size=4)
    module.trainer = types.SimpleNamespace(strategy=type(strategy, (), {})(), precision=precision)
    with pytest.raises(ValueError, match=pattern):
        module.on_fit_start()
