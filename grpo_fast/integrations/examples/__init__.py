"""Whole programs, small enough to read: tests/integrations/test_integration_examples.py runs
them.
"""
