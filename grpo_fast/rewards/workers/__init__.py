"""Reward functions for worker processes, because a completion can make them run forever."""
