"""Comparisons of training runs for grpo_fast/train/README.md. experiments.sh starts them."""
