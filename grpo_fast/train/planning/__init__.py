"""What fits into memory: predicted before a run, and followed while it goes on."""
