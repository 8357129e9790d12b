"""Runs with several processes: divided sampling, sharded weights, and collectives."""
