"""Test that our options reproduce numbers from the tests of NeMo-RL, SkyRL, verl and slime.

published_numbers.yaml names the file and the test of each project that contain the inputs and
expected values. It also has our options that correspond to the options of that project. The tables
in grpo_fast/integrations/README.md list these options by key.
"""

import math
from pathlib import Path

import pytest
import torch
import yaml

from grpo_fast import LossConfig, group_advantages, grpo_loss
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.objective.ppo import gae

FILES = yaml.safe_load(Path(__file__).with_name("published_numbers.yaml").read_text("utf-8"))
PUBLISHED = [
    pytest.param(file["compute"], row, id=f"{file['source'].split('/')[0]}-{row['test']}-{number}")
    for file in FILES
    for number, row in enumerate(file["rows"])
]


def weights(log_ratios, corrections, mask=None):
    """Return the correction weight of every active token.

    With advantage -1 and logp 0, the gradient of the loss with respect to the logp of a token is
    its correction weight.
    """
    rows = torch.tensor(log_ratios)
    mask = torch.ones_like(rows) if mask is None else torch.tensor(mask)
    config = LossConfig("reinforce", corrections=corrections)
    logps, old = torch.zeros_like(rows, requires_grad=True), torch.zeros_like(rows)
    loss = grpo_loss(
        logps, -torch.ones(len(rows)), config, completion_mask=mask, old_logps=old,
        sampling_logps=-rows, num_items_in_batch=1,
    ).loss  # fmt: skip
    loss.backward()
    assert logps.grad is not None
    return logps.grad[mask.bool()]


def kl(lp, ref, **config):
    options = LossConfig(beta=1.0, **config)
    d = torch.tensor(ref) - torch.tensor(lp)
    return KL_ESTIMATORS[options.kl_estimator](d, *options.kl_limits)[0]


def kl_slope(lp, ref, **config):
    options = LossConfig("reinforce", beta=1.0, **config)
    logps = torch.tensor([lp], requires_grad=True)
    grpo_loss(
        logps, torch.zeros(1), options, ref_logps=torch.tensor([ref]), num_items_in_batch=1
    ).loss.backward()
    assert logps.grad is not None
    return logps.grad[0]


def advantages(rewards, **options):
    return group_advantages(torch.tensor(rewards), **options)


def values(rewards, values, returns=False, mask=None, **options):
    mask = None if mask is None else torch.tensor([mask])
    found = gae(torch.tensor([rewards]), torch.tensor([values]), mask=mask, **options)[0]
    found = found + torch.tensor(values) if returns else found
    return found if mask is None else found[mask[0].bool()]


def loss(lp, old, advantages, sampling=None, mask=None, items=1, **config):
    options = LossConfig(**config)
    listed = {"completion_mask": mask, "old_logps": old, "sampling_logps": sampling}
    given = {name: None if x is None else torch.tensor(x) for name, x in listed.items()}
    output = grpo_loss(
        torch.tensor(lp), torch.tensor(advantages), options, num_items_in_batch=items, **given
    )
    return output.loss[None]


COMPUTE = {f.__name__: f for f in (weights, kl, advantages, values, loss)}


@pytest.mark.parametrize(("compute", "row"), PUBLISHED)
def test_published_numbers(compute, row):
    found, tolerance = COMPUTE[compute](**row["inputs"]).tolist(), row.get("tolerance", 1e-4)
    assert found == pytest.approx(row["expected"], rel=tolerance, abs=tolerance)


def test_slopes_of_a_clamped_kl():
    """Check that the slope of a KL is 0 where a clamp is active, as in a test of NeMo-RL.

    The test is test_calculate_kl_detaches_importance_sampling_when_input_clamped. The gradient
    through the ratio is not compared, because NeMo-RL detaches it and our code does not. The last
    expected slopes, of a KL without a clamp, are the numbers in objective/README.md.
    """
    clamped = kl_slope([-3.0, -1.0], [0.0, 0.0], kl_input_clamp=2.0)
    assert clamped.tolist() == pytest.approx([0.0, 1.0 - math.e], rel=1e-6)
    assert kl_slope([-5.0, -1.0], [0.0, 0.0], kl_clamp=10.0).tolist()[0] == 0.0
    free = kl_slope([-5.0, -10.0, -20.0], [0.0, 0.0, 0.0])
    assert free.tolist() == pytest.approx([-147.41, -2.2025e4, -4.8517e8], rel=1e-4)
