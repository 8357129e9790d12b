"""Tests of the loss curves: they follow the formulas of the losses, and every loss is drawn."""

import pytest
import torch

from benchmarks.experiments import loss_curves
from benchmarks.experiments.loss_curves import clip_range, config_of, curve, main
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES

RATIOS = torch.linspace(0.103, 1.997, 96)  # no point is exactly on a clip bound


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_clipped_objective_is_the_tutorials_drawing(advantage):
    """Check that the curve of "grpo" is the loss -min(r·A, clip(r)·A) of the PPO paper.

    Its slope must be 0 above the ratio 1.2 for A > 0, and below 0.8 for A < 0.
    """
    values, slopes = curve(LossConfig("grpo"), RATIOS, advantage, 0.4)
    expected = -torch.minimum(RATIOS * advantage, RATIOS.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(values, expected)
    is_flat = RATIOS > 1.2 if advantage > 0 else RATIOS < 0.8
    torch.testing.assert_close(slopes, torch.where(is_flat, 0.0, -RATIOS * advantage))


def test_every_loss_is_drawn_and_equal_curves_share_a_label(tmp_path, monkeypatch, capsys):
    from matplotlib.figure import Figure

    shown = []
    monkeypatch.setattr(Figure, "legend", lambda self, handles, labels, **_: shown.extend(labels))
    monkeypatch.setattr(loss_curves, "POINTS", 21)
    out = tmp_path / "a" / "all.png"
    main([",".join(OBJECTIVES), "beta=0.1", "delta=4", "-o", str(out)])
    assert capsys.readouterr().out.strip() == str(out) and out.stat().st_size > 20_000
    assert sorted(name for label in shown for name in label.split(" = ")) == sorted(OBJECTIVES)
    assert "kimi = dro" in shown and any("grpo = bnpo" in label for label in shown)


def test_the_shaded_range_follows_from_the_options():
    assert clip_range(config_of("dapo", {"epsilon_high": 0.28})) == pytest.approx((0.8, 1.28))
    assert clip_range(config_of("gmpo", {"epsilon_low": 0.4})) == pytest.approx((0.67032, 1.491825))
    assert clip_range(config_of("cispo", {})) == (0.0, 5.0)
    assert clip_range(config_of("sapo", {"epsilon_low": 0.4})) is None


@pytest.mark.parametrize("word", ["gpro", "epsilon_lo=0.2"])
def test_unknown_words_are_refused(word, capsys):
    with pytest.raises(SystemExit):
        main(["grpo" if "=" in word else word, word])
    assert "expected" in capsys.readouterr().err
