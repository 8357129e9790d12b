"""grpo_fast inside other trainers, a module each, all opted into; see README.md in this folder."""
