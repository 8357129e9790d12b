"""A custom loss for prime-rl: `fn(LossInputs) -> LossOutputs`, one call for each sequence.

    [trainer.loss]
    type = "custom"
    import_path = "grpo_fast.examples.prime_rl_loss.policy_loss"
    kwargs = { loss_type = "grpo", epsilon_low = 0.2, epsilon_high = 0.28 }

The loss is a sum over the tokens of the sequence; prime-rl divides it by the tokens of the batch.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from grpo_fast import LossConfig, grpo_loss
from grpo_fast.errors import require


def policy_loss(inputs: Any, **options: Any) -> Any:
    """Return prime-rl's `LossOutputs`: the loss and our metrics of one sequence.

    Args:
        inputs: prime-rl's `LossInputs`, tensors of shape (T,). `inference_logprobs` are the old
            logps. `teacher_logprobs` are the reference of the KL term, and must be given exactly
            if beta is not 0.
        options: Fields of `LossConfig`, except those that need logits or entropies: prime-rl
            passes log-probabilities only.
    """
    config = LossConfig(**options, aggregation="token_mean_global")
    teacher = inputs.teacher_logprobs
    fits = (teacher is not None) == config.uses_reference
    expected = "the teacher's logps" if config.uses_reference else "None"
    came = "None" if teacher is None else "a tensor"
    require(fits, "teacher_logprobs", f"{expected} with beta = {config.beta}", came)

    def row(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[None]

    output = grpo_loss(
        inputs.trainer_logprobs[None], inputs.advantages[None], config,
        completion_mask=row(inputs.loss_mask), old_logps=row(inputs.inference_logprobs),
        ref_logps=row(teacher), num_items_in_batch=1.0,
    )  # fmt: skip
    # prime-rl is on no package index: the class of the result is in the module of the inputs.
    home: Any = sys.modules[type(inputs).__module__]
    return home.LossOutputs(loss=output.loss, metrics=dict(output.metrics))
