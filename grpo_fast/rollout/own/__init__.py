"""Rollouts in this process: our own decoding loop and its key-value cache."""
