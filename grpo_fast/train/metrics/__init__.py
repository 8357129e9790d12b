"""Metrics of a step: losses, samples, timings, agreement with the sampler."""
