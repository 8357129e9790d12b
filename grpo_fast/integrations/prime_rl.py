"""A custom loss for prime-rl: `fn(LossInputs) -> LossOutputs`, one call per sequence.

    [trainer.loss]
    type = "custom"
    import_path = "grpo_fast.integrations.prime_rl.policy_loss"
    kwargs = { loss_type = "grpo", epsilon_low = 0.2, epsilon_high = 0.28 }

The loss is a sum over the tokens of the sequence, which prime-rl divides by the batch's; with
`aggregation = "sequence_mean"` their mean, as prime-rl's own sequence-level losses have it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor

from grpo_fast import LossConfig, grpo_loss
from grpo_fast.errors import conflict, require

AGGREGATIONS = ("token_mean_global", "sequence_mean")  # the sum and the mean over the sequence
PER_CALL = (
    "entropy_coef", "top_entropy_quantile", "temperature", "softcap", "logit_scale",
    "compute_entropy",
)  # fmt: skip


@functools.lru_cache(maxsize=32)
def loss_config(**options: Any) -> LossConfig:
    """The `LossConfig` of `kwargs`; ValueError for what a loss of one sequence cannot honour."""
    for name in PER_CALL:
        expected = "none, as prime-rl gives its custom loss log-probabilities only"
        require(name not in options, name, expected, options.get(name))
    aggregation = options.pop("aggregation", AGGREGATIONS[0])
    expected = f"one of {list(AGGREGATIONS)}"
    require(aggregation in AGGREGATIONS, "aggregation", expected, repr(aggregation))
    try:
        return LossConfig(**options, aggregation=aggregation)
    except TypeError as error:
        raise ValueError(f"kwargs: expected fields of LossConfig, got {sorted(options)}") from error


def policy_loss(inputs: Any, **options: Any) -> Any:
    """The loss of one sequence.

    Args:
        inputs: prime-rl's `LossInputs`, tensors (T,): `inference_logprobs` are the old logps,
            `teacher_logprobs` the reference of the KL term, exactly where beta is not 0.
        options: fields of `LossConfig`.

    Returns:
        prime-rl's `LossOutputs`: the loss, 0-d, and our metrics of this sequence, 0-d each.
    """
    config = loss_config(**options)
    teacher = getattr(inputs, "teacher_logprobs", None)
    if (teacher is not None) != config.uses_reference:
        came = "None" if teacher is None else "a tensor"
        why = "the KL needs the teacher's logps" if config.uses_reference else "there is no KL"
        raise conflict(f"teacher_logprobs, {came},", f"beta={config.beta}", why)

    def row(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[None]

    output = grpo_loss(
        inputs.trainer_logprobs[None], inputs.advantages[None], config,
        completion_mask=row(inputs.loss_mask), old_logps=row(inputs.inference_logprobs),
        ref_logps=row(teacher), num_items_in_batch=1.0, num_completions_in_batch=1.0,
    )  # fmt: skip
    # Its package is on no index: the class of the result is found beside that of the inputs.
    home: Any = sys.modules[type(inputs).__module__]
    came = f"{type(inputs).__qualname__} of {home.__name__}"
    require(hasattr(home, "LossOutputs"), "inputs", "prime-rl's LossInputs", came)
    return home.LossOutputs(loss=output.loss, metrics=dict(output.metrics))
