"""Prediction of the memory that a training step needs."""
