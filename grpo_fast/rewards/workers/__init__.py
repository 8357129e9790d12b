"""Rewards that run in worker processes, because their run time depends on the completion."""
