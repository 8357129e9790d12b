"""prime-rl's custom loss, by its documented interface: the package itself is on no index."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from grpo_fast.integrations.prime_rl import policy_loss


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    teacher_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def inputs(seed: int = 0, length: int = 11, teacher: bool = False) -> LossInputs:
    random = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(length, generator=random)
    new = (old + 0.3 * torch.randn(length, generator=random)).requires_grad_()
    mask = torch.rand(length, generator=random) > 0.3
    advantages = torch.randn(length, generator=random)
    return LossInputs(new, old, old - 0.2 if teacher else None, advantages, mask)


def test_clipped_loss_is_a_sum_over_the_sequence():
    """The documented example of a custom loss (PPO clip), written out."""
    x = inputs()
    out = policy_loss(x, loss_type="grpo", epsilon_low=0.2)
    out.loss.backward()
    gradient = x.trainer_logprobs.grad.clone()
    x.trainer_logprobs.grad = None
    ratio = torch.exp(x.trainer_logprobs - x.inference_logprobs)
    surrogate = torch.minimum(ratio * x.advantages, ratio.clamp(0.8, 1.2) * x.advantages)
    expected = -surrogate[x.loss_mask].sum()
    expected.backward()
    assert isinstance(out, LossOutputs)
    torch.testing.assert_close(out.loss, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, x.trainer_logprobs.grad, rtol=1e-5, atol=1e-6)
    clipped = ((ratio > 1.2) & (x.advantages > 0)) | ((ratio < 0.8) & (x.advantages < 0))
    share = clipped[x.loss_mask].float().mean()
    torch.testing.assert_close(out.metrics["clip_ratio/region_mean"], share)
    assert all(isinstance(v, Tensor) and v.dim() == 0 for v in out.metrics.values())


def test_sequence_mean_and_the_teacher():
    x = inputs(teacher=True)
    total = policy_loss(x, loss_type="dapo", beta=0.1).loss
    mean = policy_loss(x, loss_type="dapo", beta=0.1, aggregation="sequence_mean").loss
    torch.testing.assert_close(mean * x.loss_mask.sum(), total)
    d = x.teacher_logprobs - x.trainer_logprobs
    kl = (d.exp() - d - 1)[x.loss_mask].sum()
    without = policy_loss(inputs(), loss_type="dapo").loss
    torch.testing.assert_close(total, without + 0.1 * kl, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "teacher", "pattern"),
    [
        ({"aggregation": "token_mean_local"}, False, "aggregation: expected one of"),
        ({"entropy_coef": 0.1}, False, "entropy_coef: .*prime-rl gives"),
        ({"clip": 0.1}, False, "kwargs: expected fields of LossConfig"),
        ({"loss_type": "ppo"}, False, "loss_type: expected one of"),
        (
            {"beta": 0.1},
            False,
            "teacher_logprobs, None, conflicts with beta=0.1: .*teacher's logps",
        ),
        ({}, True, "teacher_logprobs, a tensor, conflicts with beta=0.0"),
    ],
)
def test_refusals_name_the_option(options, teacher, pattern):
    with pytest.raises(ValueError, match=pattern):
        policy_loss(inputs(teacher=teacher), **options)


def test_something_else_than_loss_inputs_is_refused():
    stranger = type("Stranger", (), {"__module__": "dataclasses", **vars(inputs())})()
    with pytest.raises(ValueError, match="inputs: expected prime-rl's LossInputs"):
        policy_loss(stranger)
