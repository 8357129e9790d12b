"""Configuration sections of data, rewards, sampling and evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from grpo_fast.data import FILES
from grpo_fast.errors import conflict
from grpo_fast.rewards.conventions import CONVENTIONS
from grpo_fast.rollout import EngineName, Sampling
from grpo_fast.rollout.vllm.options import VLLMOptions
from grpo_fast.train.config.base import Count, Positive, Section, Size, UserPath, require
from grpo_fast.train.config.plain import read_yaml

# Value of top_k if only top_p is set. It limits the number of token ids stored for each position.
KEPT_AT_MOST = 512
# YAML reads eval.k=4 as a number and eval.k=1,4,8 as a string. Convert both to a list.
CommaList = BeforeValidator(
    lambda value: value if isinstance(value, list) else read_yaml(f"[{value}]", "k")
)


class DataConfig(Section):
    task: Literal["sort", "open", "gsm8k", "jsonl"]
    """Generated prompts, a fixed list (open), GSM8K, or questions of a file."""
    path: UserPath | None = None
    """A file, a folder with training and test files, or a hub id such as openai/gsm8k."""
    columns: dict[Literal["prompt", "answer", "solution", "tests"], str] = Field(
        default_factory=dict
    )
    """Names of the columns to read, for example {prompt: title, answer: reward_model.truth}."""
    prompt_template: str | None = None
    """Text with {question} and {COLUMN}, or plain, hash, answer_tag; null sends the question."""
    system_prompt: str | None = None
    """System message before every question; null sends none."""
    chat: bool | None = None
    """Use the model's chat template; null uses it if the tokenizer has one."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, for example {enable_thinking: false}."""
    shots_tokens: Positive | None = None
    """Number of tokens for worked examples, which are drawn anew for each question."""
    drop_empty: bool = False
    """Skip rows with an empty prompt or answer, and log their number; false refuses them."""
    max_prompt_tokens: Positive | None = None
    """Skip questions whose prompt has more tokens, and log their number; null keeps all."""
    encoding: str | None = None
    """Encoding of text files, for example cp1252; null reads UTF-8 and UTF-16."""
    n_test: Size | None = None
    """Number of test examples; null uses all, or a tenth of a file without a test split."""
    digits: int = Field(5, ge=1, le=4096)
    """Number of digits in a prompt of the task sort."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        needed = self.task in FILES
        expected = f"{'a source' if needed else 'none'} for task {self.task}"
        require(needed == bool(self.path), "path", expected, repr(self.path))
        if self.task not in FILES:
            # Only questions from a file have columns, templates and worked examples.
            for name in ("columns", "prompt_template", "system_prompt", "chat", "template_kwargs",
                         "shots_tokens", "max_prompt_tokens"):  # fmt: skip
                value = getattr(self, name)
                require(not value, name, f"none for task {self.task}", repr(value))
        if self.shots_tokens and self.max_prompt_tokens:
            why = "worked examples fill the prompts"
            raise conflict("shots_tokens", "max_prompt_tokens", why)
        return self


class RewardConfig(Section):
    name: str
    """A built-in reward, package.module:function or file.py:function."""
    convention: Literal[CONVENTIONS] | None = None  # type: ignore[valid-type]
    """Library whose reward signature the function has; {verl: FUNCTION} also sets the name."""
    label: str | None = None
    """Name of the reward in the metrics; null uses the function's name."""
    weight: float = Field(1.0, ge=-1e30, le=1e30)
    """Weight in the sum of the rewards; 0 logs the reward without training on it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    path: UserPath | None = None
    """Folder or hub id of the model for the reward named reward_model."""
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
        needed = self.name == "reward_model"
        expected = f"{'a folder or hub id' if needed else 'none'} for {self.name}"
        require(needed == (self.path is not None), "path", expected, repr(self.path))
        if ":" not in self.name and (self.convention is not None or self.in_process):
            why = "only package.module:function and file.py:function have this setting"
            setting = "in_process" if self.in_process else f"convention={self.convention}"
            raise conflict(setting, f"name={self.name}", why)
        return self


class DynamicSamplingConfig(Section):
    """Replacement of groups in which all rewards are equal. Such groups give no gradient."""

    rounds: Positive = 4
    """Maximum number of resampling rounds; then dropped groups fill the rest of the batch."""
    judged_by: str | None = None
    """Label of the reward that must differ within a group; null uses the weighted sum."""


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
    """Exclude completions that do not end with an EOS from the loss."""
    correct_sampling: bool = False
    """Correct the loss by the ratio of the trainer's probabilities to the sampler's."""
    ahead: int = Field(0, ge=0, le=1)
    """1 samples the next step's completions while this step trains; 0 alternates."""
    dynamic: DynamicSamplingConfig | None = None
    """Drop groups of equal rewards and sample further prompts; null keeps all groups."""
    replay_support: Literal["auto", "off"] = "auto"
    """auto normalizes the loss over the tokens that top_p or top_k kept; off uses all tokens."""
    vllm: VLLMOptions = Field(default_factory=VLLMOptions)
    """Options of the engines vllm and vllm-server."""

    @model_validator(mode="after")
    def _consistent(self) -> RolloutConfig:
        # If only top_p is set, limit the number of kept tokens by top_k. For a flat distribution,
        # top_p alone would keep nearly the full vocabulary. Write to __dict__, because a normal
        # assignment would validate the section again and mark top_k as set by the user.
        if self.needs_support and "top_k" not in self.model_fields_set:
            self.__dict__["top_k"] = KEPT_AT_MOST
        return self

    @property
    def needs_support(self) -> bool:
        """Return True if the engine must report the tokens that top_p or top_k kept."""
        return self.replay_support == "auto" and self.truncates


class EvalConfig(Section, Sampling):
    every: Count = 0
    """Steps between evaluations; 0 evaluates only before and after the run."""
    n: Positive | None = None
    """Number of held-out questions; null uses all."""
    samples: Size = 1
    """Completions per question."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature; 0 is greedy."""
    max_new_tokens: Size | None = None
    """Maximum number of tokens in a completion; null uses rollout.max_new_tokens."""
    batch_size: Positive = 256
    """Number of completions that are sampled at the same time."""
    k: Annotated[list[Positive], CommaList] = Field(default_factory=list)
    """Values of k for pass@k and maj@k; none may exceed `samples`."""

    @property
    def needs_support(self) -> bool:
        """Return False. Only a loss needs the kept tokens, and an evaluation computes no loss."""
        return False
