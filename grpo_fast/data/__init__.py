"""Examples for training and evaluation, which are read from files or the hub, or generated."""

from grpo_fast.data.escape import escape_control, reason
from grpo_fast.data.example import Example, Prompt
from grpo_fast.data.files import read_examples

__all__ = ["Example", "FILES", "Prompt", "TASKS", "escape_control", "read_examples", "reason"]

FILES = ("gsm8k", "jsonl")
TASKS = ("sort", "open", *FILES)
