"""verl integration: losses (`register`), LM head (`head.use_fast_head`), workers (`plugin`)."""

from grpo_fast.integrations.verl.losses import policy_loss, register

__all__ = ["policy_loss", "register"]
