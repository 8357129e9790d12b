"""Whole programs, small enough to read: tests/test_integration_examples.py runs them."""
