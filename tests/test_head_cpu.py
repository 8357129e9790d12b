"""`head_loss`, a small batch in one call: bit for bit the long way through linear.py, and what it leaves to that."""

from __future__ import annotations

import pytest
import torch

from grpo_fast import LossConfig, linear_grpo_loss
from grpo_fast.kernels import csrc_loader, gemm_cpu, head_cpu
from grpo_fast.kernels.gradient_sums import Wanted

REASON = csrc_loader.load("rows") or gemm_cpu.unavailable(torch.float32)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"not here: {(REASON or '').splitlines()[:1]}")

CONFIGS = {
    "dapo": LossConfig(),
    "kl": LossConfig(loss_type="grpo", beta=0.1, kl_times_ratio=True),
    "rule": LossConfig(softcap=20.0, temperature=0.8, logit_scale=0.5, compute_entropy=True),
    "cispo": LossConfig(loss_type="cispo"),
    "length": LossConfig(loss_type="dr_grpo", max_completion_length=90),
}
# One row; fewer than a block; the bar's; more rows than a slice of k, and no multiple of 32.
SHAPES = [(1, 1, 1), (6, 7, 13), (64, 64, 512), (300, 40, 131)]


@pytest.fixture
def doors(monkeypatch) -> list:
    """What came back from every call of `head_loss`."""
    results, real = [], head_cpu.head_loss

    def head_loss(*arguments):
        results.append(real(*arguments))
        return results[-1]

    monkeypatch.setattr(head_cpu, "head_loss", head_loss)
    return results


def make(shape: tuple[int, int, int], config: LossConfig = CONFIGS["dapo"], **changes) -> dict:
    rows, depth, columns = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    first = (rows + 1) // 3
    case = {
        "hidden": normal(rows, depth),
        "lm_head_weight": normal(columns, depth) / depth**0.5,
        "target_ids": torch.randint(0, columns, (rows,), generator=generator),
        "advantages": normal(3),
        "cu_seqlens": torch.tensor([0, first, first, rows]),  # the second completion is empty
        "old_logps": -8 * torch.rand(rows, generator=generator),
        "ref_logps": -8 * torch.rand(rows, generator=generator) if config.beta else None,
        "config": config,
    }
    return {**case, **changes}


def results(case: dict, wanted: tuple[bool, bool] = (True, True)) -> tuple:
    h, w = (case[x].detach().requires_grad_(y) for x, y in zip(("hidden", "lm_head_weight"), wanted, strict=True))
    out = linear_grpo_loss(**{**case, "hidden": h, "lm_head_weight": w})
    gradients = torch.autograd.grad(out.loss, [x for x in (h, w) if x.requires_grad])
    return (out.loss.detach(), out.logps, out.entropy, *gradients, *out.metrics.values())


def same_bits(case: dict, monkeypatch, wanted: tuple[bool, bool] = (True, True)) -> None:
    one = results(case, wanted)
    with monkeypatch.context() as patch:
        patch.setattr(head_cpu, "takes", lambda *arguments: False)
        other = results(case, wanted)
    for left, right in zip(one, other, strict=True):
        assert left is right is None or torch.equal(left, right)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_kind_of_loss_bit_for_bit(shape, name: str, doors, monkeypatch) -> None:
    same_bits(make(shape, CONFIGS[name]), monkeypatch)
    assert len(doors) == 1 and doors[0] is not None


def idle(share: float, rows: int) -> torch.Tensor:
    """Advantages by token, 0 at this share of them."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, generator=generator) * (torch.rand(rows, generator=generator) >= share)


@pytest.mark.parametrize("rows", [64, 300])
@pytest.mark.parametrize("share", [0.05, 0.4, 1.0])
def test_rows_without_a_coefficient(rows: int, share: float, doors, monkeypatch) -> None:
    """A few are multiplied as zeros, many are left out, on the same side of the same bound."""
    same_bits(make((rows, 40, 131), advantages=idle(share, rows)), monkeypatch)
    assert doors[0] is not None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masked_rows_are_inert(dtype: torch.dtype, doors, monkeypatch) -> None:
    case = make((300, 40, 131))
    mask = torch.rand(300, generator=torch.Generator().manual_seed(2)) < 0.6
    case["hidden"][~mask], case["target_ids"][~mask], case["old_logps"][~mask] = torch.nan, -100, torch.nan
    for advantages in (case["advantages"], idle(0.4, 300)):
        masked = {**case, "completion_mask": mask.to(dtype), "advantages": advantages}
        same_bits(masked, monkeypatch)
        assert doors[-1] is not None and not doors[-1].d_hidden[~mask].any() and not doors[-1].logps[~mask].any()
        assert all(x.isfinite().all() for x in doors[-1][2:])


@pytest.mark.parametrize(
    "changes",
    [
        {"bias": torch.linspace(-1, 1, 512)},
        {"num_items_in_batch": 17.0},
        {"num_items_in_batch": torch.tensor(17)},
        {"old_logps": None},
        {"config": LossConfig(temperature=torch.linspace(0.5, 2, 64))},
        {"hidden": torch.randn(64, 80, generator=torch.Generator().manual_seed(4))[:, 3:67]},
    ],
    ids=lambda changes: "-".join(changes),
)
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_options_bit_for_bit(changes: dict, wanted: tuple[bool, bool], doors, monkeypatch) -> None:
    same_bits(make((64, 64, 512), **changes), monkeypatch, wanted)
    assert doors[0] is not None


def test_padded_layout(doors, monkeypatch) -> None:
    case = make((64, 64, 512), cu_seqlens=None, advantages=torch.tensor([1.0, -2.0]))
    padded = {x: case[x].view(2, 32, *case[x].shape[1:]) for x in ("hidden", "target_ids", "old_logps")}
    same_bits({**case, **padded}, monkeypatch)
    assert doors[0] is not None


def test_threads_change_no_bit() -> None:
    case, before = make((300, 64, 512)), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = results(case)
        torch.set_num_threads(2)
        assert all(
            left is right is None or torch.equal(left, right) for left, right in zip(one, results(case), strict=True)
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "changes",
    [
        {"config": LossConfig(loss_type="gspo")},
        {"config": LossConfig(entropy_coef=0.1)},
        {"target_ids": torch.zeros(6, dtype=torch.int32)},
        {"completion_mask": torch.zeros(6, dtype=torch.bool)},
        {"lm_head_weight": torch.zeros(7, 13).t()},
        {"bias": torch.zeros(13).bfloat16()},
        {"grad_filter": 0.1},
        {"hidden_rows": torch.arange(6)},
        {"backend": "torch"},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_what_takes_the_long_way(changes: dict, doors) -> None:
    results(make((6, 7, 13), **changes))
    assert doors in ([], [None])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight", torch.zeros(33, 9), "weight: expected .* H = 8, got 9"),
        ("weight", torch.zeros(8, 33).t(), "weight: expected a contiguous last dimension"),
        ("weight", torch.zeros(33, 8).double(), "weight: expected float32"),
        ("hidden", torch.zeros(20, 8).bfloat16(), "hidden: expected float32"),
        ("hidden", torch.zeros(8), "hidden: expected a matrix, got 1 dim"),
        ("bias", torch.zeros(32), "bias: expected one value for each of 33"),
    ],
)
def test_the_door_refuses_what_does_not_fit(name: str, value: torch.Tensor, message: str, monkeypatch) -> None:
    monkeypatch.setattr(head_cpu, "take_workspace", lambda *arguments: torch.empty(20, 33))
    x = {"hidden": torch.zeros(20, 8), "weight": torch.zeros(33, 8), "bias": None, name: value}
    tokens = torch.zeros(20, dtype=torch.int64), torch.ones(1), None, 1, None, None, None, None
    with pytest.raises(RuntimeError, match=message):
        head_cpu.head_loss(*x.values(), tokens, None, False, LossConfig(), Wanted(True, True, False))


def test_a_target_of_probability_zero_is_refused(doors) -> None:
    case = make((6, 7, 13), bias=torch.where(torch.arange(13) == 4, -torch.inf, 0.0))
    case["target_ids"][2] = 4
    with pytest.raises(ValueError, match="target_ids: expected targets of finite probability"):
        results(case)
    assert doors[0] is not None
