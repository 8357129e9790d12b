"""Reward functions that run in worker processes, because a completion may make them hang."""
