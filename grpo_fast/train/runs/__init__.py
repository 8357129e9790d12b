"""A run's folder and its lock, checkpoints, resuming, signals, the audit."""
