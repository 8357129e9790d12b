"""Example scripts. They use only public names of grpo_fast."""
