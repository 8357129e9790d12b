"""Rollouts in this process: our own loop with its cache, and continuous batching."""
