"""Integrations of grpo_fast into other trainers, with one module for each trainer.

An integration changes nothing until you call it. README.md in this folder describes each of them.
"""
