"""Comparisons, which make the figures of grpo_fast/train/README.md (benchmarks/experiments.sh)."""
