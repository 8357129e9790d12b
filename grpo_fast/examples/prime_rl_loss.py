"""Custom loss function for prime-rl.

    [trainer.loss]
    type = "custom"
    import_path = "grpo_fast.examples.prime_rl_loss.policy_loss"
    kwargs = { loss_type = "grpo", epsilon_low = 0.2, epsilon_high = 0.28 }

prime-rl calls the function once for each sequence. The function returns the sum of the token
losses, and prime-rl divides the sum by the number of tokens in the batch.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from grpo_fast import LossConfig, grpo_loss
from grpo_fast.errors import require


def policy_loss(inputs: Any, **options: Any) -> Any:
    """Compute the loss of one sequence for prime-rl.

    Args:
        inputs: prime-rl's `LossInputs` with tensors of shape (T,). `inference_logprobs` are the old
            log-probabilities. `teacher_logprobs` are the reference log-probabilities of the KL
            term. If beta is 0, `teacher_logprobs` must be None.
        **options: Fields of `LossConfig`. `aggregation` is not supported, because prime-rl divides
            the sum. Options that need logits or entropies are not supported, because prime-rl
            passes only log-probabilities.

    Returns:
        prime-rl's `LossOutputs` with the loss and our metrics.

    Raises:
        ValueError: beta is not 0 and `teacher_logprobs` is None, beta is 0 and `teacher_logprobs`
            is given, `aggregation` is given, or `LossConfig` refuses an option.
    """
    by = options.pop("aggregation", None)
    require(by is None, "aggregation", "no option, because prime-rl divides the sum", repr(by))
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
    # Take the class LossOutputs from the module that defines LossInputs. prime-rl is not on a
    # package index, so the tests of this script cannot import it.
    home = sys.modules[type(inputs).__module__]
    return home.LossOutputs(loss=output.loss, metrics=dict(output.metrics))
