"""grpo_fast inside other trainers: one module per trainer, each opted into; see README.md in this
folder.
"""
