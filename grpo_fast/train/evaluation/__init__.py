"""Evaluation on held-out questions, used by training runs and by `grpo-fast eval`."""
