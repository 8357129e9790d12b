"""Picture of several losses and their gradients as functions of the importance ratio.

    python -m benchmarks.experiments.loss_curves grpo,cispo [epsilon_low=0.2 …] [-o losses.png]

The curves are computed for a completion of one token, with the function `token_loss` that training
also uses. `key=value` sets an option of LossConfig. Each loss gets a row with two panels. Losses
with equal curves share one row, whose title has all their names. A thin gray line shows the loss
`unclipped` for comparison.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import new_parser, positive
from grpo_fast.objective.coefficients import token_loss
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.objective.tokens import Tokens
from grpo_fast.train.report.curves import GRID, INK, picture, picture_path

DEFAULT = "grpo,cispo,sapo,gmpo"
ADVANTAGES = (1.0, -1.0)  # of the token
REFERENCE = "unclipped"
GRAY = "#aab0bb"
POINTS = 401
SMALLEST_RATIO = 1e-3  # not 0, because the logarithm of the ratio must be finite
BOUNDS = ("epsilon_low", "epsilon_high", "cispo_bound")  # They determine ratio_min and ratio_max.

Curve = tuple[Tensor, Tensor]  # loss and its gradient with respect to the log-prob, (POINTS,)


def curve(config: LossConfig, ratios: Tensor, advantage: float, old_prob: float) -> Curve:
    """Return the loss of one token and its gradient at each of the importance ratios, (n,)."""
    old = torch.tensor([math.log(old_prob)])
    one = torch.ones(1)
    first = torch.zeros(1, dtype=torch.int64)
    tokens = Tokens(one * advantage, one, None, lambda: first + 1, first, old, None, None)
    losses = [token_loss(old + ratio.log(), None, tokens, config) for ratio in ratios]
    gradients = [found.grad_logps[0] for found in losses]
    return torch.stack([found.loss for found in losses]), torch.stack(gradients)


def clip_range(config: LossConfig) -> tuple[float, float] | None:
    """Return the smallest and the largest unclipped ratio, or None if the loss never clips."""
    objective = OBJECTIVES[config.loss_type]
    if objective.ratio_kind == "geometric":
        return math.exp(-config.epsilon_low), math.exp(config.epsilon_high)
    if objective.clips == "ppo":
        return 1 - config.epsilon_low, 1 + config.epsilon_high
    bounds = dict(zip(objective.params, config.params, strict=True))
    return (bounds["ratio_min"], bounds["ratio_max"]) if "ratio_max" in bounds else None


def config_of(loss: str, options: dict[str, float]) -> LossConfig:
    """Return the configuration of a loss. Options that this loss does not use are left out."""
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
    ratio: Sequence[float] = (0.0, 2.0),
    old_prob: float = 0.4,
) -> Path:
    """Draw a row of two panels for each loss.

    The left panel shows the loss, and the right panel shows its gradient. Each panel has one line
    per advantage in `ADVANTAGES`.

    Args:
        losses: Loss types.
        out: The file of the picture.
        options: Options of LossConfig. Each is passed to the losses that use it.
        ratio: The first and the last importance ratio of the x axis.
        old_prob: The token's probability under the old policy. Some losses depend on it.

    Returns:
        The path of the picture.
    """
    path = picture_path(out)
    ratios = torch.linspace(max(ratio[0], SMALLEST_RATIO), ratio[1], POINTS)

    def curves_of(config: LossConfig) -> list[Curve]:
        return [curve(config, ratios, advantage, old_prob) for advantage in ADVANTAGES]

    same: dict[bytes, tuple[list[LossConfig], list[Curve]]] = {}
    for loss in dict.fromkeys(losses):
        config = config_of(loss, options)
        curves = curves_of(config)
        bits = torch.stack([part + 0.0 for each in curves for part in each]).numpy().tobytes()
        same.setdefault(bits, ([], curves))[0].append(config)
    reference = curves_of(config_of(REFERENCE, options))
    rows = len(same)
    with picture(path, (7.2, 1.9 * rows + 0.8), (rows, 2), sharex=True) as (figure, grid):
        for (configs, curves), panels in zip(same.values(), grid, strict=True):
            names = " = ".join(config.loss_type for config in configs)
            panels[0].set_title(textwrap.fill(names, 44))
            for column, what in enumerate(("loss", "gradient")):
                axes = panels[column]
                axes.axhline(0.0, color=INK, linewidth=0.6)
                for index, each in enumerate(reference):
                    label = REFERENCE if index == 0 else None
                    axes.plot(ratios, each[column], color=GRAY, linewidth=0.9, label=label)
                for index, each in enumerate(curves):
                    label = f"A = {ADVANTAGES[index]:g}".replace("-", "−")
                    style = {"color": f"C{index}", "linestyle": ("-", "--")[index]}
                    axes.plot(ratios, each[column], linewidth=1.9, label=label, **style)
                for left, right in sorted(set(filter(None, map(clip_range, configs)))):
                    # Shade the range of unclipped ratios, unless it fills the panel.
                    if left > ratio[0] or right < ratio[1]:
                        start, end = max(left, ratio[0]), min(right, ratio[1])
                        axes.axvspan(start, end, color=GRID, alpha=0.45, linewidth=0)
                axes.set_ylabel(what)
        for axes in grid[-1]:
            axes.set_xlabel("ratio p / p_old")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    return path


def main(words: Sequence[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("losses", nargs="?", default=DEFAULT, help="names with commas")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--ratio", type=float, nargs=2, default=[0.0, 2.0])
    parser.add_argument("--old-prob", type=positive(float), default=0.4)
    parser.add_argument("-o", "--out", default="losses.png")
    asked = parser.parse_args(words)
    options = {}
    for word in asked.options:
        key, _, value = word.partition("=")
        if key not in inspect.signature(LossConfig).parameters:
            parser.error(f"{key}: expected an option of LossConfig")
        try:
            options[key] = float(value)
        except ValueError:
            parser.error(f"{key}: expected a number, got {value!r}")
    for loss in asked.losses.split(","):
        if loss not in OBJECTIVES:
            parser.error(f"{loss}: expected one of {', '.join(OBJECTIVES)}")
    try:
        print(plot_losses(asked.losses.split(","), asked.out, options, asked.ratio, asked.old_prob))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
