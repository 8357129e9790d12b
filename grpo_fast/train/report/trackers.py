"""TensorBoard, Weights & Biases, trackio: a run's metrics go to them through accelerate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_fast.errors import require

PROJECT = "grpo_fast"  # the name under which a service lists the runs
FOLDER = "trackers"  # in the run's folder, for what a tracker writes to files


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ValueError for a tracker whose package is not installed."""
    if not names:
        return
    from accelerate.tracking import get_available_trackers

    installed = {str(getattr(kind, "value", kind)) for kind in get_available_trackers()}
    missing = ", ".join(name for name in names if name not in installed)
    came = f"{missing} (pip install {missing})"
    require(not missing, "log.trackers", "trackers whose packages are installed", came)


def start_trackers(
    names: Sequence[str], folder: str | Path, settings: Mapping[str, Any]
) -> list[Any]:
    """accelerate's trackers of one run, by the `names` of `log.trackers`; `settings` have dotted
    names.
    """
    if not names:
        return []
    from accelerate import Accelerator
    from accelerate.utils import clear_environment

    # With the launcher's variables it would wait for other ranks: trackers are rank 0's alone.
    with clear_environment():
        accelerator = Accelerator(
            cpu=True, log_with=list(names), project_dir=str(Path(folder) / FOLDER)
        )
    run = Path(folder).name
    options = {"wandb": {"name": run, "dir": str(folder)}, "trackio": {"name": run}}
    plain = {  # trackers take numbers and texts; None is a text, too
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in settings.items()
    }
    accelerator.init_trackers(PROJECT, config=plain, init_kwargs=options)
    return accelerator.trackers
