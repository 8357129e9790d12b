"""Test that our options reproduce numbers from the tests of NeMo-RL, SkyRL, verl and slime.

Each row names the file and the test that contain the inputs and expected values. It also has our
options that correspond to the options of that project. The tables in
grpo_fast/integrations/README.md list these options by key. The commits are NVIDIA-NeMo/RL 7ea279a,
NovaSky-AI/SkyRL a956457, volcengine/verl b178a3c and THUDM/slime 624b824.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

from grpo_fast import LossConfig, group_advantages, grpo_loss
from grpo_fast.objective.gae import gae
from grpo_fast.objective.kl import KL_ESTIMATORS

NEMO_LOSS = "NVIDIA-NeMo/RL tests/unit/algorithms/test_loss_functions.py"
NEMO_UTILS = "NVIDIA-NeMo/RL tests/unit/algorithms/test_utils.py"
NEMO_GRPO = "NVIDIA-NeMo/RL tests/unit/algorithms/test_grpo.py"
NEMO_PPO = "NVIDIA-NeMo/RL tests/unit/algorithms/test_ppo.py"
SKY_CORRECTION = "NovaSky-AI/SkyRL tests/train/algorithms/test_off_policy_correction.py"
SKY_LOSSES = "NovaSky-AI/SkyRL tests/train/algorithms/test_losses.py"
SKY_PPO = "NovaSky-AI/SkyRL tests/backends/skyrl_train/utils/test_ppo_utils.py"
VERL = "volcengine/verl tests/trainer/ppo/test_rollout_corr.py"
SLIME = "THUDM/slime tests/test_cispo_loss.py"


class Row(NamedTuple):
    source: str
    test: str
    compute: str  # name of a function of this module that computes our numbers
    inputs: dict[str, Any]
    expected: list[float]
    tolerance: float = 1e-4


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


def reject(level, low, high):
    return {"kind": "reject", "level": level, "low": low, "high": high}


NEMO_KL = {"lp": [-1.0, -1.0, -1.0], "ref": [0.0, -15.0, -30.0]}
CLAMPS = {"kl_clamp": 10.0, "kl_input_clamp": 20.0}
TOKEN_MASK = reject("token", 0.5, 2.0)
OUTLIER = reject("worst_token", 1e-4, 100.0)
LOO = {"mode": "rloo_normalized", "group_size": 3}
SKY = {"rewards": [1.0, 2.0, 3.0], "values": [0.5, 1.0, 1.5], "returns": True}
MEANS = {"loss_type": "reinforce", "old": None}

PUBLISHED = [
    # The options of NeMo-RL are reference_policy_kl_type, kl_input_clamp_value: 20 and
    # kl_output_clamp_value: 10.
    *[
        Row(NEMO_LOSS, "test_calculate_kl", "kl", {**NEMO_KL, "kl_estimator": name, **clamps},
            expected, 1e-3)
        for name, clamps, expected in (
            ("k1", {}, [-1.0, 14.0, 29.0]), ("k2", {}, [0.5, 98.0, 420.5]),
            ("k3", {}, [0.7183, 13.0, 28.0]), ("k1", CLAMPS, [-1.0, 10.0, 10.0]),
            ("k2", CLAMPS, [0.5, 10.0, 10.0]), ("k3", CLAMPS, [0.7183, 10.0, 10.0]))
    ],
    Row(NEMO_LOSS, "test_calculate_kl_detaches_importance_sampling_when_input_clamped", "kl",
        {"lp": [-3.0, -1.0], "ref": [0.0, 0.0], "kl_input_clamp": 2.0}, [4.389056, 0.7182818]),
    # The option of NeMo-RL is truncated_importance_sampling_type: icepop, tis or seq-mask-tis.
    Row(NEMO_LOSS, "test_clipped_pg_loss_icepop_importance_sampling", "weights",
        {"log_ratios": [[-0.5, 2.5, -0.2]],
         "corrections": {"kind": "mask", "low": 0.5, "high": 5.0}}, [0.6065, 0.0, 0.8187]),
    Row(NEMO_LOSS, "test_clipped_pg_loss_tis_min_bound_defaults_to_zero", "weights",
        {"log_ratios": [[math.log(0.1), 0.0, math.log(3.0)]], "corrections": {"high": 2.0}},
        [0.1, 1.0, 2.0]),
    Row(NEMO_LOSS, "test_clipped_pg_loss_tis_min_bound_defaults_to_zero", "weights",
        {"log_ratios": [[math.log(0.1), 0.0, math.log(3.0)]],
         "corrections": {"low": 0.5, "high": 2.0}}, [0.5, 1.0, 2.0]),
    Row(NEMO_LOSS, "test_clipped_pg_loss_seq_mask_tis", "weights",
        {"log_ratios": [[0.0005, 0.0005, 0.0005]],
         "corrections": [{}, reject("geometric", 0.999, 1.002)]}, [1.0005, 1.0005, 1.0005]),
    # The options of NeMo-RL are use_leave_one_out_baseline and normalize_rewards. The advantage is
    # (r - baseline)/(std + 1e-6).
    Row(NEMO_UTILS, "test_calculate_baseline_and_std_per_prompt_basic", "advantages",
        {"rewards": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], **LOO},
        [(r - b) / s for r, b, s in zip(range(1, 7), [2.5, 2.0, 1.5, 5.5, 5.0, 4.5],
                                        [0.707107, 1.414214, 0.707107] * 2, strict=True)]),
    Row(NEMO_UTILS, "test_calculate_baseline_and_std_per_prompt_identical_rewards", "advantages",
        {"rewards": [3.0, 3.0, 3.0, 7.0, 7.0, 7.0], **LOO}, [0.0] * 6),
    Row(NEMO_UTILS, "test_calculate_baseline_and_std_per_prompt_nan_handling", "advantages",
        {"rewards": [1.0, math.nan, 3.0, 4.0, 5.0, 6.0], **LOO},
        [1.0 - 3.0, 0.0, 3.0 - 1.0, -1.5 / 0.707107, 0.0, 1.5 / 0.707107]),
    Row(NEMO_GRPO, "test_gdpo_advantage_estimator_multiple_rewards", "advantages",
        {"rewards": [[1.0, 1.0], [1.0, -1.0], [1.0, 0.0]], "mode": "gdpo", "group_size": 2,
         "eps": 0.0}, [0.7071, -0.7071]),
    Row(NEMO_GRPO, "test_grpo_advantage_estimator_zero_std", "advantages",
        {"rewards": [2.0, 2.0, 1.0, 3.0], "group_size": 2, "eps": 1e-6},
        [0.0, 0.0, -0.7071, 0.7071]),
    Row(NEMO_GRPO, "test_clip_grpo_advantages_respects_config_bounds", "advantages",
        {"rewards": [-10.0, 15.0, 0.0, 5.0], "mode": "rewards", "group_size": 1,
         "clip_low": -2.0, "clip_high": 3.0}, [-2.0, 3.0, 0.0, 3.0]),
    # The options of NeMo-RL are gae_lambda and gae_gamma. The value 999 is at a masked token and
    # must not be read.
    Row(NEMO_PPO, "test_gae_gamma_lambda_zero", "values",
        {"rewards": [0.0, 0.0, 5.0], "values": [1.0, 2.0, 3.0], "gamma": 1.0, "lam": 0.0},
        [1.0, 1.0, 2.0]),
    Row(NEMO_PPO, "test_gae_carry_forward_interior_gap", "values",
        {"rewards": [0.0, 0.0, 0.0, 0.0, 1.0], "values": [0.1, 0.2, 999.0, 0.4, 0.5],
         "mask": [1, 1, 0, 1, 1], "gamma": 0.99, "lam": 0.95}, [0.7823, 0.7276, 0.5653, 0.5]),
    # The options of SkyRL have the prefix off_policy_correction, such as tis_ratio_type and
    # token_tis_ratio_clip_high.
    Row(SKY_CORRECTION, "test_compute_tis_ratio_token_level", "weights",
        {"log_ratios": [[0.5, -0.5, 1.0]], "corrections": {"high": 2.0}}, [1.6487, 0.6065, 2.0]),
    Row(SKY_CORRECTION, "test_compute_tis_ratio_sequence_level", "weights",
        {"log_ratios": [[0.5, -0.5, 1.0]], "corrections": {"level": "product", "high": 5.0}},
        [2.7183] * 3),
    Row(SKY_CORRECTION, "test_compute_tis_ratio_sequence_level_with_cap", "weights",
        {"log_ratios": [[1.0, 1.0, 1.0]], "corrections": {"level": "product", "high": 5.0}},
        [5.0] * 3),
    Row(SKY_CORRECTION, "test_compute_tis_ratio_with_mask", "weights",
        {"log_ratios": [[0.5, -0.5, 1.0]], "mask": [[1.0, 0.0, 1.0]],
         "corrections": {"level": "product", "high": 10.0}}, [4.4817] * 2),
    *[
        Row(SKY_CORRECTION, test, "weights", {"log_ratios": [log_ratios], "corrections": rejection,
                                              **more}, expected)
        for test, log_ratios, rejection, expected, more in (
            ("test_compute_sequence_mask_geometric", [0.1, -0.1, 0.0],
             reject("geometric", 0.9, 1.1), [1.0] * 3, {}),
            ("test_compute_sequence_mask_geometric_rejects", [0.5] * 3,
             reject("geometric", 0.9, 1.1), [0.0] * 3, {}),
            ("test_compute_sequence_mask_product", [0.2, 0.1, 0.0],
             reject("product", 0.5, 2.0), [1.0] * 3, {}),
            ("test_compute_sequence_mask_product_rejects_by_seq_ratio", [1.0] * 3,
             reject("product", 0.5, 2.0), [0.0] * 3, {}),
            ("test_compute_outlier_token_mask_masks_by_token_bounds", [0.0, 0.0, 5.0], OUTLIER,
             [0.0] * 3, {}),
            ("test_compute_outlier_token_mask_accepts_in_bounds", [0.5, -0.5, 0.0], OUTLIER,
             [1.0] * 3, {}),
            ("test_compute_outlier_token_mask_respects_loss_mask", [0.0, 0.0, 5.0], OUTLIER,
             [1.0] * 2, {"mask": [[1.0, 1.0, 0.0]]}),
            ("test_compute_outlier_token_mask_only_low_threshold", [0.0, 0.0, -10.0],
             reject("worst_token", 1e-4, None), [0.0] * 3, {}),
            ("test_compute_token_mask_masks_high_ratio_tokens", [0.0, 0.0, 2.0], TOKEN_MASK,
             [1.0, 1.0, 0.0], {}),
            ("test_compute_token_mask_masks_low_ratio_tokens", [0.0, 0.0, -2.0], TOKEN_MASK,
             [1.0, 1.0, 0.0], {}),
            ("test_compute_token_mask_boundary_values", [math.log(0.5), math.log(2.0)], TOKEN_MASK,
             [1.0, 1.0], {}))
    ],
    Row(SKY_CORRECTION, "test_compute_token_mask_multi_sequence_batch", "weights",
        {"log_ratios": [[0.0, 2.0], [-2.0, 0.0]], "corrections": TOKEN_MASK}, [1.0, 0.0, 0.0, 1.0]),
    Row(SKY_CORRECTION, "test_compute_off_policy_correction_both_enabled", "weights",
        {"log_ratios": [[0.1] * 3], "corrections": [{"high": 2.0}, reject("geometric", 0.8, 1.2)]},
        [1.1052] * 3),
    Row(SKY_LOSSES, "test_policy_loss_dual_clip", "loss",
        {"lp": [[-1.69315, -1.0, -0.69741]], "old": [[-1.0, -1.0, -3.0]],
         "advantages": [[1.0, -1.0, -4.0]], "loss_type": "dual_clip", "dual_clip_c": 3.0,
         "aggregation": "sequence_sum"}, [12.5]),
    Row(SKY_LOSSES, "test_policy_loss_cispo", "loss",
        {"lp": [[-1.69315, -1.0, -0.69741]], "old": [[-1.0, -1.0, -3.0]],
         "advantages": [[1.0, -1.0, -4.0]], "loss_type": "cispo", "cispo_bound": "offset"},
        [-2.9930]),
    Row(SKY_PPO, "test_compute_rloo_outcome_advantage_basic", "advantages",
        {"rewards": [6.0, 3.0, 9.0, 12.0], "mode": "rloo", "group_size": 2},
        [3.0, -3.0, -3.0, 3.0]),
    Row(SKY_PPO, "test_compute_grpo_outcome_advantage_norm_std_false", "advantages",
        {"rewards": [6.0, 3.0, 9.0, 12.0], "mode": "centered", "group_size": 2},
        [1.5, -1.5, -1.5, 1.5]),
    Row(SKY_PPO, "test_compute_maxrl_advantage", "advantages",
        {"rewards": [6.0, 3.0, 9.0, 12.0], "mode": "maxrl", "group_size": 2},
        [1.5 / 4.5, -1.5 / 4.5, -1.5 / 10.5, 1.5 / 10.5]),
    Row(SKY_PPO, "test_compute_gae_advantage_return", "values", {**SKY, "gamma": 1.0, "lam": 1.0},
        [6.0, 5.0, 3.0]),
    Row(SKY_PPO, "test_compute_gae_advantage_return_gamma", "values",
        {**SKY, "gamma": 0.5, "lam": 1.0}, [2.75, 3.5, 3.0]),
    Row(SKY_PPO, "test_compute_gae_advantage_return_lam", "values",
        {**SKY, "gamma": 1.0, "lam": 0.5}, [3.625, 4.25, 3.0]),
    Row(SKY_PPO, "test_compute_reinforce_plus_plus_outcome_advantage_gamma", "values",
        {"rewards": [1.0, 2.0, 3.0], "values": [0.0] * 3, "gamma": 0.5, "lam": 1.0},
        [2.75, 3.5, 3.0]),
    # SkyRL's option is loss_reduction. SkyRL's tests compute averages of the advantages. A
    # REINFORCE loss with logps of -1 gives the same numbers.
    Row(SKY_PPO, "TestApplyLossReductionToAdvantagesMinibatch.test_prompt_mean", "loss",
        {"lp": [[-1.0, -1.0]] * 4, "advantages": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]],
         "mask": [[1.0, 1.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]], "items": None,
         "aggregation": "prompt_mean", "group_size": 2, **MEANS}, [4.25]),
    Row(SKY_PPO, "TestApplyLossReductionToAdvantagesMinibatch.test_sequence_mean", "loss",
        {"lp": [[-1.0, -1.0]] * 2, "advantages": [[1.0, 2.0], [3.0, 4.0]],
         "mask": [[1.0, 1.0], [1.0, 0.0]], "aggregation": "sequence_mean", **MEANS}, [2.25]),
    Row(SKY_PPO, "TestApplyLossReductionToAdvantagesMinibatch.test_token_mean", "loss",
        {"lp": [[-1.0] * 3] * 2, "advantages": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
         "mask": [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]], "items": None, **MEANS}, [3.6]),
    Row(SKY_PPO, "TestApplyLossReductionToAdvantagesMinibatch.test_seq_mean_token_sum_norm", "loss",
        {"lp": [[-1.0, -1.0]] * 2, "advantages": [[2.0, 3.0], [9.0, 12.0]],
         "mask": [[1.0, 1.0], [1.0, 0.0]], "aggregation": "fixed_length",
         "max_completion_length": 10, **MEANS}, [0.7]),
    # verl's options are rollout_is=token, rollout_is_threshold=2, and rollout_rs=token_k1 with the
    # bounds "0.5_2.0". In verl, these bounds apply to the inverse ratio, the probability of the
    # sampler divided by the probability of the trainer.
    Row(VERL, "test_mask_mode", "weights",
        {"log_ratios": [[-1.0] * 5, [0.5] * 5], "corrections": {"high": 2.0}},
        [0.368] * 5 + [1.649] * 5, 1e-3),
    Row(VERL, "test_mask_mode", "weights",
        {"log_ratios": [[-1.0] * 5, [0.5] * 5], "corrections": reject("token", 1 / 2, 1 / 0.5)},
        [0.0] * 5 + [1.0] * 5),
    # slime's options for "cispo" are eps_clip and eps_clip_high. The loss of a token is
    # -(clamped ratio)·A·logp.
    *[
        Row(SLIME, "test_compute_cispo_loss_matches_closed_form_surrogate", "loss",
            {"lp": [[lp]], "old": [[lp - math.log(ratio)]], "advantages": [[a]],
             "loss_type": "cispo", "cispo_bound": "offset", "epsilon_low": 0.2,
             "epsilon_high": 0.28}, [-clamped * a * lp], 1e-5)
        for lp, a, ratio, clamped in (
            (-0.7, 1.0, 1.0, 1.0), (-1.2, -0.5, 1.14, 1.14), (-0.4, 2.0, 1.56, 1.28),
            (-2.1, -1.0, 0.4, 0.8))
    ],
]  # fmt: skip
COMPUTE = {f.__name__: f for f in (weights, kl, advantages, values, loss)}


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.source.split('/')[0]}-{row.test}")
def test_published_numbers(row):
    found = COMPUTE[row.compute](**row.inputs)
    assert found.tolist() == pytest.approx(row.expected, rel=row.tolerance, abs=row.tolerance)


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
