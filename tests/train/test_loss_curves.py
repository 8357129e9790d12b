"""`grpo-fast plot losses`: the curves are those of the formulas, and every loss can be drawn."""

import pytest
import torch

from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.train.report.loss_curves import _config, clip_range, curve, plot_losses, read_drawing
from tests.command_line import invoke, refused

RATIOS = torch.linspace(0.103, 1.997, 96)  # no point lies on a bound of the clip


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_clipped_objective_is_the_tutorials_drawing(advantage):
    """Flat above 1.2 for A > 0, and below 0.8 for A < 0: min(r·A, clip(r)·A)."""
    found = curve(LossConfig("grpo"), RATIOS, advantage, 0.4)
    expected = -torch.minimum(RATIOS * advantage, RATIOS.clamp(0.8, 1.2) * advantage)
    torch.testing.assert_close(found.values, expected)
    is_flat = RATIOS > 1.2 if advantage > 0 else RATIOS < 0.8
    torch.testing.assert_close(found.slopes, torch.where(is_flat, 0.0, -RATIOS * advantage))


@pytest.mark.parametrize("name", [n for n, o in OBJECTIVES.items() if o.slope_of == "log_ratio"])
def test_the_slope_is_the_derivative_of_the_value(name):
    """For the losses that have no stop-gradient."""
    config = LossConfig(name, max_completion_length=1)
    h = 1e-3
    for advantage in (1.0, -1.0):
        low, mid, high = (curve(config, RATIOS * f, advantage, 0.4) for f in (1 - h, 1.0, 1 + h))
        rise = (high.values - low.values) / (2 * h)
        smooth = (high.slopes - low.slopes).abs() < 0.1
        assert smooth.sum() > 90
        torch.testing.assert_close(rise[smooth], mid.slopes[smooth], atol=2e-3, rtol=2e-3)


def test_every_loss_is_drawn_and_equal_curves_share_a_label(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    shown = []
    monkeypatch.setattr(Figure, "legend", lambda self, handles, labels, **_: shown.extend(labels))
    monkeypatch.setattr("grpo_fast.train.report.loss_curves.POINTS", 21)
    out = plot_losses([",".join(OBJECTIVES), "beta=0.1", "delta=4"], tmp_path / "a" / "all.png")
    assert out.stat().st_size > 20_000
    assert sorted(name for label in shown for name in label.split(" = ")) == sorted(OBJECTIVES)
    assert "kimi = dro" in shown and any("grpo = bnpo" in label for label in shown)


def test_the_shaded_range_is_that_of_the_options():
    assert clip_range(LossConfig("dapo", epsilon_high=0.28)) == pytest.approx((0.8, 1.28))
    assert clip_range(LossConfig("gmpo", epsilon_low=0.4)) == pytest.approx((0.67032, 1.491825))
    assert clip_range(LossConfig("cispo")) == (0.0, 5.0)
    assert clip_range(LossConfig("sapo")) is None


def test_the_words(tmp_path):
    drawing = read_drawing(["grpo,cispo", "advantage=2", "epsilon_low=0.1", "ratio=0.5,1.5"])
    assert drawing.losses == ["grpo", "cispo"] and drawing.advantage == [2.0]
    assert drawing.options == {"epsilon_low": 0.1}
    assert drawing.ratios[0] == 0.5 and drawing.ratios[-1] == 1.5
    assert _config("grpo", drawing).epsilon_low == 0.1
    picture = tmp_path / "p.png"
    result = invoke("plot", "losses", "grpo", "advantage=1", "-o", str(picture))
    assert result.exit_code == 0 and result.output.strip() == str(picture) and picture.is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpro"], "nearest: grpo"),
        (["grpo", "epsilon_lo=0.2"], "nearest: epsilon_low"),
        (["grpo", "epsilon_low=-1"], "epsilon_low: expected a finite number >= 0"),
        (["grpo", "sapo_temperature_pos=2"], "one that none reads"),
        (["grpo", "advantage=much"], "advantage.0: Input should be a valid number"),
        (["grpo", "advantage=1,nan"], "advantage"),
        (["grpo", "ratio=2,0"], "ratio: expected 0 <= ratio[0] < ratio[1]"),
        (["grpo", "ratio=0,3"], "old_prob * ratio[1] <= 1, got 0, 3 with 0.4"),
        (["grpo", "old_prob=0"], "old_prob"),
        (["grpo", "epsilon_low=0.1,0.2"], "epsilon_low: Input should be a valid number"),
    ],
)
def test_refusals(words, said):
    assert refused(invoke("plot", "losses", *words), said)
