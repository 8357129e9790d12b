"""Accuracy on held-out questions: `grpo-fast eval`, pass@k, majorities, paired comparison."""
