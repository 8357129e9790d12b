"""The folder of a run and its lock, checkpoints, resuming, signals."""
