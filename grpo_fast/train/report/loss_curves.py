"""Draw the losses: value and slope of any loss type over the importance ratio.

Both come from `token_loss`, which the losses themselves call, for completions of one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, create_model
from torch import Tensor

from grpo_fast.objective.coefficients import token_loss
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.objective.tokens import Tokens
from grpo_fast.train.config.base import CommaList, Section, require
from grpo_fast.train.config.words import read_words
from grpo_fast.train.report.curves import GRID, INK, picture, picture_path

DEFAULT = ("grpo", "cispo", "sapo", "unclipped")
DASHES = ("-", "--", "-.", ":")
POINTS = 401
SMALLEST_RATIO = 1e-3  # its logarithm is finite
BOUNDS = ("epsilon_low", "epsilon_high", "cispo_bound")  # which make ratio_min and ratio_max
PARAMS = {name for objective in OBJECTIVES.values() for name in objective.params}
# The fields of LossConfig that change the curve of a single token.
OPTIONS = sorted({*BOUNDS, *PARAMS} & set(LossConfig.__dataclass_fields__))


class Settings(Section):
    """The words of `plot losses`, beside the options of LossConfig."""

    losses: Annotated[list[Literal[tuple(OBJECTIVES)]], CommaList] = list(DEFAULT)  # type: ignore[valid-type]
    advantage: Annotated[list[float], CommaList] = [1.0, -1.0]  # a column for each
    ratio: Annotated[tuple[float, float], CommaList] = (0.0, 2.0)
    old_prob: float = Field(0.4, gt=0, le=1)  # of the token; some losses read logp itself

    @property
    def ratios(self) -> Tensor:  # (POINTS,)
        return torch.linspace(max(self.ratio[0], SMALLEST_RATIO), self.ratio[1], POINTS)

    @property
    def options(self) -> dict[str, Any]:
        return self.model_dump(include={*OPTIONS}, exclude_unset=True)


OPTION: Any = (float | None, None)
Drawing: Any = create_model("Drawing", __base__=Settings, **dict.fromkeys(OPTIONS, OPTION))


class Curve(NamedTuple):
    values: Tensor  # (POINTS,)
    slopes: Tensor  # (POINTS,) dL/dlogp: what backward() hands to the model


def curve(config: LossConfig, ratios: Tensor, advantage: float, old_prob: float) -> Curve:
    """Value and slope of one token's loss at each importance ratio, `ratios` (n,)."""
    old, points = torch.tensor([math.log(old_prob)]), []
    one, first = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    tokens = Tokens(one * advantage, one, None, first + 1, first, old, None, None)
    for ratio in ratios:
        loss = token_loss(old + ratio.log(), None, tokens, config)
        points.append((loss.loss, loss.grad_logps[0]))
    values, slopes = zip(*points, strict=True)
    return Curve(torch.stack(values), torch.stack(slopes))


def clip_range(config: LossConfig) -> tuple[float, float] | None:
    """The ratios that a loss leaves as they are; None for a loss without such a range."""
    objective = OBJECTIVES[config.loss_type]
    if objective.ratio_kind == "geometric":
        return math.exp(-config.epsilon_low), math.exp(config.epsilon_high)
    if objective.clips == "ppo":
        return 1 - config.epsilon_low, 1 + config.epsilon_high
    bounds = dict(zip(objective.params, config.params, strict=True))
    return (bounds["ratio_min"], bounds["ratio_max"]) if "ratio_max" in bounds else None


def plot_losses(words: Sequence[str], out: str | Path) -> Path:
    """Draw the losses that the words name (``grpo,cispo advantage=1,-1 epsilon_low=0.2``).

    Losses with the same curves share a line and its label: none is hidden behind another.
    """
    path, drawing = picture_path(out), read_drawing(words)
    ratios, losses = drawing.ratios, dict.fromkeys(drawing.losses)
    configs = [_config(loss, drawing) for loss in losses]
    same: dict[bytes, tuple[list[str], list[Curve]]] = {}  # labels, a curve for each advantage
    for config in configs:
        curves = [curve(config, ratios, a, drawing.old_prob) for a in drawing.advantage]
        bits = torch.stack([part + 0.0 for each in curves for part in each]).numpy().tobytes()
        same.setdefault(bits, ([], curves))[0].append(config.loss_type)
    named = {" = ".join(names): curves for names, curves in same.values()}
    columns = len(drawing.advantage)
    ranges = sorted(set(filter(None, map(clip_range, configs))))
    size = max(4.6 * columns, 6.4), 6.4
    with picture(path, size, (2, columns), sharex=True) as (figure, grid):
        for index, axes in enumerate(grid.flat):
            row, column = divmod(index, columns)
            lines = {label: curves[column][row] for label, curves in named.items()}
            _draw(axes, lines, ratios, ranges)
            title = f"loss, A = {drawing.advantage[column]:g}".replace("-", "−")
            axes.set_title("its gradient to the log-prob" if row else title)
            axes.set_xlabel("ratio p / p_old" if row else "")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return path


def read_drawing(words: Sequence[str]) -> Any:
    """The `Drawing` of the words: names of losses, settings and options of LossConfig."""
    names = ",".join(word for word in words if "=" not in word)
    settings = [word for word in words if "=" in word]
    drawing = read_words(Drawing, [*settings, *([f"losses={names}"] if names else [])])
    (low, high), old_prob = drawing.ratio, drawing.old_prob
    expected = "0 <= ratio[0] < ratio[1] and a probability old_prob * ratio[1] <= 1"
    fits = 0 <= low < high and old_prob * high <= 1
    require(fits, "ratio", expected, f"{low:g}, {high:g} with {old_prob:g}")
    for option in drawing.options:
        fits = any(_is_read(loss, option) for loss in drawing.losses)
        require(fits, option, f"an option of {', '.join(drawing.losses)}", "one that none reads")
    return drawing


def _is_read(loss: str, option: str) -> bool:
    params = OBJECTIVES[loss].params
    return option in params or ("ratio_max" in params and option in BOUNDS)


def _config(loss: str, drawing: Settings) -> LossConfig:
    options = {name: value for name, value in drawing.options.items() if _is_read(loss, name)}
    return LossConfig(loss, max_completion_length=1, **options)


def _draw(
    axes: Any,
    curves: dict[str, Tensor],  # label → (POINTS,)
    ratios: Tensor,  # (POINTS,)
    ranges: list[tuple[float, float]],
) -> None:
    """One panel: the earlier of two lines on one place is the broader one, so that both show."""
    for index, (label, points) in enumerate(curves.items()):
        width = 1.4 + min(0.9, 5 / len(curves)) * (len(curves) - 1 - index)
        style = {"color": f"C{index}", "linestyle": DASHES[index % len(DASHES)]}
        axes.plot(ratios, points, linewidth=width, label=label, **style)
    low, high = ratios[0].item(), ratios[-1].item()
    for left, right in ranges:
        if left > low or right < high:  # else the whole panel would be shaded
            axes.axvspan(max(left, low), min(right, high), color=GRID, alpha=0.45, linewidth=0)
    axes.axhline(0.0, color=INK, linewidth=0.6)
