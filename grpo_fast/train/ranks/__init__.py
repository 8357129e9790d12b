"""Runs with several processes: collectives, sampling on all ranks, and sharded weights."""
