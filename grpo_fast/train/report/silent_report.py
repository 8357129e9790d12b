"""The report of the ranks that write nothing: rank 0 does, for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_fast.train.report.report import RunReport


class SilentReport(RunReport):
    """Takes everything that a report takes, and keeps nothing."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def begin(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def lengths(self) -> tuple[int, int]:
        return 0, 0

    def sync(self) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        return self.folder

    def finish(self, summary: Mapping[str, Any]) -> str:
        return ""

    def close(self) -> None:
        pass
