"""Accuracy on held-out questions: during a run, and as the command `grpo-fast eval`."""
