"""Tests of the folder of `make hub`, which the package `kernels` loads next to grpo_fast."""

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

import grpo_fast
from grpo_fast.kernels.cpu import loader
from tests import hub
from tests.integrations import packages

with packages.skipping():
    packages.require("kernels")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    folder = tmp_path_factory.mktemp("hub")
    hub.build(folder)
    return importlib.import_module("kernels").get_local_kernel(folder, backend="cpu")


def loss_and_gradients(package: ModuleType, compiled: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 16, generator=generator, requires_grad=True)
    weight = torch.randn(2100, 16, generator=generator, requires_grad=True)
    ids = torch.randint(2100, (12,), generator=generator)
    advantages = torch.randn(12, generator=generator)
    loss = package.linear_grpo_loss
    if compiled:
        loss = torch.compile(loss, backend="aot_eager")
    lengths = torch.tensor([0, 5, 12], dtype=torch.int32)
    config = package.LossConfig(compute_entropy=True)
    output = loss(hidden, weight, ids, advantages, config, cu_seqlens=lengths)
    output.loss.backward()
    return [output.loss.detach(), output.logps, output.entropy, hidden.grad, weight.grad]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_copy_computes_the_same_bits(copy: ModuleType, compiled: bool) -> None:
    ours = loss_and_gradients(grpo_fast, compiled)
    theirs = loss_and_gradients(copy, compiled)
    assert theirs[0] != 0 and copy.linear_grpo_loss is not grpo_fast.linear_grpo_loss
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.skipif(loader.unavailable() is not None, reason="no C++ kernels on this machine")
def test_both_copies_have_their_own_cpp_operators(copy: ModuleType) -> None:
    loss_and_gradients(copy)
    assert getattr(torch.ops, f"{copy.__name__}_rows").row_logps
    assert torch.ops.grpo_fast_rows.row_logps
