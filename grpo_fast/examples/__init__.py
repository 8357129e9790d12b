"""Example scripts that use only public names of grpo_fast."""
