"""Decoding loop and key-value cache of rollouts in the trainer's process."""
