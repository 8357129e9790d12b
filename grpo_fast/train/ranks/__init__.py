"""Runs with several processes: shares of the sampling, sharded weights, and collectives."""
