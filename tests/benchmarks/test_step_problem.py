"""Tests of the problem on which benchmarks/trainers/step.py compares the providers of a step."""

import torch

from benchmarks.trainers.step import make_problem
from grpo_fast import grpo_loss
from tests.loss_cases import relative_l2


def test_rounding_errors_of_logps_move_no_ratio_across_a_clip_bound():
    """Check that errors of about 0.03 in the logps, as in bf16, change the gradient by only 4%.

    A ratio that crosses a clip bound changes the gradient of its token from 0 to its full value.
    """
    problem = make_problem([[2, 3]], group_size=64, longest=64, vocab=9)
    noise = torch.cat(problem.noise)
    errors = 0.03 * torch.randn(len(noise), generator=torch.Generator().manual_seed(0))
    gradients = []
    for moved in (0.0, errors):
        logps = (moved - 3.0 + torch.zeros_like(noise)).requires_grad_()
        grpo_loss(
            logps, problem.samples.advantages, problem.loss,
            cu_seqlens=torch.tensor([0, *problem.samples.lengths]).cumsum(0), old_logps=noise - 3.0,
        ).loss.backward()  # fmt: skip
        gradients.append(logps.grad)
    exact, found = gradients
    assert relative_l2(found, exact) < 0.04
    clipped = exact == 0
    assert torch.equal(found == 0, clipped)
    for side in (noise < 0, noise > 0):
        assert clipped[side].any() and not clipped[side].all()
