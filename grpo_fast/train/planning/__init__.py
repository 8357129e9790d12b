"""Predict the memory that a run needs, before and during the run."""
