"""Integrations of grpo_fast into other trainers.

Importing an integration changes nothing. Call its functions to use our kernels in a trainer.
README.md in this folder describes all integrations.
"""
