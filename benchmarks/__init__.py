"""Benchmarks: one script per operation, peers as providers, results as JSON. The rules are in CONTRIBUTING.md."""
