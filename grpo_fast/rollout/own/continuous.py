"""The trainer's own model by transformers' continuous batching: a paged cache, ragged batches.

It fits a GPU without vLLM. The random numbers are its own: the same samples for the same seed,
prompts and batch, but others for another share of the batch. It does not say which tokens a
truncating sampler kept.
"""

from __future__ import annotations

import functools
import inspect
import time
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from grpo_fast.errors import NonFiniteLogits, require
from grpo_fast.rollout.engine import (
    EOS,
    LENGTH,
    Completion,
    Engine,
    Request,
    say_that_kept_is_unknown,
    seed_for,
)
from grpo_fast.rollout.sampler import Sampling


class ContinuousOptions(BaseModel):
    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )  # fmt: skip

    page_size: int = Field(256, ge=4)
    """Tokens of a page of the cache."""
    pages: int | None = Field(None, ge=1)
    """Pages of the cache; null takes what the GPU's memory holds."""
    max_batch_tokens: int | None = Field(None, ge=1)
    """Tokens of one forward pass; null is chosen by the GPU's memory."""
    timeout: float = Field(600.0, gt=0, le=1e6)
    """Seconds without a finished completion after which the run ends."""


@functools.cache
def config_fields() -> frozenset[str]:
    """Fields of the installed ContinuousBatchingConfig; transformers 5.17 calls a page a block."""
    from transformers import ContinuousBatchingConfig

    return frozenset(inspect.signature(ContinuousBatchingConfig).parameters)


def asked_for(attention: str) -> str:
    """The name to ask transformers for, so that this attention runs.

    transformers 5.17 takes flash attention wherever it is installed, unless the name begins with
    "paged|"; later releases refuse such names.
    """
    keeps = "auto_switch_to_flash" in config_fields() or "flash" in attention
    return attention if keeps else f"paged|{attention.removeprefix('paged|')}"


class ContinuousEngine(Engine):
    """Samples with the policy's weights as they are; `update` moves nothing."""

    def __init__(self, policy: Any, options: Any) -> None:
        self.policy, self.version = policy, 0
        self.options = getattr(options, "continuous", None) or ContinuousOptions()
        is_sized = None not in (self.options.pages, self.options.max_batch_tokens)
        expected = "pages and max_batch_tokens on a CPU, whose memory is not asked"
        fits = policy.device.type != "cpu" or is_sized
        require(fits, "rollout.continuous", expected, self.options)
        # Autocast belongs to a thread, and the batches run in another.
        dtype, expected = policy.autocast, "none beside continuous batching"
        require(dtype is None, "model.autocast", expected, dtype)

    def update(self, policy: Any, version: int) -> None:
        self.policy, self.version = policy, version

    def sample(self, request: Request) -> list[Completion]:
        sampling, seed, places = request.sampling, request.seed, request.places
        require(sampling.min_p == 0, "min_p", "0 with continuous batching", sampling.min_p)
        if sampling.wants_kept:
            say_that_kept_is_unknown("continuous batching")
        rows = [list(prompt) for prompt in request.prompts for _ in range(request.group_size)]
        number = seed_for("rollout", seed, *(places or ())) % 2**31
        size = sampling.batch_size or max(len(rows), 1)
        completions: list[Completion] = []
        with self.policy.generation():
            self.policy.lm.set_attn_implementation(asked_for(self.policy.generation_attn))
            for start in range(0, len(rows), size):
                outputs = self._run(rows[start : start + size], sampling, number + start)
                completions += [self._completion(output) for output in outputs]
        return completions

    def _run(self, rows: list[list[int]], sampling: Sampling, seed: int) -> list[Any]:
        done: dict[str, Any] = {}
        last = time.monotonic()
        with self.policy.lm.continuous_batching_context_manager(
            generation_config=self._generation(sampling),
            continuous_batching_config=self._batching(seed), block=True, timeout=5, warmup=False,
        ) as manager:  # fmt: skip
            names = manager.add_requests(inputs=rows, max_new_tokens=sampling.max_new_tokens)
            while len(done) < len(rows):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id], last = result, time.monotonic()
                elif not manager.is_running():
                    raise RuntimeError("continuous batching: its thread has ended before its work")
                elif time.monotonic() - last > self.options.timeout:
                    waited = f"no completion in {self.options.timeout:g} seconds"
                    raise TimeoutError(
                        f"continuous batching: {waited} (rollout.continuous.timeout)"
                    )
        return [done[name] for name in names]

    def _generation(self, sampling: Sampling) -> Any:
        from transformers import GenerationConfig

        is_greedy = sampling.temperature == 0
        drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k}
        return GenerationConfig(
            do_sample=not is_greedy, eos_token_id=sorted(self.policy.eos_ids),
            pad_token_id=self.policy.pad_id, max_new_tokens=sampling.max_new_tokens,
            **({} if is_greedy else {**drawn, "top_p": sampling.top_p}),
        )  # fmt: skip

    def _batching(self, seed: int) -> Any:
        from transformers import ContinuousBatchingConfig

        known = config_fields()
        page = "page_size" if "page_size" in known else "block_size"
        own = {"auto_switch_to_flash": False} if "auto_switch_to_flash" in known else {}
        return ContinuousBatchingConfig(
            return_logprobs=True, seed=seed, num_blocks=self.options.pages,
            max_batch_tokens=self.options.max_batch_tokens, **{page: self.options.page_size}, **own,
        )  # fmt: skip

    def _completion(self, output: Any) -> Completion:
        if output.error is not None:
            raise RuntimeError(f"continuous batching: {output.error}")
        logps = torch.tensor(output.logprobs, dtype=torch.float32)
        if logps.isnan().any():
            raise NonFiniteLogits("the policy's logits are NaN or infinite")
        ids = list(output.generated_tokens)
        ended = bool(ids) and ids[-1] in self.policy.eos_ids
        return Completion(ids, logps, EOS if ended else LENGTH, self.version)
