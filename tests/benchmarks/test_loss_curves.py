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


def panels_of(words, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "legend", lambda self, *args, **_: figures.append(self))
    monkeypatch.setattr(loss_curves, "POINTS", 21)
    main(words)
    return figures[0].axes


def test_every_loss_is_drawn_and_equal_curves_share_a_row(tmp_path, monkeypatch, capsys):
    out = tmp_path / "a" / "all.png"
    words = [",".join(OBJECTIVES), "beta=0.1", "delta=4", "-o", str(out)]
    axes = panels_of(words, monkeypatch)
    assert capsys.readouterr().out.strip() == str(out) and out.stat().st_size > 20_000
    titles = [each.get_title(loc="left").replace("\n", " ") for each in axes[::2]]
    assert sorted(name for title in titles for name in title.split(" = ")) == sorted(OBJECTIVES)
    assert "kimi = dro" in titles and any("grpo = bnpo" in title for title in titles)
    lines = [line for line in axes[0].lines if line.get_linewidth() > 1]  # not the thin reference
    assert [line.get_label() for line in lines] == ["A = 1", "A = −1"]
    assert len({line.get_color() for line in lines}) == 2


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
