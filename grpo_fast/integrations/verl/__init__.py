"""verl integration.

`register` adds the losses to verl's registry, `head.use_fast_head` replaces the LM head, and verl's
workers import `plugin` to do this at their start.
"""

from grpo_fast.integrations.verl.losses import policy_loss, register

__all__ = ["policy_loss", "register"]
