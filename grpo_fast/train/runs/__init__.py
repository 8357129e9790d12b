"""Start and end of a run, and the folder of the run with its lock and checkpoints."""
