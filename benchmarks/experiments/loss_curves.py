"""The picture of the losses: value and gradient of loss types over the importance ratio.

    python -m benchmarks.experiments.loss_curves grpo,cispo [epsilon_low=0.2 …] [-o losses.png]

Both curves come from `token_loss`, which the losses themselves call, for completions of one token.
`key=value` is an option of LossConfig. Losses with equal curves share a line and its label.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_fast.objective.coefficients import token_loss
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.objective.tokens import Tokens
from grpo_fast.train.report.curves import GRID, INK, picture, picture_path

DEFAULT = "grpo,cispo,sapo,unclipped"
DASHES = ("-", "--", "-.", ":")
POINTS = 401
SMALLEST_RATIO = 1e-3  # its logarithm is finite
BOUNDS = ("epsilon_low", "epsilon_high", "cispo_bound")  # from which ratio_min and ratio_max follow

Curve = tuple[Tensor, Tensor]  # (POINTS,) values, and (POINTS,) gradients to the log-prob


def curve(config: LossConfig, ratios: Tensor, advantage: float, old_prob: float) -> Curve:
    """Return value and gradient of one token's loss at each importance ratio, `ratios` (n,)."""
    old = torch.tensor([math.log(old_prob)])
    one = torch.ones(1)
    first = torch.zeros(1, dtype=torch.int64)
    tokens = Tokens(one * advantage, one, None, first + 1, first, old, None, None)
    losses = [token_loss(old + ratio.log(), None, tokens, config) for ratio in ratios]
    return (
        torch.stack([found.loss for found in losses]),
        torch.stack([found.grad_logps[0] for found in losses]),
    )


def clip_range(config: LossConfig) -> tuple[float, float] | None:
    """Return the ratios that a loss does not clip, or None for a loss without a clip."""
    objective = OBJECTIVES[config.loss_type]
    if objective.ratio_kind == "geometric":
        return math.exp(-config.epsilon_low), math.exp(config.epsilon_high)
    if objective.clips == "ppo":
        return 1 - config.epsilon_low, 1 + config.epsilon_high
    bounds = dict(zip(objective.params, config.params, strict=True))
    return (bounds["ratio_min"], bounds["ratio_max"]) if "ratio_max" in bounds else None


def config_of(loss: str, options: dict[str, float]) -> LossConfig:
    """Return the configuration of a loss with those options that it reads."""
    params = OBJECTIVES[loss].params
    read: dict[str, Any] = {
        name: value
        for name, value in options.items()
        if name in params or ("ratio_max" in params and name in BOUNDS)
    }
    return LossConfig(loss, max_completion_length=1, **read)


def plot_losses(
    losses: Sequence[str],
    out: str | Path,
    options: dict[str, float],
    *,
    advantages: Sequence[float] = (1.0, -1.0),
    ratio: Sequence[float] = (0.0, 2.0),
    old_prob: float = 0.4,
) -> Path:
    """Draw the losses, with a column of panels for each advantage.

    Args:
        losses: Loss types.
        out: The file of the picture.
        options: Options of LossConfig, for the losses that read them.
        advantages: The advantages of the token.
        ratio: The first and the last importance ratio.
        old_prob: The token's probability under the old policy; some losses read it.

    Returns:
        The path of the picture.
    """
    path = picture_path(out)
    ratios = torch.linspace(max(ratio[0], SMALLEST_RATIO), ratio[1], POINTS)
    configs = [config_of(loss, options) for loss in dict.fromkeys(losses)]
    same: dict[bytes, tuple[list[str], list[Curve]]] = {}  # labels, a curve for each advantage
    for config in configs:
        curves = [curve(config, ratios, advantage, old_prob) for advantage in advantages]
        bits = torch.stack([part + 0.0 for each in curves for part in each]).numpy().tobytes()
        same.setdefault(bits, ([], curves))[0].append(config.loss_type)
    named = {" = ".join(names): curves for names, curves in same.values()}
    ranges = sorted(set(filter(None, map(clip_range, configs))))
    size = max(4.6 * len(advantages), 6.4), 6.4
    with picture(path, size, (2, len(advantages)), sharex=True) as (figure, grid):
        for index, axes in enumerate(grid.flat):
            row, column = divmod(index, len(advantages))
            lines = {label: curves[column][row] for label, curves in named.items()}
            _draw(axes, lines, ratios, ranges)
            title = f"loss, A = {advantages[column]:g}".replace("-", "−")
            axes.set_title("its gradient to the log-prob" if row else title)
            axes.set_xlabel("ratio p / p_old" if row else "")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return path


def _draw(
    axes: Any,
    curves: dict[str, Tensor],  # label → (POINTS,)
    ratios: Tensor,  # (POINTS,)
    ranges: list[tuple[float, float]],
) -> None:
    """Draw one panel. The earlier of two equal lines is broader, so that both are visible."""
    for index, (label, points) in enumerate(curves.items()):
        width = 1.4 + min(0.9, 5 / len(curves)) * (len(curves) - 1 - index)
        dash = DASHES[index % len(DASHES)]
        axes.plot(ratios, points, dash, color=f"C{index}", linewidth=width, label=label)
    low, high = ratios[0].item(), ratios[-1].item()
    for left, right in ranges:
        if left > low or right < high:  # else the whole panel would be shaded
            axes.axvspan(max(left, low), min(right, high), color=GRID, alpha=0.45, linewidth=0)
    axes.axhline(0.0, color=INK, linewidth=0.6)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("losses", nargs="?", default=DEFAULT, help="names with commas")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--advantages", type=float, nargs="+", default=[1.0, -1.0])
    parser.add_argument("--ratio", type=float, nargs=2, default=[0.0, 2.0])
    parser.add_argument("--old-prob", type=float, default=0.4)
    parser.add_argument("-o", "--out", default="losses.png")
    asked = parser.parse_args(words)
    options = {}
    for word in asked.options:
        key, _, value = word.partition("=")
        if key not in inspect.signature(LossConfig).parameters:
            parser.error(f"{key}: expected an option of LossConfig")
        options[key] = float(value)
    for loss in asked.losses.split(","):
        if loss not in OBJECTIVES:
            parser.error(f"{loss}: expected one of {', '.join(OBJECTIVES)}")
    found = plot_losses(
        asked.losses.split(","), asked.out, options, advantages=asked.advantages,
        ratio=asked.ratio, old_prob=asked.old_prob,
    )  # fmt: skip
    print(found)


if __name__ == "__main__":
    main()
