"""Requests for completions, and checks of the responses, for both vLLM engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from grpo_fast.errors import EngineError, NonFiniteLogits, escape_control, reason, require
from grpo_fast.kernels.types import Support
from grpo_fast.rollout import engine
from grpo_fast.rollout.engine import Completion, Request

if TYPE_CHECKING:
    from grpo_fast.rollout.own.model import SampledModel

LOGPROBS = "processed_logprobs"  # the option --logprobs-mode
CLAMPED = -9999.0  # servers report this value for a log-probability that is NaN or -inf
LEAST_TEMPERATURE = 0.01  # vLLM samples with this temperature if a smaller one is requested
ROUNDING = 1e-3  # largest accepted log-probability in nats; rounding can make it positive


class BadAnswer(EngineError):
    """A response from vLLM is invalid or does not match the request."""


class ServerError(EngineError):
    """A server is unreachable, hangs or failed. A retry may succeed."""


class StaleWeights(ServerError):
    """The server sampled with weights other than those of the request."""


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Convert an error of the block, which reads a response, to a BadAnswer.

    Args:
        where: the sender of the response, for the message.
    """
    try:
        yield
    except (LookupError, AttributeError, TypeError, ValueError, OverflowError) as error:
        why = escape_control(reason(error))
        raise BadAnswer(f"{where}: the response has other fields than vLLM 0.32's: {why}") from None


class VLLMRequest(NamedTuple):
    """A request to vLLM for completions that are sampled with one version of the weights.

    Attributes:
        policy: the policy whose weights vLLM must use.
        request: the engine's request.
        version: version number of the weights.
        label: name of these weights, which vLLM reports with each completion.
    """

    policy: SampledModel
    request: Request
    version: int
    label: str

    @property
    def per_prompt(self) -> int:
        """Number of completions that vLLM samples for each prompt: one if sampling is greedy."""
        return 1 if self.request.sampling.temperature == 0 else self.request.group_size

    @property
    def limit(self) -> int:
        """Largest number of tokens of a completion."""
        return self.request.sampling.max_new_tokens

    def parameters(self) -> list[dict[str, Any]]:
        """Return the fields of vLLM's SamplingParams for each prompt."""
        sampling = self.request.sampling
        fits = sampling.temperature == 0 or sampling.temperature >= LEAST_TEMPERATURE
        expected = f"0 (greedy) or at least {LEAST_TEMPERATURE}, to which vLLM raises smaller ones"
        require(fits, "temperature", expected, sampling.temperature)
        same = sampling.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
        same |= {"n": self.per_prompt, "max_tokens": self.limit, "logprobs": 0, "detokenize": False}
        # Without ignore_eos, vLLM would also stop at the EOS ids of its model folder.
        same |= {"stop_token_ids": sorted(self.policy.eos_ids), "ignore_eos": True}
        places = self.request.places or range(len(self.request.prompts))
        # vLLM adds g to the seed of the g-th completion. The sum must fit into an int64.
        seeds = [engine.seed_for("vllm", self.request.seed, place) >> 8 for place in places]
        return [same | {"seed": seed} for seed in seeds]

    def completions(self, answer: Mapping[str, Any], where: str) -> list[Completion]:
        """Check the completions of one prompt, and return them sorted by vLLM's index.

        Args:
            answer: vLLM's response for the prompt, with a list `choices`.
            where: the sender, for error messages.

        Raises:
            ServerError: a completion is unfinished, or was sampled with other weights
                (StaleWeights).
            BadAnswer: tokens or log-probabilities are inconsistent.
            NonFiniteLogits: a log-probability is NaN or -inf.
            ValueError: a completion was cut off by vLLM's max_model_len.
        """
        with reading(where):
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if any(choice["finish_reason"] in ("abort", "error") for choice in choices):
                raise ServerError(f"{where}: the server left a completion unfinished")
            indices = [choice["index"] for choice in choices]
            expected = f"completions 0 to {self.per_prompt - 1}"
            fits = indices == list(range(self.per_prompt))
            require(fits, where, expected, indices[:8], BadAnswer)
            found = [self._completion(choice, where) for choice in choices]
        for one in found:
            fits = one.finish_reason == engine.EOS or len(one.ids) == self.limit
            expected = "room for a prompt and rollout.max_new_tokens"
            require(fits, f"{where}: max_model_len", expected, f"an end after {len(one.ids)}")
        return found

    def _completion(self, choice: Mapping[str, Any], where: str) -> Completion:
        vocabulary = self.policy.lm.get_input_embeddings().weight.shape[0]

        def are_ids(values: Sequence[int]) -> bool:
            is_int = {*map(type, values)} == {int}
            return is_int and 0 <= min(values) <= max(values) < vocabulary

        # 1. Check that there are not too many ids, that none follows the first EOS, and that all
        #    are in the vocabulary.
        ids = choice["token_ids"]
        ends = [t for t, token in enumerate(ids) if token in self.policy.eos_ids]
        fits = are_ids(ids) and len(ids) <= self.limit and ends in ([], [len(ids) - 1])
        expected = f"1 to {self.limit} ids below {vocabulary} up to the first EOS"
        came = f"{len(ids)} ids {str(ids[:8])[:80]}, EOS at {ends[:8]}"
        require(fits, where, expected, came, BadAnswer)
        # 2. Check that only the requested weights sampled the completion.
        versions = {str(span["version"])[:40] for span in choice["weight_versions"] or []}
        expected = f"completions by the weights {self.label}"
        came = f"some by {sorted(versions)}"
        require(versions == {self.label}, where, expected, came, StaleWeights)
        # 3. Check the log-probability of each token.
        content = choice["logprobs"]["content"]
        fits = [token["token_id"] for token in content] == ids
        expected = f"a log-probability of each of the {len(ids)} tokens"
        require(fits, where, expected, f"{len(content)}, or those of other tokens", BadAnswer)
        logps = torch.tensor([token["logprob"] for token in content], dtype=torch.float32)
        if not (logps > CLAMPED).all():  # also False for NaN
            raise NonFiniteLogits(f"the policy's logits are NaN or infinite, according to {where}")
        fits = bool((logps <= ROUNDING).all())
        require(fits, where, "log-probabilities up to 0", f"{logps.max():.3g}", BadAnswer)
        # 4. Check the ids that truncation kept for each token.
        support = None
        rows = choice.get("sampling_mask")
        if rows is not None and self.request.sampling.needs_support:
            fits = all(
                not row or (token in row and len({*row}) == len(row) and are_ids(row))
                for token, row in zip(ids, rows, strict=True)
            )
            expected = "a sampling_mask of distinct ids of the vocabulary with the sampled token"
            require(fits, where, expected, "other ids", BadAnswer)
            flat = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
            support = Support(flat, torch.tensor([0, *map(len, rows)]).cumsum(0))
        return Completion(ids, logps, engine.EOS if ends else engine.LENGTH, self.version, support)

    def in_groups(self, by_prompt: Sequence[list[Completion]]) -> list[Completion]:
        """Join the completions of all prompts into one list, `group_size` for each prompt.

        vLLM samples only one greedy completion per prompt, so this method repeats it.
        """
        copies = self.request.group_size // self.per_prompt
        completions = [one for group in by_prompt for one in group * copies]
        if self.request.sampling.needs_support and any(x.support is None for x in completions):
            engine.warn_without_support("vLLM without --return-sampling-mask (on GPUs only)")
        return completions
