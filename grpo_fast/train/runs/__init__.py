"""The folder of a run with its lock and checkpoints, and the start and end of a run."""
