"""Prediction of the memory that a run needs, before it starts and while it goes on."""
