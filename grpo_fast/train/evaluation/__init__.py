"""Accuracy on held-out questions, which a run and the command `grpo-fast eval` measure."""
