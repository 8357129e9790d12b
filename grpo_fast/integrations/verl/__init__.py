"""verl integration.

`register` adds the losses to verl's registry, and `head.use_fast_head` replaces the LM head of a
model. verl's workers import `plugin`, which does both when they start.
"""

from grpo_fast.integrations.verl.losses import policy_loss, register

__all__ = ["policy_loss", "register"]
