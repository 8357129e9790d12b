"""Examples for training and evaluation, which are read from files or the hub, or generated."""

from grpo_fast.data.escape import escape_control, reason
from grpo_fast.data.example import Example, Prompt

__all__ = ["Example", "FILES", "Prompt", "TASKS", "escape_control", "reason"]

FILES = ("gsm8k", "jsonl")
TASKS = ("sort", "open", *FILES)
