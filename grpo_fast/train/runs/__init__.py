"""The folder of a run: its lock, its checkpoints, its start, and its end by a signal."""
