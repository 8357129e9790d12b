"""Integrations of grpo_fast into other trainers.

The import of an integration changes nothing. Call its functions to use our kernels in the trainer.
README.md in this folder describes all integrations.
"""
