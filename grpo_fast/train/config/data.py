"""Prompts, rewards, sampling and evaluation: what a run asks, and how it is judged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_fast.rollout import EngineName, Sampling
from grpo_fast.rollout.vllm.options import VLLMOptions
from grpo_fast.train.config.base import Count, Off, Positive, Section, Size, UserPath, require

KEPT_AT_MOST = 512  # tokens of a step, with top_p alone


class DataConfig(Section):
    task: Literal["sort", "arithmetic", "open", "gsm8k", "jsonl", "traces"]
    # jsonl file, or a folder with train.jsonl and test.jsonl; traces: of recorded rollouts
    path: UserPath | None = None
    name: str | None = None  # hub id, for example openai/gsm8k
    prompt_template: str | None = None  # text with {question}, or a name of PROMPT_TEMPLATES
    system_prompt: str | None = None
    chat: bool = False  # send the prompt through the tokenizer's chat template
    shots: Count = 0  # worked examples before the question, the same ones for all
    shots_tokens: Positive | None = None  # instead: as many as fit, others for each question
    n_train: Positive | None = None  # None: all
    n_test: Size | None = None
    digits: int = Field(5, ge=1, le=4096)  # generated tasks: length of a prompt
    symbols: int = Field(10, ge=2, le=1 << 20)  # sort: how many different symbols

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.task in ("gsm8k", "jsonl"):
            one = f"exactly one of path and name for task {self.task}"
            came = "both" if self.path else "neither"
            require((self.path is None) != (self.name is None), "path", one, came)
            fits = not (self.shots_tokens and self.shots)
            require(fits, "shots_tokens", "no shots beside it", self.shots_tokens)
            return self
        is_traces = self.task == "traces"
        require(not is_traces or self.path, "path", "a file of traces", "none")
        taken = () if is_traces else ("path",)
        for name in (*taken, "name", "prompt_template", "system_prompt", "chat", "shots",
                     "shots_tokens"):  # fmt: skip
            value, made = getattr(self, name), f"none, task {self.task} makes its own prompts"
            require(not value, name, made, repr(value))
        return self


class RewardConfig(Section):
    name: str  # a built-in one's, package.module:function or file.py:function
    label: str | None = None  # its name in the metrics; None: the function's
    weight: float = Field(1.0, ge=-1e30, le=1e30)  # sums are fp32
    options: dict[str, Any] = Field(default_factory=dict)
    path: UserPath | None = None  # reward_model: hub id or local folder
    timeout: float = Field(60.0, gt=0, le=1e6)  # seconds a call in a worker process may take
    in_process: bool = False  # own functions: no worker, so that what they do they do to the run

    @model_validator(mode="after")
    def _fits_the_name(self) -> RewardConfig:
        is_model = self.name == "reward_model"
        expected = f"{'a folder or hub id' if is_model else 'none'} for {self.name}"
        require(is_model == (self.path is not None), "path", expected, repr(self.path))
        own = "package.module:function or file.py:function beside in_process"
        require(not self.in_process or ":" in self.name, "name", own, repr(self.name))
        return self


class DynamicSamplingConfig(Section):
    """Groups whose rewards are all alike teach nothing: they are dropped, other prompts asked."""

    rounds: Positive = 4  # of asking for others; then the batch is filled with dropped groups
    judged_by: str | None = None  # the reward whose spread counts; None: the weighted sum


class RolloutConfig(Section, Sampling):
    engine: EngineName = "transformers"  # who samples
    temperature: float = Field(1.0, gt=0)
    group_size: Positive = 8  # G completions per prompt
    prompts_per_step: Positive = 8
    mask_truncated: bool = False  # a completion without an EOS does not count in the loss
    correct_sampling: bool = False  # give the sampler's logps to the loss (train/inference ratio)
    # 1: a step's completions are sampled during the step before, with the weights it began with
    ahead: int = Field(0, ge=0, le=1)
    dynamic: DynamicSamplingConfig | None = None  # drop groups without spread and refill
    # auto: beside top_p or top_k the loss is over the tokens that the sampler kept; off: over all
    replay_support: Annotated[Literal["auto", "off"], Off] = "auto"
    vllm: VLLMOptions = Field(default_factory=VLLMOptions)  # of the engines vllm and vllm-server

    @model_validator(mode="before")
    @classmethod
    def _removed(cls, values: Any) -> Any:
        names = (values.get("engine"), *values) if isinstance(values, dict) else ()
        expected = "transformers (the default) or vllm, which replace continuous batching"
        require("continuous" not in names, "engine", expected, "continuous")
        return values

    @model_validator(mode="after")
    def _consistent(self) -> RolloutConfig:
        # With top_p alone a flat distribution keeps nearly the whole vocabulary. An assignment
        # would validate once more, and count as set by the user.
        if self.wants_kept and "top_k" not in self.model_fields_set:
            self.__dict__["top_k"] = KEPT_AT_MOST
        needed, urls = self.engine == "vllm-server", ", ".join(self.vllm.urls)
        one = f"{'at least one server' if needed else 'none'} for engine: {self.engine}"
        require(needed == bool(urls), "vllm.urls", one, urls or "none")
        return self

    @property
    def wants_kept(self) -> bool:
        return self.replay_support == "auto" and self.truncates


class HeldOut(Section, Sampling):
    n: Positive | None = None  # prompts; None: all
    samples: Positive = 1  # per prompt
    max_new_tokens: Size | None = None  # None: the rollout's

    @property
    def wants_kept(self) -> bool:
        """False: an evaluation has no loss over the tokens that the sampler kept."""
        return False


class EvalConfig(HeldOut):
    every: Count = 0  # steps; 0: only before and after
    temperature: float = Field(0.0, ge=0)  # 0: greedy
    batch_size: Positive = 256
    k: list[Positive] = Field(default_factory=list)  # pass@k, maj@k; ≤ samples
