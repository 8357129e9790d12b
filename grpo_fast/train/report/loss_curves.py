"""Draw the losses: value and slope of any loss type over the importance ratio.

Both come from `token_loss`, the function that the losses themselves call, for completions of one
token. So the picture shows what a run computes; a new line of `OBJECTIVES` can be drawn at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_fast.objective.coefficients import token_loss
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.objective.tokens import Tokens
from grpo_fast.train.config.plain import read_yaml
from grpo_fast.train.config.words import grid_values, nearest
from grpo_fast.train.report.curves import COLORS, GRID, INK, finish_axes, picture_path, save_picture

DEFAULT = ("grpo", "cispo", "sapo", "unclipped")
DASHES = ("-", "--", "-.", ":")
POINTS = 401
SMALLEST_RATIO = 1e-3  # its logarithm is finite
BOUNDS = ("epsilon_low", "epsilon_high", "cispo_bound")  # which make ratio_min and ratio_max
PARAMS = {name for objective in OBJECTIVES.values() for name in objective.params}
# The fields of LossConfig that change the curve of a single token.
OPTIONS = sorted({*BOUNDS, *PARAMS} & set(LossConfig.__dataclass_fields__))


class Drawing(NamedTuple):
    """What to draw: losses by name, one column per advantage."""

    losses: list[str]
    advantages: list[float]
    ratios: Tensor  # (POINTS,)
    old_prob: float  # of the token; losses that read logp itself depend on it
    options: dict[str, Any]  # fields of LossConfig


class Curve(NamedTuple):
    values: Tensor  # (POINTS,)
    slopes: Tensor  # (POINTS,) dL/dlogp: what backward() hands to the model


def curve(config: LossConfig, ratios: Tensor, advantage: float, old_prob: float) -> Curve:
    """Value and slope of one token's loss at each importance ratio, `ratios` (n,)."""
    old, points = torch.tensor([math.log(old_prob)]), []
    one, first = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    tokens = Tokens(one * advantage, one, None, first + 1, first, old, None, None)
    for ratio in ratios:
        found = token_loss(old + ratio.log(), None, tokens, config)
        points.append((found.loss, found.grad_logps[0]))
    values, slopes = zip(*points, strict=True)
    return Curve(torch.stack(values), torch.stack(slopes))


def clip_range(config: LossConfig) -> tuple[float, float] | None:
    """The ratios that a loss leaves as they are; None for a loss without such a range."""
    objective = OBJECTIVES[config.loss_type]
    if objective.window == "geometric":
        return math.exp(-config.epsilon_low), math.exp(config.epsilon_high)
    if objective.clips == "ppo":
        return 1 - config.epsilon_low, 1 + config.epsilon_high
    bounds = dict(zip(objective.params, config.params, strict=True))
    return (bounds["ratio_min"], bounds["ratio_max"]) if "ratio_max" in bounds else None


def plot_losses(words: Sequence[str], out: str | Path) -> Path:
    """Draw the losses that the words name (``grpo,cispo advantage=1,-1 epsilon_low=0.2``).

    Raises ValueError for an unknown loss or option, or a value that the options refuse.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    path, drawing = picture_path(out), read_drawing(words)
    configs = [_config(loss, drawing) for loss in drawing.losses]
    named: dict[str, list[Curve]] = {}  # label → a curve for each advantage
    for config in configs:
        found = [curve(config, drawing.ratios, a, drawing.old_prob) for a in drawing.advantages]
        _add(named, config.loss_type, found)
    columns = len(drawing.advantages)
    figure = Figure(figsize=(max(4.6 * columns, 6.4), 6.4), layout="constrained")
    grid = figure.subplots(2, columns, squeeze=False, sharex=True)
    ranges = sorted(set(filter(None, map(clip_range, configs))))
    for index, axes in enumerate(grid.flat):
        row, column = divmod(index, columns)
        curves = {label: found[column][row] for label, found in named.items()}
        _draw(axes, curves, drawing.ratios, ranges)
        title = f"loss, A = {drawing.advantages[column]:g}".replace("-", "−")
        finish_axes(axes, "its gradient to the log-prob" if row else title)
        axes.set_xlabel("ratio p / p_old" if row else "", fontsize=8, color=INK)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    place = {"loc": "outside lower center", "ncols": 4, "fontsize": 9}
    figure.legend(handles, labels, frameon=False, labelcolor=INK, **place)
    return save_picture(figure, path)


def read_drawing(words: Sequence[str]) -> Drawing:
    """The words of `plot losses`: names of losses, then ``advantage=``, ``ratio=``, ``old_prob=``
    and options of LossConfig.
    """
    names = [name for word in words if "=" not in word for name in word.split(",")]
    for name in names:
        if name not in OBJECTIVES:
            raise ValueError(f"losses: no loss is called {name!r}" + nearest(name, [*OBJECTIVES]))
    lists = dict(grid_values(word) for word in words if "=" in word)
    settings = {key: [read_yaml(text, key) for text in texts] for key, texts in lists.items()}
    known = ("advantage", "ratio", "old_prob", *OPTIONS)
    for key in settings:
        if key not in known:
            raise ValueError(f"{key}: unknown key" + nearest(key, known, known))
    low, high = _numbers(settings.pop("ratio", [0.0, 2.0]), "ratio", 2)
    (old_prob,) = _numbers(settings.pop("old_prob", [0.4]), "old_prob", 1)
    if not 0 <= low < high or not 0 < old_prob * high <= 1:
        expected = "0 <= ratio[0] < ratio[1] and a probability old_prob * ratio[1] <= 1"
        raise ValueError(f"ratio: expected {expected}, got {low:g}, {high:g} with {old_prob:g}")
    advantages = _numbers(settings.pop("advantage", [1.0, -1.0]), "advantage")
    ratios = torch.linspace(max(low, SMALLEST_RATIO), high, POINTS)
    options = {key: values[0] for key, values in settings.items()}
    losses = list(dict.fromkeys(names or DEFAULT))
    for option, values in settings.items():
        if len(values) != 1:
            raise ValueError(f"{option}: expected one value, got {values}")
        if not any(_is_read(loss, option) for loss in losses):
            raise ValueError(f"{option}: expected an option of {', '.join(losses)}: none reads it")
    return Drawing(losses, advantages, ratios, old_prob, options)


def _numbers(values: list[Any], name: str, count: int | None = None) -> list[float]:
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    fits = len(numbers) == len(values) and all(map(math.isfinite, numbers))
    if not fits or count not in (None, len(values)):
        raise ValueError(f"{name}: expected {count or 'some'} finite numbers, got {values}")
    return [float(number) for number in numbers]


def _is_read(loss: str, option: str) -> bool:
    params = OBJECTIVES[loss].params
    return option in params or ("ratio_max" in params and option in BOUNDS)


def _config(loss: str, drawing: Drawing) -> LossConfig:
    """The loss with those of the options that it reads."""
    options = {name: value for name, value in drawing.options.items() if _is_read(loss, name)}
    return LossConfig(loss, max_completion_length=1, **options)


def _add(named: dict[str, list[Curve]], loss: str, found: list[Curve]) -> None:
    """Losses with the same curves share a line and its label: none is hidden behind another."""
    for label, other in named.items():
        if torch.equal(_stacked(found), _stacked(other)):
            named[f"{label} = {loss}"] = named.pop(label)
            return
    named[loss] = found


def _stacked(curves: list[Curve]) -> Tensor:
    return torch.stack([part for each in curves for part in each])


def _draw(
    axes: Any,
    curves: dict[str, Tensor],  # label → (POINTS,)
    ratios: Tensor,  # (POINTS,)
    ranges: list[tuple[float, float]],
) -> None:
    """One panel: the earlier of two lines on one place is the broader one, so that both show."""
    for index, (label, points) in enumerate(curves.items()):
        width = 1.4 + min(0.9, 5 / len(curves)) * (len(curves) - 1 - index)
        style = {"color": COLORS[index % len(COLORS)], "linestyle": DASHES[index % len(DASHES)]}
        axes.plot(ratios, points, linewidth=width, label=label, **style)
    low, high = ratios[0].item(), ratios[-1].item()
    for left, right in ranges:
        if left > low or right < high:  # else the whole panel would be shaded
            axes.axvspan(max(left, low), min(right, high), color=GRID, alpha=0.45, linewidth=0)
    axes.axhline(0.0, color=INK, linewidth=0.6)
