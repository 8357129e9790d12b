"""Reward models, trained on pairs of completions."""
