"""Experiment trackers such as TensorBoard and Weights & Biases, used through accelerate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_fast.errors import require

PROJECT = "grpo_fast"  # name of the project in the tracker's service
FOLDER = "trackers"  # subfolder of a run for files that trackers write


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ValueError if a tracker is not installed or is not supported by accelerate."""
    if not names:
        return
    from accelerate.tracking import get_available_trackers

    installed = sorted(str(getattr(kind, "value", kind)) for kind in get_available_trackers())
    missing = ", ".join(name for name in names if name not in installed)
    expected = f"trackers of accelerate whose packages are installed, here {installed}"
    require(not missing, "log.trackers", expected, missing)


def start_trackers(
    names: Sequence[str], folder: str | Path, settings: Mapping[str, object]
) -> list[Any]:
    """Start the experiment trackers of a run.

    Args:
        names: value of the setting `log.trackers`.
        folder: folder of the run.
        settings: configuration of the run.

    Returns:
        The started trackers, which are objects of accelerate.
    """
    if not names:
        return []
    from accelerate import Accelerator
    from accelerate.utils import clear_environment

    # Hide the environment variables of torchrun. Otherwise, accelerate would wait for the other
    # ranks, which start no trackers.
    with clear_environment():
        accelerator = Accelerator(
            cpu=True, log_with=list(names), project_dir=str(Path(folder) / FOLDER)
        )
    run = Path(folder).name
    options = {"wandb": {"name": run, "dir": str(folder)}, "trackio": {"name": run}}
    accelerator.init_trackers(PROJECT, config=_flat(settings), init_kwargs=options)
    return accelerator.trackers


def _flat(settings: Mapping[str, object], above: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys. Convert lists and nulls to text."""
    flattened: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flattened |= _flat(value, f"{above}{key}.")
        else:
            is_plain = isinstance(value, (bool, int, float, str))
            flattened[f"{above}{key}"] = value if is_plain else str(value)
    return flattened
