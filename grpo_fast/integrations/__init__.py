"""Integrations of grpo_fast into other trainers, with one module for each trainer.

Importing an integration changes nothing until you call it. README.md in this folder describes all
integrations.
"""
