"""Configuration of a run as pydantic models.

A recipe is a YAML file with settings of a run. It is part of the package or written by the user.
Command-line arguments such as `optim.lr=1e-4` override its values. Relative paths in a recipe start
from the working folder.

A section checks its own settings, and `RunConfig` checks settings of several sections together. The
defaults of the section `loss` come from `LossConfig`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from annotated_types import Interval
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model, model_validator

from grpo_fast.data import FILES, TASKS
from grpo_fast.data.readers import GYM
from grpo_fast.errors import conflict, nearest_hint, require
from grpo_fast.objective.advantages import MODES, check_group_size, check_options, split_options
from grpo_fast.objective.config import CHOICES, LossConfig
from grpo_fast.objective.kl import EXACT
from grpo_fast.objective.losses import OBJECTIVES
from grpo_fast.objective.ppo import VALUE_LOSSES
from grpo_fast.rewards.conventions import CONVENTIONS
from grpo_fast.rollout import EngineName, Sampling
from grpo_fast.rollout.engine import VLLMOptions
from grpo_fast.train.config.words import quoted, read_words, read_yaml

UserPath = Annotated[str, AfterValidator(os.path.expanduser)]
LIMIT = 1 << 53  # a JSON reader that stores numbers as doubles would round larger integers
# Use Interval, not pydantic's Field. pydantic 2.8 stores the default of one dataclass field in the
# shared Field object, so that all other dataclass fields of this type become optional.
Count = Annotated[int, Interval(ge=0, lt=LIMIT)]
Positive = Annotated[int, Interval(ge=1, lt=LIMIT)]
Size = Annotated[int, Interval(ge=1, le=1 << 20)]  # number of items in memory at the same time


class Section(BaseModel):
    """Base class of configuration sections. It rejects unknown keys and non-finite numbers.

    Validation is strict. For example, `true` is not accepted as the integer 1. `grpo-fast config`
    prints the description of each field in the docstring of its class.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, validate_assignment=True, allow_inf_nan=False
    )


@contextmanager
def named_in(section: str) -> Iterator[None]:
    """Prefix the message of a ValueError raised in the `with` block with `section` and a dot."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from None


# ------------------------------------------------------------------------------ Model and optimizer
class LoraConfig(Section):
    """Low-rank adapters (LoRA) on all linear layers, with a scaling factor of 2.

    Attributes:
        r: Rank of the adapter matrices.
    """

    r: Positive = 16


class ModelConfig(Section):
    """The policy, which is either loaded from `path` or built from `config` with random weights.

    Attributes:
        path: Hub id or local folder of the model.
        config: Transformers config as a dict with model_type, for a model with random weights.
        tokenizer: Kind of tokenizer to build from the data; null loads the tokenizer of `path`.
        vocab_size: Vocabulary size of the tokenizer `bpe`.
        dtype: Dtype of the weights.
        autocast: Dtype of the layers' computations with fp32 weights; null computes in `dtype`.
        device: auto, cpu, cuda or cuda:N, where N is the number of a GPU; auto uses a GPU if one
            exists.
        lora: Train a low-rank adapter instead of the weights; null trains the weights.
        gradient_checkpointing: Recompute each layer in the backward pass; offload also moves layer
            inputs to host memory.
        tiled_mlp: Tokens that an MLP processes at a time, for example 2048; null processes all at
            once.
        trust_remote_code: Run the Python code in a model's folder or hub repository.
    """

    path: UserPath | None = None
    config: dict[str, Any] | None = None
    tokenizer: Literal["bpe", "symbols"] | None = None
    vocab_size: Size = 2048
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    autocast: Literal["bfloat16", "float16"] | None = None
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:[1-9]?[0-9])?)$")
    lora: LoraConfig | None = None
    gradient_checkpointing: Literal[True, False, "offload"] = False
    tiled_mlp: Positive | None = None
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        came = "neither" if self.path is None else f"path={self.path} and config"
        expected = "a model, or config (model=PATH replaces a recipe's config)"
        require((self.path is None) != (self.config is None), "path", expected, came)
        if self.config is not None:
            kind = self.config.get("model_type")
            require(kind, "config.model_type", "one, for example llama", "none")
            expected = "bpe or symbols for a model with random weights"
            require(self.tokenizer, "tokenizer", expected, "null")
        return self


class OptimConfig(Section):
    """The optimizer, AdamW.

    Attributes:
        lr: Learning rate after the warm-up.
        schedule: How the learning rate changes after the warm-up; linear and cosine end at 0.
        warmup: Optimizer steps over which the learning rate rises to `lr`; 0 starts at `lr`.
        weight_decay: Weight decay of AdamW; 0 switches it off.
        max_grad_norm: Largest gradient norm; larger gradients are scaled down, and .inf switches
            this off.
    """

    lr: float = Field(1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Count = 0
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)


class ReferenceConfig(Section):
    """The reference model of the KL divergence.

    Attributes:
        kind: Use no reference, the frozen initial policy, or a copy of the policy that is updated
            regularly.
        sync_every: Steps between updates of a synced reference.
        mixing: Weight m of the policy in an update: reference = m * policy + (1 - m) * reference.
    """

    kind: Literal["none", "frozen", "synced"] = "none"
    sync_every: Positive = 64
    mixing: float = Field(0.6, gt=0, le=1)


class CriticConfig(Section):
    """The value function of PPO, for `advantages: gae`.

    Attributes:
        kind: Put the value head on the policy's layers (shared) or on a copy of the policy (model).
        lr: Learning rate of the critic; null means optim.lr.
        gamma: Discount factor of GAE.
        lam: Lambda of GAE.
        whiten: Scale the advantages of a step to mean 0 and standard deviation 1.
        loss: Loss function of the critic's values; huber changes from quadratic to linear at 1.
        epsilon: Clip range of loss: clipped.
        coef: Weight of the value loss.
        kl_in_reward: Subtract loss.beta * KL from the reward of each token instead of adding it to
            the loss.
    """

    kind: Literal["shared", "model"] = "shared"
    lr: float | None = Field(None, gt=0)
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    whiten: bool = True
    loss: Literal[tuple(VALUE_LOSSES)] = "clipped"  # type: ignore[valid-type]
    epsilon: float = Field(0.2, gt=0)
    coef: float = Field(0.5, ge=0)
    kl_in_reward: bool = False


class WarmStartConfig(Section):
    """Supervised training on the data set's solutions before the first rollout.

    Attributes:
        steps: Optimizer steps of the supervised training.
        batch_size: Solutions per optimizer step.
        lr: Learning rate; it rises in the first 20 steps and falls to 0 along a cosine.
    """

    steps: Positive = 200
    batch_size: Positive = 32
    lr: float = Field(1e-3, gt=0)


# -------------------------------------------------------------------------------- Data and sampling
class DataConfig(Section):
    """The data set: prompts and answers.

    Attributes:
        task: Generated prompts, a fixed list (open), GSM8K, or questions of a file.
        path: A file, a folder with training and test files, a hub id such as openai/gsm8k, or
            reasoning_gym:NAME.
        options: Options of a reasoning_gym data set, for example {size: 1000, seed: 0}.
        columns: Names of the columns to read, for example {prompt: title, answer:
            reward_model.truth}.
        prompt_template: Text with {question} and {COLUMN}, or plain, hash, answer_tag; null sends
            the question.
        system_prompt: System message before every question; null sends none.
        chat: Use the model's chat template; null uses it if the tokenizer has one.
        template_kwargs: Arguments of the chat template, for example {enable_thinking: false}.
        shots_tokens: Number of tokens for worked examples, which are drawn anew for each question.
        drop_unusable: Skip rows with an empty prompt or answer, or with tests that code_tests
            refuses, and log their number; false refuses them.
        n_test: Number of test examples; null uses all, or a tenth of a file without a test split.
        digits: Number of digits in a prompt of the task sort.
    """

    task: Literal[TASKS]  # type: ignore[valid-type]
    path: UserPath | None = None
    options: dict[str, Any] = {}
    columns: dict[Literal["prompt", "answer", "solution", "tests"], str] = {}
    prompt_template: str | None = None
    system_prompt: str | None = None
    chat: bool | None = None
    template_kwargs: dict[str, Any] = {}
    shots_tokens: Positive | None = None
    drop_unusable: bool = False
    n_test: Size | None = None
    digits: int = Field(5, ge=1, le=4096)

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        is_file = self.task in FILES
        expected = f"{'a source' if is_file else 'none'} for task {self.task}"
        require(is_file == bool(self.path), "path", expected, repr(self.path))
        is_gym = (self.path or "").startswith(GYM)
        require(is_gym or not self.options, "options", f"none without path={GYM}NAME", self.options)
        # Only questions from a file have columns, templates and worked examples.
        for name in ("columns", "prompt_template", "system_prompt", "chat", "template_kwargs",
                     "shots_tokens"):  # fmt: skip
            value = getattr(self, name)
            require(is_file or not value, name, f"none for task {self.task}", repr(value))
        return self


class RewardConfig(Section):
    """A reward function and its settings.

    Attributes:
        name: A built-in reward, package.module:function or file.py:function.
        convention: Library for which the function was written; null means grpo_fast.
        label: Name of the reward in the metrics; null uses the function's name.
        weight: Weight in the sum of the rewards; 0 logs the reward without training on it.
        options: Keyword arguments of the function.
        timeout: Seconds that a call in a worker process may take.
        in_process: Call the function in the trainer's process instead of a worker process.
    """

    name: str
    convention: Literal[CONVENTIONS] | None = None  # type: ignore[valid-type]
    label: str | None = None
    weight: float = Field(1.0, ge=-1e30, le=1e30)
    options: dict[str, Any] = {}
    timeout: float = Field(60.0, gt=0, le=1e6)
    in_process: bool = False

    @model_validator(mode="after")
    def _fits_the_name(self) -> RewardConfig:
        is_custom = ":" in self.name  # package.module:function or file.py:function
        expected = f"none for the built-in reward {self.name}"
        require(is_custom or self.convention is None, "convention", expected, self.convention)
        require(is_custom or not self.in_process, "in_process", expected, "true")
        return self


class DynamicSamplingConfig(Section):
    """Replacement of groups in which all rewards are equal. Such groups give no gradient.

    Attributes:
        rounds: Maximum number of resampling rounds; then dropped groups fill the rest of the batch.
    """

    rounds: Positive = 4


class RolloutConfig(Section, Sampling):
    """Sampling of completions.

    Attributes:
        engine: The engine that samples completions.
        temperature: Sampling temperature.
        group_size: Completions per prompt (G).
        prompts_per_step: Prompts per step.
        mask_truncated: Exclude completions that do not end with an EOS from the loss.
        correct_sampling: Correct the loss by the ratio of the trainer's probabilities to the
            sampler's.
        dynamic: Drop groups of equal rewards and sample further prompts; null keeps all groups.
        replay_support: auto normalizes the loss over the tokens that top_p or top_k kept; off uses
            all tokens.
        vllm: Options of the engines vllm and vllm-server.
    """

    engine: EngineName = "transformers"
    temperature: float = Field(1.0, gt=0)
    group_size: Size = 8
    prompts_per_step: Size = 8
    mask_truncated: bool = False
    correct_sampling: bool = False
    dynamic: DynamicSamplingConfig | None = None
    replay_support: Literal["auto", "off"] = "auto"
    vllm: VLLMOptions = Field(default_factory=VLLMOptions)

    @model_validator(mode="after")
    def _consistent(self) -> RolloutConfig:
        # If only top_p is set, limit the number of kept tokens by top_k, because they are stored.
        # For a flat distribution, top_p alone would keep nearly the full vocabulary. Write to
        # __dict__, because a normal assignment would validate the section again and mark top_k as
        # set by the user.
        if self.needs_support and "top_k" not in self.model_fields_set:
            self.__dict__["top_k"] = 512
        is_served = self.engine == "vllm-server"
        expected = "at least one server" if is_served else f"none with engine={self.engine}"
        require(is_served == bool(self.vllm.urls), "vllm.urls", expected, self.vllm.urls)
        fits = self.dynamic is None or self.group_size > 1
        require(fits, "group_size", "at least 2 with dynamic", self.group_size)
        return self

    @property
    def needs_support(self) -> bool:
        """Return True if the engine must report the tokens that top_p or top_k kept."""
        return self.replay_support == "auto" and self.truncates


class EvalConfig(Section, Sampling):
    """Evaluation on held-out questions.

    Attributes:
        every: Steps between evaluations; 0 evaluates only before and after the run.
        n: Number of held-out questions; null uses all.
        samples: Completions per question; more than one also give pass@k and maj@k.
        temperature: Sampling temperature; 0 is greedy.
        max_new_tokens: Maximum number of tokens in a completion; null uses rollout.max_new_tokens.
        batch_size: Number of completions that are sampled at the same time.
    """

    every: Count = 0
    n: Positive | None = None
    samples: Size = 1
    temperature: float = Field(0.0, ge=0)
    max_new_tokens: Size | None = None
    batch_size: Positive = 256

    needs_support: ClassVar[bool] = False  # only a loss needs the tokens that the sampler kept


# ----------------------------------------------------------------------------------------- The loss
# Arguments of LossConfig that are no keys of the section `loss`, because the trainer sets them from
# the model and from the section `rollout`.
OF_THE_RUN = ("softcap", "logit_scale", "max_completion_length")


def _loss_keys() -> dict[str, Any]:
    """Return the fields of the section `loss` for pydantic: the arguments of LossConfig.

    Null means the default of every argument.
    """
    hints = get_type_hints(LossConfig)
    types: dict[str, Any] = {name: hint | None for name, hint in hints.items()}
    types |= {name: Literal[(*choices, None)] for name, choices in CHOICES.items()}
    types |= {"temperature": float | None, "corrections": list[dict[str, Any]] | None}
    defaults = {field.name: field.default for field in fields(LossConfig)} | {"temperature": None}
    defaults["corrections"] = [asdict(correction) for correction in LossConfig.corrections]
    return {name: (types[name], x) for name, x in defaults.items() if name not in OF_THE_RUN}


class LossSettings(
    create_model("Arguments", __base__=Section, __doc__=LossConfig.__doc__, **_loss_keys())  # type: ignore[misc]
):
    """The objective. All arguments of LossConfig, except OF_THE_RUN, are keys.

    Attributes:
        temperature: Temperature of the log-probs; null uses rollout.temperature.
    """


# ------------------------------------------------------------------------------------ The whole run
GAE = "gae"  # value of `advantages` for which a critic provides an advantage for each token
MOST_COMPLETIONS = 1 << 20  # maximum number of completions in one step


class LogConfig(Section):
    """Logs and files of a run.

    Attributes:
        completions_every: Steps between saved tables of completions; 0 saves none.
        progress: Print progress lines and the results of evaluations.
        save_model: Write the trained model to output_dir/model.
    """

    completions_every: Count = 10
    progress: bool = True
    save_model: bool = True


class CheckpointConfig(Section):
    """Checkpoint schedule. A run that ends early also writes a checkpoint.

    With `every: 0` and `every_minutes: 0`, only runs that end early write one.

    Attributes:
        every: Steps between checkpoints; 0 writes them by time, and after the last step.
        every_minutes: Minutes between checkpoints; 0 writes them by steps, and after the last step.
        keep: Number of checkpoints to keep; older ones are deleted.
    """

    every: Count = 0
    every_minutes: float = Field(15, ge=0, le=1e6)
    keep: Positive = 2


class RunConfig(Section):
    """All settings of a run. A run saves them in the file config.yaml of its output_dir.

    Attributes:
        seed: Seed of all random numbers.
        output_dir: Folder for metrics, checkpoints and the trained model.
        model: The policy.
        data: Prompts and answers.
        loss: The objective. All arguments of LossConfig are keys, for example loss.delta.
        advantages: How advantages are computed from rewards.
        advantage_options: Options of `advantages`, for example {eps: 1e-4}.
        rewards: Reward functions, each given as a name, as file.py:function or as a section.
        max_reward_failures: Largest share of samples without a reward; above this share the run
            ends with an error.
        rollout: How completions are sampled.
        optim: The optimizer, AdamW.
        steps: Number of steps. Each step samples completions and trains on them.
        inner_iterations: Number of training passes over the completions of a step (mu).
        minibatches: Number of optimizer steps in one pass over the completions.
        tokens_per_microbatch: Tokens of one forward and backward pass; null uses as many as fit
            into memory.
        shuffle: What to shuffle before each pass is split into minibatches.
        max_approx_kl: Mean KL to the sampling policy above which later passes are skipped; null
            sets no limit.
        reference: The reference model of the KL divergence.
        critic: The value function of PPO, for advantages: gae; null means no critic.
        warm_start: Supervised training on solutions before the first rollout; null skips it.
        eval: Evaluation on held-out questions.
        log: What the run logs and writes.
        checkpoint: When checkpoints are written, and how many are kept.
        distributed: Give each process the full model (ddp), a shard (fsdp2), or a shard of a copy
            (hsdp).
        distributed_replicas: Number of sharded copies of the model, for distributed: hsdp.
        distributed_timeout: Seconds that a process waits for the other processes before it fails.
        resume: auto resumes from the newest checkpoint in output_dir; without one, it starts a new
            run.
    """

    seed: int = Field(0, ge=-(1 << 63), lt=1 << 63)
    output_dir: UserPath = "runs/default"
    model: ModelConfig
    data: DataConfig
    loss: LossSettings = Field(default_factory=LossSettings)
    advantages: Literal[(*MODES, GAE)] = "normalized"  # type: ignore[valid-type]
    advantage_options: dict[str, Any] = {}
    rewards: list[RewardConfig] = []
    max_reward_failures: float = Field(0.5, ge=0, le=1)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    steps: Count = 100
    inner_iterations: Positive = 1
    minibatches: Positive = 1
    tokens_per_microbatch: Positive | None = None
    shuffle: Literal["off", "completions"] = "off"
    max_approx_kl: float | None = Field(None, gt=0)
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig)
    critic: CriticConfig | None = None
    warm_start: WarmStartConfig | None = None
    eval: EvalConfig = Field(default_factory=EvalConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    distributed: Literal["ddp", "fsdp2", "hsdp"] | None = None
    distributed_replicas: Positive | None = None
    distributed_timeout: float = Field(1800, gt=0, le=1e6)
    resume: Literal["auto"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        # Set rollout.max_new_tokens to the length of the answers of the sorting task.
        by_symbol = self.model.tokenizer == "symbols" and self.data.task == "sort"
        if by_symbol and "max_new_tokens" not in self.rollout.model_fields_set:
            self.rollout.max_new_tokens = self.data.digits
        for clashes, one, other, why in self._conflicts():
            if clashes:
                raise conflict(one, other, why)
        if self.advantages != GAE:
            with named_in("advantage_options"):
                options, _ = split_options(self.advantages, self.advantage_options)
                check_options(self.advantages, options)
            check_group_size(self.advantages, self.rollout.group_size)
        is_weighted = any(reward.weight for reward in self.rewards)
        require(is_weighted, "rewards", "a reward with a weight that is not 0", "none")
        count = self.rollout.prompts_per_step * self.rollout.group_size
        most = f"at most {MOST_COMPLETIONS} completions in a step"
        require(count <= MOST_COMPLETIONS, "rollout.group_size", most, count)
        expected = f"a number that divides the {count} completions of a step"
        require(count % self.minibatches == 0, "minibatches", expected, self.minibatches)
        fits = (self.distributed == "hsdp") == (self.distributed_replicas is not None)
        expected = "a number with distributed=hsdp, and null without"
        require(fits, "distributed_replicas", expected, self.distributed_replicas)
        return self

    def _conflicts(self) -> list[tuple[object, str, str, str]]:
        """Return rows (is a conflict, first setting, second setting, reason)."""
        is_gae = self.advantages == GAE
        critic = "critic=null" if self.critic is None else "critic"
        loss = self.loss
        config = self.loss_config()
        kind = self.reference.kind
        in_reward = self.kl_in_reward
        reward = "critic.kl_in_reward=true"
        sampled = "a reward needs the KL of the sampled token, without a ratio"
        corrects = self.rollout.correct_sampling
        of_sampler = any(each.ratio != "current/behaviour" for each in config.corrections)
        is_custom = of_sampler and config.corrections != LossConfig.corrections
        return [
            (is_gae == (self.critic is None), f"advantages={self.advantages}", critic,
             "gae needs the section critic={}, which no other mode reads"),
            (is_gae and self.advantage_options, "advantages=gae", "advantage_options",
             "the options of gae are in the section critic"),
            (in_reward and not loss.beta, reward, "loss.beta=0", "the KL needs a weight above 0"),
            (in_reward and not OBJECTIVES[config.loss_type].reference, reward,
             f"loss.loss_type={config.loss_type}", "this loss has no KL with the weight beta"),
            (in_reward and config.kl_estimator in EXACT, reward,
             f"loss.kl_estimator={config.kl_estimator}", sampled),
            (in_reward and loss.kl_times_ratio, reward, "loss.kl_times_ratio=true", sampled),
            (kind == "none" and (config.uses_reference or in_reward), "reference.kind=none",
             f"loss.beta={loss.beta or 0:g}", "set reference.kind to frozen or synced"),
            (kind != "none" and self.rollout.needs_support and config.kl_estimator in EXACT,
             f"loss.kl_estimator={config.kl_estimator}", "rollout.replay_support=auto",
             "this KL is a sum over the full vocabulary; set rollout.replay_support=off"),
            (kind == "synced" and self.model.lora is not None, "reference.kind=synced",
             "model.lora", "the reference is the model without its adapter"),
            (corrects and not config.corrections, "rollout.correct_sampling=true",
             "loss.corrections", "without corrections it has no use"),
            (is_custom and not corrects, "loss.corrections", "rollout.correct_sampling=false",
             "they read the sampler's log-probabilities; set rollout.correct_sampling=true"),
        ]  # fmt: skip

    @property
    def is_sharded(self) -> bool:
        """Return True if every rank stores only a shard of the weights."""
        return self.distributed in ("fsdp2", "hsdp")

    @property
    def stores_reference(self) -> bool:
        """Return True if checkpoints must store the reference, which has no other weight file."""
        return self.reference.kind == "synced" or self.warm_start is not None

    @property
    def kl_in_reward(self) -> bool:
        """Return True if the KL to the reference is part of the rewards, and not of the loss."""
        return self.critic is not None and self.critic.kl_in_reward

    @property
    def has_code(self) -> bool:
        """Return True if the run executes Python code from outside the package."""
        return self.model.trust_remote_code or any(":" in reward.name for reward in self.rewards)

    def loss_config(self) -> LossConfig:
        """Return the `LossConfig` of the run. Some arguments come from the section `rollout`."""
        # Null means the default, also for arguments that do not accept None.
        settings = {name: value for name, value in self.loss if value is not None}
        if self.kl_in_reward:
            settings["beta"] = 0.0
        rollout = self.rollout
        settings.setdefault("temperature", rollout.temperature)
        with named_in("loss"):
            config = LossConfig(**settings, max_completion_length=rollout.max_new_tokens)
        # The loss type bnpo averages over the tokens of a micro-batch. Average over all tokens of
        # the step instead, so that the result does not depend on the split into micro-batches.
        if config.aggregation == "token_mean_local":
            return replace(config, aggregation="token_mean_global")
        return config


# ------------------------------------------------------------------------------------------ Recipes
RECIPES = resources.files("grpo_fast") / "recipes"


def load_recipe(name_or_path: str, words: Iterable[str] = ()) -> RunConfig:
    """Return the configuration of a recipe.

    Args:
        name_or_path: name of a recipe of the package, or path of a YAML file.
        words: changes such as ``optim.lr=1e-4``.

    Raises:
        ValueError: the recipe does not exist or cannot be read, or a setting is invalid.
    """
    return read_words(RunConfig, words, read_recipe(name_or_path))


def load_saved(path: Path) -> RunConfig:
    """Return the configuration that a run saved in a file.

    Raises:
        ValueError: the file cannot be read. A different version of the package may have written it.
    """
    try:
        return load_recipe(str(path))
    except ValueError as error:
        error.add_note(f"if another version of grpo_fast wrote {path}, use that version")
        raise


def recipe_names() -> list[str]:
    """Return the sorted names of the recipes in the package."""
    return sorted(f.name[:-5] for f in RECIPES.iterdir() if f.name.endswith(".yaml"))


def recipe_table() -> list[list[str]]:
    """Return the command, subject, size, time and requirements of each recipe in the package.

    The first line of a recipe's file contains these values except the command, separated by ` · `.
    """
    table = []
    for name in recipe_names():
        text = (RECIPES / f"{name}.yaml").read_text("utf-8")
        first = text.partition("\n")[0].removeprefix("# ")
        table.append([f"train {name}", *first.split(" · ")])
    return table


def read_recipe(name_or_path: str) -> dict[str, Any]:
    """Return the nested settings of a recipe.

    Args:
        name_or_path: name of a recipe of the package, or path of a YAML file.

    Raises:
        ValueError: the recipe does not exist or cannot be read.
    """
    where, names = f"recipe {name_or_path}", recipe_names()
    # The name of a recipe takes precedence over a file of the same name in the working folder.
    if name_or_path in names:
        settings = read_yaml((RECIPES / f"{name_or_path}.yaml").read_text("utf-8"), where)
    elif os.path.isfile(name_or_path):
        settings = read_yaml(Path(name_or_path), where)
    elif name_or_path.endswith((".yaml", ".yml")) or os.sep in name_or_path:
        raise ValueError(f"recipe: no such file: {quoted(name_or_path)}")
    else:
        came = f"{quoted(name_or_path)}{nearest_hint(name_or_path, names)}"
        raise ValueError(f"recipe: expected one of {', '.join(names)} or a YAML file, got {came}")
    require(isinstance(settings, dict), where, "a mapping of keys", type(settings).__name__)
    return settings
