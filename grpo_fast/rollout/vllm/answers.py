"""Pydantic models of vLLM's responses, and checks of the completions for both vLLM engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import torch
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from grpo_fast.data import escape_control
from grpo_fast.errors import EngineError, NonFiniteLogits, require
from grpo_fast.kernels.support import Support
from grpo_fast.rollout import engine
from grpo_fast.rollout.engine import Completion, Request

if TYPE_CHECKING:
    from grpo_fast.rollout.own.model import SampledModel

CLAMPED = -9999.0  # servers report this value for a log-probability that is NaN or -inf
LEAST_TEMPERATURE = 0.01  # vLLM samples with this temperature if a smaller one is requested
ROUNDING = 1e-3  # largest accepted log-probability in nats; rounding can make it positive


class BadAnswer(EngineError):
    """A response from vLLM is invalid or does not match the request."""


class ServerError(EngineError):
    """A server is unreachable, hangs or failed. A retry may succeed."""


class StaleWeights(ServerError):
    """The server sampled with weights other than those of the request."""


FAST = Field(fail_fast=True)  # report the first bad element of a list, not a million of them
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], FAST]
CONFIG = "vllm_config", "model_config"


class Reply(BaseModel):
    """Base class of vLLM's responses. Values are not converted, and unknown keys are ignored."""

    model_config = ConfigDict(strict=True)


class WeightInfo(Reply):
    weight_version: str


class Paused(Reply):
    is_paused: bool


class WorldSize(Reply):
    world_size: int = Field(ge=1, le=1 << 16)


class Results(Reply):
    """Response to /collective_rpc, with one result from each worker."""

    results: list[str] = Field(min_length=1, fail_fast=True)


class LoRAInfo(Reply):
    """LoRA settings that a server reports if it was started with --enable-lora."""

    max_lora_rank: int
    target_modules: list[str] | None


class ModelInfo(Reply):
    logprobs_mode: str = Field(validation_alias=AliasPath(*CONFIG, "logprobs_mode"))
    dtype: str = Field(validation_alias=AliasPath(*CONFIG, "dtype"))
    lora: LoRAInfo | None = Field(None, validation_alias=AliasPath("vllm_config", "lora_config"))


class Token(Reply):
    token_id: Id
    logprob: float


class Span(Reply):
    """Consecutive tokens of a completion, which were sampled with the same weights."""

    version: str


class Choice(Reply):
    """One completion in a response. If it was aborted, `content` is empty."""

    index: int
    finish_reason: str
    token_ids: Ids
    content: Annotated[list[Token], FAST] = Field(
        [], validation_alias=AliasPath("logprobs", "content")
    )
    weight_versions: Annotated[list[Span], FAST] | None
    sampling_mask: Annotated[list[Ids], FAST] | None = None  # the support of each token


class Logp(Reply):
    logprob: float


class Scores(Reply):
    """For each token of a prompt, log-probabilities by id. The first token has none."""

    prompt_logprobs: Annotated[list[dict[Id, Logp] | None], FAST]


class Choices(Reply):
    choices: Annotated[list[Choice], FAST]


R = TypeVar("R", bound=Reply)


def parsed(kind: type[R], answer: bytes | dict[str, Any], where: str) -> R:
    """Validate a response and return it as an object of the given class.

    Args:
        kind: a pydantic model.
        answer: the JSON text, or the object that it encodes.
        where: the sender, for error messages.

    Raises:
        ServerError: the response is not a JSON object. A proxy may have sent it.
        BadAnswer: a field is missing or has the wrong type.
    """
    try:
        if isinstance(answer, dict):
            return kind.model_validate(answer)
        return kind.model_validate_json(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if not first["loc"] and isinstance(answer, bytes):
        raise ServerError(f"{where}: expected a JSON object, got {answer[:60]!r}")
    place = escape_control(".".join(map(str, first["loc"]))[:80])  # a key may be any text
    raise BadAnswer(f"{where}: {place}: {first['msg']}")


class VLLMRequest(NamedTuple):
    """A request to vLLM for completions that are sampled with one version of the weights.

    Attributes:
        policy: the policy whose weights vLLM must use.
        request: the engine's request.
        version: version number of the weights.
        label: name of vLLM's weights. With an adapter, these are the base weights.
        adapter: name of the adapter that vLLM adds to its weights, or None.
    """

    policy: SampledModel
    request: Request
    version: int
    label: str
    adapter: str | None = None

    @property
    def per_prompt(self) -> int:
        """Number of completions that vLLM samples for each prompt: one if sampling is greedy."""
        return 1 if self.request.sampling.temperature == 0 else self.request.group_size

    @property
    def vocab_size(self) -> int:
        return self.policy.lm.get_input_embeddings().weight.shape[0]

    def parameters(self) -> list[dict[str, Any]]:
        """Return the fields of vLLM's SamplingParams for each prompt."""
        sampling = self.request.sampling
        fits = sampling.temperature == 0 or sampling.temperature >= LEAST_TEMPERATURE
        expected = f"0 (greedy) or at least {LEAST_TEMPERATURE}, to which vLLM raises smaller ones"
        require(fits, "temperature", expected, sampling.temperature)
        same = sampling.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
        same |= {"n": self.per_prompt, "max_tokens": sampling.max_new_tokens}
        # Without ignore_eos, vLLM would also stop at the EOS ids of its model folder.
        same |= {"stop_token_ids": sorted(self.policy.eos_ids), "ignore_eos": True}
        same |= {"logprobs": 0, "detokenize": False}
        places = self.request.places
        if places is None:
            places = range(len(self.request.prompts))
        # vLLM adds g to the seed of the g-th completion. The sum must fit into an int64.
        seeds = [engine.seed_for("vllm", self.request.seed, place) >> 8 for place in places]
        return [same | {"seed": seed} for seed in seeds]

    def completions(self, answer: Choices, where: str) -> list[Completion]:
        """Check the completions of one prompt, and return them sorted by vLLM's index.

        Args:
            answer: vLLM's response for the prompt.
            where: the sender, for error messages.

        Raises:
            ServerError: a completion is unfinished, or was sampled with other weights
                (StaleWeights).
            BadAnswer: tokens, log-probabilities or the finish reason are inconsistent.
            NonFiniteLogits: a log-probability is NaN or -inf.
            ValueError: a completion was cut off by vLLM's max_model_len.
        """
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if any(choice.finish_reason in ("abort", "error") for choice in choices):
            raise ServerError(f"{where}: the server left a completion unfinished")
        indices = [choice.index for choice in choices]
        expected = f"completions 0 to {self.per_prompt - 1}"
        fits = indices == list(range(self.per_prompt))
        require(fits, where, expected, indices[:8], BadAnswer)
        return [self._completion(choice, where) for choice in choices]

    def _completion(self, choice: Choice, where: str) -> Completion:
        # 1. Check that there are not too many ids, that none follows the first EOS, and that all
        #    are in the vocabulary.
        ids = choice.token_ids
        limit = self.request.sampling.max_new_tokens
        ends = [t for t, token in enumerate(ids) if token in self.policy.eos_ids]
        largest = max(ids, default=0)
        fits = 1 <= len(ids) <= limit and ends[:1] in ([], [len(ids) - 1])
        expected = f"1 to {limit} ids below {self.vocab_size} up to the first EOS"
        came = f"{len(ids)} up to {largest}, EOS at {ends}"
        require(fits and largest < self.vocab_size, where, expected, came, BadAnswer)
        # 2. Check the weights before the finish reason. Stale weights only cause another request,
        #    while a wrong finish reason stops the run.
        versions = {span.version[:40] for span in choice.weight_versions or []}
        expected = f"completions by the weights {self.label}"
        came = f"some by {sorted(versions)}"
        require(versions == {self.label}, where, expected, came, StaleWeights)
        # 3. Check that the completion ends with an EOS or at the requested length.
        reason = "stop" if ends else "length"
        fits = choice.finish_reason == reason
        came = repr(choice.finish_reason[:40])
        require(fits, where, f"finish reason {reason}", came, BadAnswer)
        expected = "room for a prompt and rollout.max_new_tokens"
        fits = bool(ends) or len(ids) == limit
        require(fits, f"{where}: max_model_len", expected, f"an end after {len(ids)}")
        # 4. Check the log-probabilities and the support of each token.
        logps = self._logps(choice, where)
        support = self._support(choice, where)
        finish = engine.EOS if ends else engine.LENGTH
        return Completion(ids, logps, finish, self.version, support)

    def _logps(self, choice: Choice, where: str) -> torch.Tensor:
        """Check the log-probabilities of a completion and return them, (n,) fp32."""
        ids = [token.token_id for token in choice.content]
        expected = f"a log-probability of each of the {len(choice.token_ids)} tokens"
        came = f"{len(ids)}, or those of other tokens"
        require(ids == choice.token_ids, where, expected, came, BadAnswer)
        logps = torch.tensor([token.logprob for token in choice.content], dtype=torch.float32)
        if not (logps > CLAMPED).all():  # also False for NaN
            raise NonFiniteLogits(f"the policy's logits are NaN or infinite, according to {where}")
        fits = (logps <= ROUNDING).all()
        require(fits, where, "log-probabilities up to 0", f"{logps.max():.3g}", BadAnswer)
        return logps

    def _support(self, choice: Choice, where: str) -> Support | None:
        """Check the support of the tokens and return it, or None if it is missing or not needed."""
        rows = choice.sampling_mask
        if rows is None or not self.request.sampling.needs_support:
            return None
        fits = len(rows) == len(choice.token_ids)
        for token, row in zip(choice.token_ids, rows, strict=False):
            is_set = len(set(row)) == len(row)
            fits &= not row or (token in row and is_set and max(row) < self.vocab_size)
        expected = "a support of distinct ids of the vocabulary that contains the sampled token"
        require(fits, f"{where}: sampling_mask", expected, "other ids", BadAnswer)
        ids = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        return Support(ids, torch.tensor([0, *map(len, rows)]).cumsum(0))

    def in_groups(self, by_prompt: Sequence[list[Completion]]) -> list[Completion]:
        """Join the completions of all prompts into one list, `group_size` for each prompt.

        vLLM samples only one greedy completion per prompt, so this method repeats it.
        """
        copies = self.request.group_size // self.per_prompt
        completions = [one for group in by_prompt for one in group * copies]
        if self.request.sampling.needs_support and any(x.support is None for x in completions):
            engine.warn_without_support("vLLM without --return-sampling-mask (on GPUs only)")
        return completions
