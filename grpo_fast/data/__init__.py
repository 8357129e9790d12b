"""Examples for training and evaluation, which are read from files or the hub, or generated."""

from grpo_fast.data.escape import escape_control, reason
from grpo_fast.data.example import Example, Prompt
from grpo_fast.data.files import read_examples
from grpo_fast.data.traces import load_traces, read_traces

__all__ = [
    "Example",
    "FILES",
    "Prompt",
    "TASKS",
    "TRACES",
    "escape_control",
    "load_traces",
    "read_examples",
    "read_traces",
    "reason",
]

TRACES = "traces"
FILES = ("gsm8k", "jsonl")
TASKS = ("sort", "open", *FILES, TRACES)
