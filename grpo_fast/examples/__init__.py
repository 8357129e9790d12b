"""Plain scripts that use grpo_fast's public names."""
