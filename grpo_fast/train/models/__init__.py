"""Policy and reference models of a run, how they are loaded, and options that save memory."""
