"""The requests of both vLLM engines, and the one door by which answers come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from grpo_fast.data import escape_control
from grpo_fast.errors import EngineError, NonFiniteLogits, require
from grpo_fast.rollout.engine import (
    EOS,
    LENGTH,
    Completion,
    Kept,
    Request,
    say_that_kept_is_unknown,
    seed_for,
)

CLAMPED = -9999.0  # what a server writes for a log-probability that is NaN or -inf
ROUNDING = 1e-3  # nats by which rounding may lift a log-probability above 0


class BadAnswer(EngineError):
    """An answer of vLLM that does not fit the request."""


class ServerError(EngineError):
    """A server is gone, hangs or failed: another try may do."""


class StaleWeights(ServerError):
    """Completions that were sampled with other weights than the request's."""


# ------------------------------------------------------------------------------------ schema
FAST = Field(fail_fast=True)  # one error of a list is enough
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], FAST]
CONFIG, CONTENT = ("vllm_config", "model_config"), AliasPath("logprobs", "content")


class Reply(BaseModel):
    """An answer of vLLM: no value is converted, and keys that are not named do not matter."""

    model_config = ConfigDict(strict=True)


class WeightInfo(Reply):
    weight_version: str


class Paused(Reply):
    is_paused: bool


class WorldSize(Reply):
    world_size: int = Field(ge=1, le=1 << 16)


class Results(Reply):
    results: list[str] = Field(min_length=1, fail_fast=True)  # of each worker


class ModelInfo(Reply):
    logprobs_mode: str = Field(validation_alias=AliasPath(*CONFIG, "logprobs_mode"))
    dtype: str = Field(validation_alias=AliasPath(*CONFIG, "dtype"))


class Token(Reply):
    token_id: Id
    logprob: float


class Span(Reply):
    version: str  # of the weights that sampled the tokens from start to end
    start: int
    end: int


class Choice(Reply):
    """One completion, in-process or from a server; one that was aborted has no content."""

    index: int
    finish_reason: str
    token_ids: Ids
    content: Annotated[list[Token], FAST] = Field([], validation_alias=CONTENT)
    weight_versions: Annotated[list[Span], FAST] | None
    sampling_mask: Annotated[list[Ids], FAST] | None = None  # what each token was drawn from


class Choices(Reply):
    choices: Annotated[list[Choice], FAST]


R = TypeVar("R", bound=Reply)


def parsed(kind: type[R], answer: bytes | dict[str, Any], where: str) -> R:
    """An answer, every field of it checked.

    Raises:
        ServerError: it is no JSON object, so perhaps another's than the server's.
        BadAnswer: a field is missing, or of another kind.
    """
    try:
        if isinstance(answer, dict):
            return kind.model_validate(answer)
        return kind.model_validate_json(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    if not first["loc"] and isinstance(answer, bytes):
        raise ServerError(f"{where}: expected a JSON object, got {answer[:60]!r}")
    place = escape_control(".".join(map(str, first["loc"]))[:80])  # a key may be anything
    raise BadAnswer(f"{where}: {place}: {first['msg']}")


# ------------------------------------------------------------------------------- completions
class Asked(NamedTuple):
    """What vLLM is asked: a request, to be sampled with one version of the weights."""

    policy: Any
    request: Request
    version: int
    label: str  # of these weights, as vLLM has been told

    @property
    def per_prompt(self) -> int:
        """Completions of a prompt that vLLM makes. Greedy ones are all the same: it makes one."""
        return 1 if self.request.sampling.temperature == 0 else self.request.group_size

    def parameters(self) -> list[dict[str, Any]]:
        """vLLM's SamplingParams for each prompt."""
        request, sampling = self.request, self.request.sampling
        same = {
            "n": self.per_prompt, "logprobs": 0, "detokenize": False,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_tokens": sampling.max_new_tokens, "stop_token_ids": sorted(self.policy.eos_ids),
            "ignore_eos": True,  # the model's own would come on top of these
        }  # fmt: skip
        where = range(len(request.prompts)) if request.places is None else request.places
        # vLLM gives the g-th completion this seed plus g, and the sum has to stay an int64.
        return [same | {"seed": seed_for("vllm", request.seed, place) >> 8} for place in where]

    @property
    def vocab_size(self) -> int:
        return self.policy.lm.get_input_embeddings().weight.shape[0]

    def completions(self, answer: Choices, where: str) -> list[Completion]:
        """The completions of a prompt, in the order of their seeds.

        Raises:
            ServerError: one was left unfinished, or sampled with other weights (StaleWeights).
            BadAnswer: tokens and log-probabilities that do not fit, or an end that is none.
            NonFiniteLogits: a log-probability that is no number.
            ValueError: vLLM's max_model_len cut a completion off.
        """
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        if any(choice.finish_reason in ("abort", "error") for choice in choices):
            raise ServerError(f"{where}: the server left a completion unfinished")
        indices = [choice.index for choice in choices]
        fits = indices == list(range(self.per_prompt))
        require(fits, where, f"completions 0 to {self.per_prompt - 1}", indices[:8], BadAnswer)
        return [self._completion(choice, where) for choice in choices]

    def _completion(self, choice: Choice, where: str) -> Completion:
        ids, limit = choice.token_ids, self.request.sampling.max_new_tokens
        ends = [t for t, token in enumerate(ids) if token in self.policy.eos_ids]
        expected, came = f"1 to {limit} tokens up to the first EOS", f"{len(ids)}, EOS at {ends}"
        fits = 1 <= len(ids) <= limit and ends[:1] in ([], [len(ids) - 1])
        require(fits, where, expected, came, BadAnswer)
        expected, largest = f"token ids below the embedding's {self.vocab_size} rows", max(ids)
        require(largest < self.vocab_size, where, expected, largest, BadAnswer)
        self._check_weights(choice, where)
        reason, came = "stop" if ends else "length", repr(choice.finish_reason[:40])
        require(choice.finish_reason == reason, where, f"finish reason {reason}", came, BadAnswer)
        expected = "room for a prompt and rollout.max_new_tokens"
        is_whole = ends or len(ids) == limit
        require(is_whole, f"{where}: max_model_len", expected, f"an end after {len(ids)}")
        logps, kept = self._logps(choice, where), self._kept(choice, where)
        return Completion(ids, logps, EOS if ends else LENGTH, self.version, kept)

    def _check_weights(self, choice: Choice, where: str) -> None:
        spans = choice.weight_versions or []
        edges = [0, *(span.end for span in spans)]
        is_whole = edges == sorted(edges) and edges[-1] == len(choice.token_ids)
        fits = is_whole and [span.start for span in spans] == edges[:-1]
        require(fits, where, "the weights of every token", f"those up to {edges}", BadAnswer)
        other = next((span.version[:40] for span in spans if span.version != self.label), None)
        expected = f"completions by the weights {self.label}"
        require(other is None, where, expected, f"some by {other!r}", StaleWeights)

    def _logps(self, choice: Choice, where: str) -> torch.Tensor:  # (n,) fp32
        ids = [token.token_id for token in choice.content]
        expected = f"a log-probability of each of the {len(choice.token_ids)} tokens"
        came = f"{len(ids)}, or those of others"
        require(ids == choice.token_ids, where, expected, came, BadAnswer)
        logps = [token.logprob for token in choice.content]
        if not all(logp > CLAMPED for logp in logps):
            raise NonFiniteLogits(f"the policy's logits are NaN or infinite, says {where}")
        largest = max(logps)
        expected, came = "log-probabilities up to 0", f"{largest:.3g}"
        require(largest <= ROUNDING, where, expected, came, BadAnswer)
        return torch.tensor(logps, dtype=torch.float32)

    def _kept(self, choice: Choice, where: str) -> Kept | None:
        ids, rows = choice.token_ids, choice.sampling_mask
        if rows is None or not self.request.sampling.wants_kept:
            return None
        fits = len(rows) == len(ids) and all(
            token in row and len(set(row)) == len(row) and max(row) < self.vocab_size
            for token, row in zip(ids, rows, strict=True) if row
        )  # fmt: skip
        expected = "every token among those that it was drawn from, each once, in the vocabulary"
        require(fits, where, expected, "others", BadAnswer)
        kept = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
        return Kept(kept, torch.tensor([0, *map(len, rows)]).cumsum(0))

    def in_groups(self, by_prompt: Sequence[list[Completion]]) -> list[Completion]:
        """G completions of each prompt, from the `per_prompt` that vLLM made."""
        copies = self.request.group_size // self.per_prompt
        completions = [one for group in by_prompt for one in group * copies]
        if self.request.sampling.wants_kept and any(one.kept is None for one in completions):
            say_that_kept_is_unknown("vLLM without --return-sampling-mask (on GPUs only)")
        return completions
