"""Rewards whose run time depends on the text: each is run from its file in a process of its own."""
