"""OpenRLHF's own `PolicyLoss` against ours: the returned tuple and the gradient."""

import importlib
import inspect
import itertools

import pytest
import torch

from tests.integrations import trainer_packages

theirs = trainer_packages.load_openrlhf_loss().PolicyLoss
PolicyLoss = importlib.import_module("grpo_fast.integrations.openrlhf").PolicyLoss

NAMES = ("loss", "clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio")
CLIP = {"clip_eps_low": 0.1, "clip_eps_high": 0.25}
# Every correction that OpenRLHF allows, with a band that keeps some units and drops some.
BANDS = {"ratio": (0.8, 1.2), "binary_kl": (0.0, 0.02), "tv": [0.0, 0.06]}
CORRECTIONS = [{"is_correction_level": "off"}]
CORRECTIONS += [
    {"is_correction_level": level, "is_correction_gating": gating, "is_correction_threshold": band}
    for level in ("token", "seq") for gating, band in BANDS.items()
]  # fmt: skip
CORRECTIONS += [{**CORRECTIONS[1], "is_correction_mode": "clip"}]


def batch(seed: int = 0, step: float = 0.4, empty_row: bool = True) -> dict:
    random = torch.Generator().manual_seed(seed)
    old = -2.5 * torch.rand(6, 9, generator=random) - 0.01
    new = (old + step * torch.randn(6, 9, generator=random)).clamp(max=-1e-3)
    mask = torch.rand(6, 9, generator=random) > 0.25
    if empty_row:
        mask[2] = False
    return {
        "log_probs": new,
        "old_log_probs": old,
        "advantages": torch.randn(6, 9, generator=random),
        "action_mask": mask,
        "rollout_log_probs": (old + 0.3 * torch.randn(6, 9, generator=random)).clamp(max=-1e-3),
    }


def run(loss, data: dict, **counts) -> tuple:
    log_probs = data["log_probs"].clone().requires_grad_()
    results = loss(**{**data, "log_probs": log_probs}, **counts)
    results[0].backward()
    return *(x if x is None else x.detach() for x in results), log_probs.grad


def compare(options: dict, data: dict, **counts) -> tuple:
    mine, expected = (run(cls(**options), data, **counts) for cls in (PolicyLoss, theirs))
    assert len(mine) == len(expected) == 6
    for name, a, b in zip((*NAMES, "gradient"), mine, expected, strict=True):
        assert (a is None) == (b is None), name
        if b is not None:
            named = lambda text, name=name: f"{name}: {text}"  # noqa: E731
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=named)
    return expected


def test_the_same_constructor_and_call():
    def defaults(method):
        return {n: p.default for n, p in inspect.signature(method).parameters.items()}

    assert defaults(PolicyLoss.__init__) == defaults(theirs.__init__)
    assert defaults(PolicyLoss.forward) == defaults(theirs.forward)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: "-".join(map(str, c.values())))
@pytest.mark.parametrize("policy_loss_type", ["ppo", "gspo"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_every_option(correction, policy_loss_type, dual_clip):
    """With the call's counts and the batch's, by token and sequence, small and large steps."""
    kind = {"policy_loss_type": policy_loss_type, "dual_clip": dual_clip}
    counts = {"dp_size": 4, "batch_num_tokens": 211.0, "global_batch_size": 24.0}
    for token_level, step in itertools.product((True, False), (0.4, 3.0)):
        options = {**CLIP, **correction, **kind, "token_level_loss": token_level}
        compare(options, batch(step=step))
        compare(options, batch(step=step), **counts)


def test_the_data_reaches_every_branch():
    for correction in CORRECTIONS[1:]:
        *_, filtered, gradient = compare({**CLIP, **correction}, batch())
        assert 0.1 < filtered < 0.95, correction
        assert gradient.any()
    assert 0.1 < compare(CLIP, batch())[1] < 0.9
    plain, dual = (compare({**CLIP, "dual_clip": c}, batch(step=3.0)) for c in (None, 1.5))
    assert plain[0] != dual[0]
    data = batch()
    data["log_probs"] = data["old_log_probs"].clone()
    compare({}, data)
    compare({}, {**data, "action_mask": None})
    compare({"policy_loss_type": "gspo"}, data)


@pytest.mark.parametrize("shift", [25.0, -25.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_every_log_ratio_beyond_the_clamp(shift, dual_clip):
    """Where nothing else clips (A < 0 and no dual clip) their clamp ends the gradient."""
    data = batch()
    data["old_log_probs"] = data["old_log_probs"] - shift
    compare({**CLIP, "dual_clip": dual_clip}, data)


def test_masked_slots_are_inert():
    data, options = batch(), {**CLIP, "is_correction_level": "seq", "dual_clip": 2.0}
    expected = run(PolicyLoss(**options), data)
    mask = data["action_mask"]
    dirty = {k: v if v is mask else torch.where(mask, v, torch.nan) for k, v in data.items()}
    for a, b in zip(run(PolicyLoss(**options), dirty), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    nothing = {**data, "action_mask": torch.zeros(6, 9, dtype=torch.bool)}
    for policy_loss_type in ("ppo", "gspo"):
        results = run(PolicyLoss(policy_loss_type=policy_loss_type), nothing)
        assert results[0] == 0 and not results[-1].any()


def test_like_takes_every_option_over():
    options = {**CLIP, "dual_clip": 2.5, "token_level_loss": False, **CORRECTIONS[-1]}
    mine = PolicyLoss.like(theirs(**options))
    assert vars(mine).items() >= options.items()
    assert PolicyLoss.like(theirs(policy_loss_type="gspo")).token_level_loss is False
    newer = theirs()
    newer.unknown_option = 1
    with pytest.raises(ValueError, match="unknown_option"):
        PolicyLoss.like(newer)
    with pytest.raises(ValueError, match="rollout_log_probs=None conflicts with .*_level='token'"):
        PolicyLoss(is_correction_level="token")(**{**batch(), "rollout_log_probs": None})


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"policy_loss_type": "cispo"}, "policy_loss_type: expected one of"),
        ({"is_correction_level": "batch"}, "is_correction_level: expected one of"),
        ({"is_correction_mode": "drop"}, "is_correction_mode: expected one of"),
        ({"is_correction_gating": "kl"}, "is_correction_gating: expected one of"),
        ({"is_correction_mode": "clip", "is_correction_level": "seq"}, "is_correction_mode"),
        (
            {"is_correction_level": "token", "is_correction_gating": "tv"},
            "threshold=.* conflicts with .*upper",
        ),
        ({"is_correction_threshold": (1.0,)}, "is_correction_threshold: expected \\(low, high\\)"),
        ({"dual_clip": 1.0}, "dual_clip: expected None or a number > 1"),
        ({"clip_eps_low": -0.1}, "clip_eps_low: expected a number >= 0"),
    ],
)
def test_refusals_name_the_option(options, pattern):
    with pytest.raises(ValueError, match=pattern):
        PolicyLoss(**options)
