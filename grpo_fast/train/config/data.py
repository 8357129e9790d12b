"""Configuration sections of data, rewards, sampling and evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_fast.errors import conflict
from grpo_fast.rewards.conventions import CONVENTIONS
from grpo_fast.rollout import EngineName, Sampling
from grpo_fast.rollout.vllm.options import VLLMOptions
from grpo_fast.train.config.base import Count, Off, Positive, Section, Size, UserPath, require

KEPT_AT_MOST = 512  # top_k if only top_p is set; limits the token ids stored per position


class DataConfig(Section):
    task: Literal["sort", "arithmetic", "open", "gsm8k", "jsonl", "traces"]
    """Generated prompts, listed prompts, GSM8K, questions of a file, or recorded rollouts."""
    path: UserPath | None = None
    """A file, or a folder with a training and a test split."""
    name: str | None = None
    """Hub id of a data set, for example openai/gsm8k, or owner/name:config."""
    columns: dict[Literal["prompt", "answer", "solution"], str] = Field(default_factory=dict)
    """Columns to read, for example {prompt: title, answer: reward_model.truth}."""
    prompt_template: str | None = None
    """Text with {question} in it, or plain, hash or answer_tag; null sends the question."""
    system_prompt: str | None = None
    """System message before every question; null sends none."""
    chat: bool | None = None
    """Use the model's chat template; null uses it if the tokenizer has one."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, for example {enable_thinking: false}."""
    shots: Count = 0
    """Worked examples before each question, the same ones for all questions."""
    shots_tokens: Positive | None = None
    """Tokens to fill with worked examples, drawn anew for each question; replaces `shots`."""
    n_test: Size | None = None
    """Test examples to use; null uses all, or a tenth of a file without a test split."""
    digits: int = Field(5, ge=1, le=4096)
    """Length of a generated prompt in symbols."""
    symbols: int = Field(10, ge=2, le=1 << 20)
    """Number of different symbols in prompts of task: sort."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if self.task in ("gsm8k", "jsonl"):
            one = f"exactly one of path and name for task {self.task}"
            came = "both" if self.path else "neither"
            require((self.path is None) != (self.name is None), "path", one, came)
            if self.shots_tokens and self.shots:
                why = "both set the number of worked examples; keep one"
                raise conflict(f"shots_tokens={self.shots_tokens}", f"shots={self.shots}", why)
            return self
        is_traces = self.task == "traces"
        require(not is_traces or self.path, "path", "a file of traces", "none")
        expected = f"none, task {self.task} makes its own prompts"
        for name in ("path", "name", "columns", "prompt_template", "system_prompt", "chat",
                     "template_kwargs", "shots", "shots_tokens"):  # fmt: skip
            value = getattr(self, name)
            require(not value or (is_traces and name == "path"), name, expected, repr(value))
        return self


class RewardConfig(Section):
    name: str
    """A built-in reward, package.module:function or file.py:function."""
    convention: Literal[CONVENTIONS] | None = None  # type: ignore[valid-type]
    """Library whose arguments the function takes; {verl: FUNCTION} sets name and convention."""
    label: str | None = None
    """Name in the metrics; null uses the function's name."""
    weight: float = Field(1.0, ge=-1e30, le=1e30)
    """Weight in the sum of the rewards; 0 logs the reward without training on it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    path: UserPath | None = None
    """Folder or hub id of the model of reward_model."""
    timeout: float = Field(60.0, gt=0, le=1e6)
    """Seconds that a call in a worker process may take."""
    in_process: bool = False
    """Call the function in the trainer's process instead of a worker process."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_convention(cls, values: Any) -> Any:
        word = next((x for x in CONVENTIONS if isinstance(values, dict) and x in values), None)
        if word is None or "name" in values:
            return values
        others = {key: value for key, value in values.items() if key != word}
        return {"name": values[word], "convention": word, **others}

    @model_validator(mode="after")
    def _fits_the_name(self) -> RewardConfig:
        is_model = self.name == "reward_model"
        expected = f"{'a folder or hub id' if is_model else 'none'} for {self.name}"
        require(is_model == (self.path is not None), "path", expected, repr(self.path))
        if self.convention is not None and ":" not in self.name:
            why = "only package.module:function and file.py:function have one"
            raise conflict(f"convention={self.convention}", f"name={self.name}", why)
        if self.in_process and ":" not in self.name:
            why = "built-in rewards always run in the trainer's process"
            raise conflict("in_process=true", f"name={self.name}", why)
        return self


class DynamicSamplingConfig(Section):
    """Replacement of groups in which all rewards are equal, because they give no gradient."""

    rounds: Positive = 4
    """Times that further prompts are sampled before dropped groups fill the batch."""
    judged_by: str | None = None
    """Label of the reward whose spread counts; null uses the weighted sum."""


class RolloutConfig(Section, Sampling):
    engine: EngineName = "transformers"
    """The engine that samples completions."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature."""
    group_size: Size = 8
    """Completions per prompt (G)."""
    prompts_per_step: Size = 8
    """Prompts per step."""
    mask_truncated: bool = False
    """Leave completions without an EOS out of the loss."""
    correct_sampling: bool = False
    """Correct the loss by the ratio of the trainer's probabilities to the sampler's."""
    ahead: int = Field(0, ge=0, le=1)
    """1 samples the completions of the next step while this step trains; 0 samples in turn."""
    dynamic: DynamicSamplingConfig | None = None
    """Drop groups of equal rewards and sample further prompts; null keeps all groups."""
    replay_support: Annotated[Literal["auto", "off"], Off] = "auto"
    """With top_p or top_k, auto computes the loss over the tokens that the sampler kept."""
    vllm: VLLMOptions = Field(default_factory=VLLMOptions)
    """Options of the engines vllm and vllm-server."""

    @model_validator(mode="after")
    def _consistent(self) -> RolloutConfig:
        # Set top_k if only top_p is set, because top_p alone would keep nearly the whole vocabulary
        # of a flat distribution. Write to __dict__, because an assignment would validate again and
        # mark top_k as set by the user.
        if self.needs_support and "top_k" not in self.model_fields_set:
            self.__dict__["top_k"] = KEPT_AT_MOST
        needed = self.engine == "vllm-server"
        urls = ", ".join(self.vllm.urls)
        one = f"{'at least one server' if needed else 'none'} for engine: {self.engine}"
        require(needed == bool(urls), "vllm.urls", one, urls or "none")
        return self

    @property
    def needs_support(self) -> bool:
        """True if the engine must report the tokens that top_p or top_k kept for each position."""
        return self.replay_support == "auto" and self.truncates


class HeldOut(Section, Sampling):
    """Settings shared by the evaluations of a run and by `grpo-fast eval`."""

    n: Positive | None = None
    """Number of held-out questions; null asks all."""
    samples: Size = 1
    """Completions per question."""
    max_new_tokens: Size | None = None
    """Most tokens of a completion; null uses rollout.max_new_tokens."""

    @property
    def needs_support(self) -> bool:
        """False, because an evaluation computes no loss and needs no list of the kept tokens."""
        return False


class EvalConfig(HeldOut):
    every: Count = 0
    """Steps between evaluations; 0 evaluates only before and after the run."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    batch_size: Positive = 256
    """Completions that are sampled at a time."""
    k: list[Positive] = Field(default_factory=list)
    """Values of k for pass@k and maj@k, at most `samples`."""
