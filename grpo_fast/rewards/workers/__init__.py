"""Rewards that run in worker processes, because a completion can make them run endlessly."""
