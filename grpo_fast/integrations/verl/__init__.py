"""verl integration.

`register` registers the losses, `head.use_fast_head` replaces the LM head, and verl's workers
import `plugin`.
"""

from grpo_fast.integrations.verl.losses import policy_loss, register

__all__ = ["policy_loss", "register"]
