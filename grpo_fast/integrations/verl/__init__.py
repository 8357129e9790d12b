"""Integration of our losses and our LM head into verl.

`register` adds our losses to verl's registry, and `head.use_fast_head` replaces the LM head of a
model. verl's workers do both by importing `plugin`.
"""

from grpo_fast.integrations.verl.losses import policy_loss, register

__all__ = ["policy_loss", "register"]
