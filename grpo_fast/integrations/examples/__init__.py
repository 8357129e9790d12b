"""Whole programs, small enough to read; tests/integrations/ runs them."""
