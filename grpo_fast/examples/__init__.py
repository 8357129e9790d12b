"""Example scripts, which use only public names of grpo_fast."""
