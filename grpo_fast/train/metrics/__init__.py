"""Metrics of a training step: losses, samples, timings, and agreement with the sampler."""
