"""A teacher on a vLLM server, which gives its likeliest ids at every token of a completion."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from grpo_fast.errors import LEAST_LOGP, argument_error, require
from grpo_fast.rollout.vllm import answers
from grpo_fast.rollout.vllm.answers import ROUNDING, BadAnswer, Reply, ServerError
from grpo_fast.rollout.vllm.http import GENERATE, Server, at_once
from grpo_fast.rollout.vllm.options import VLLMOptions

CONNECTIONS = 64
PAUSE_S = 1.0  # between two tries
Sample = tuple[list[int], int]  # ids of prompt and completion, and the length of the prompt


class Logp(Reply):
    logprob: float


class Scores(Reply):
    """For each token but the first: log-probabilities of the token and other ids."""

    prompt_logprobs: Annotated[list[dict[answers.Id, Logp] | None], answers.FAST]


class TeacherServer:
    """A server of a model with the student's token ids, started with --enable-scale-out.

    Every answer is checked here. A row of all `vocab_size` ids must sum to 1. In any other row the
    largest log-probability has a lower bound: the likeliest of V ids has at least the probability
    1/V, from which 1 nat is allowed for rounding. With `topk=0` a row holds the
    completion's own token alone, whose log-probability must be above `errors.LEAST_LOGP`.

    Args:
        topk: number of ids that are requested at every token; 0 requests only the token's own.
        options: `timeout` for an answer, and `patience` with a server that does not answer.

    Raises:
        ValueError: the server refuses such requests (for example more ids than its --max-logprobs).
        ServerError: the server does not answer, or fails.
        BadAnswer: the answer does not hold the requested log-probabilities.
    """

    def __init__(self, url: str, topk: int, vocab_size: int, options: VLLMOptions) -> None:
        self.server = Server(url)
        self.vocab_size = vocab_size
        self.options = options
        self.topk = min(topk, vocab_size)
        self.where = f"teacher {url}{GENERATE}"
        self.scores([([0, 0], 1)])  # so that a refusal comes before the run begins

    def scores(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the ids and log-probabilities of each sample's completion.

        Returns:
            For each sample (n, K + 1, 2) fp64, n the tokens of its completion. The token itself
            comes first, then the other ids. If the token is one of the K likeliest ids, the last
            place has the log-probability -inf. K + 1 is at most the size of the vocabulary.
        """
        return at_once(CONNECTIONS, self._ask, samples)

    def _ask(self, sample: Sample) -> Tensor:
        parameters = {"max_tokens": 1, "prompt_logprobs": self.topk, "detokenize": False}
        body = {"token_ids": sample[0], "sampling_params": parameters}
        limit = answers.BODY + answers.TOKEN * (self.topk + 1) * len(sample[0])
        seconds = self.options.timeout
        until = time.monotonic() + self.options.patience
        while True:
            try:
                answer = self.server.call("POST", GENERATE, seconds, Scores, body, limit)
                return self._rows(answer.prompt_logprobs, *sample)
            except ServerError:
                if time.monotonic() > until:
                    raise
                time.sleep(PAUSE_S)

    def _rows(self, said: list[dict[int, Logp] | None], ids: list[int], start: int) -> Tensor:
        K = self.topk
        V = self.vocab_size
        rows = []
        expected = f"a row for each of {len(ids)} tokens"
        require(len(said) == len(ids), self.where, expected, len(said), BadAnswer)
        likeliest = f"every token and the {K} likeliest ids"
        own = f"a teacher of the student's {V} ids"
        for token, row in zip(ids[start:], said[start:], strict=True):
            # K + 1 ids if the token is not one of the K likeliest.
            fits = row is not None and token in row and len(row) in (K, K + 1)
            require(fits, self.where, likeliest, row and len(row), BadAnswer)
            require(max(row) < V, self.where, own, max(row), BadAnswer)
            first = [token, *(i for i in row if i != token)]
            pairs = [(i, row[i].logprob) for i in first] + [(0, -torch.inf)] * (K + 1 - len(row))
            rows.append(pairs[:V])
        scores = torch.tensor(rows, dtype=torch.float64)
        logps = scores[..., 1]
        sums = logps.exp().sum(1)
        are_logps = (logps <= ROUNDING).all() and (sums <= 1 + ROUNDING).all()
        expected = "log-probabilities, which sum to 1 at most"
        require(are_logps, self.where, expected, "others, or NaN", BadAnswer)
        has_all_ids = torch.tensor([len(row) >= V for row in said[start:]])
        self._check_mass(sums, logps.amax(1), has_all_ids)
        logps[logps <= answers.CLAMPED] = -torch.inf  # JSON has no -inf
        return scores

    def _check_mass(self, sums: Tensor, largest: Tensor, has_all_ids: Tensor) -> None:
        """Refuse rows that no softmax returns: they would add exactly 0 to the loss."""
        for total in sums[has_all_ids & ((sums - 1).abs() > ROUNDING)].tolist():
            expected = f"probabilities of all {self.vocab_size} ids, which sum to 1"
            raise argument_error(self.where, expected, f"a sum of {total:.4g}", BadAnswer)
        least = -math.log(self.vocab_size) - 1 if self.topk else LEAST_LOGP
        what = f"the likeliest of {self.vocab_size} ids" if self.topk else "a completion's token"
        for came in largest[~has_all_ids & ~(largest > least)].tolist():
            expected = f"a log-probability above {least:.4g} of {what}"
            raise argument_error(self.where, expected, f"{came:.4g}", BadAnswer)
