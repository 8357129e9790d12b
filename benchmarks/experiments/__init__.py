"""Training comparisons for grpo_fast/train/README.md. benchmarks/experiments.sh runs them all."""
