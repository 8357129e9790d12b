"""A teacher on a vLLM server: its likeliest ids at every token of a completion."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from grpo_fast.errors import LEAST_LOGP, require, wrong
from grpo_fast.rollout.vllm.answers import (
    CLAMPED,
    FAST,
    ROUNDING,
    BadAnswer,
    Id,
    Reply,
    ServerError,
)
from grpo_fast.rollout.vllm.http import BODY, GENERATE, TOKEN, Server
from grpo_fast.rollout.vllm.options import VLLMOptions

CONNECTIONS = 64
PAUSE_S = 1.0  # between two tries
Sample = tuple[list[int], int]  # prompt and completion as one, and the length of the prompt


class Logp(Reply):
    logprob: float


class Scores(Reply):
    """For every token but the first: log-probabilities of it and of other ids, at temperature 1."""

    prompt_logprobs: Annotated[list[dict[Id, Logp] | None], FAST]


class TeacherServer:
    """A server of a model with the student's token ids, started with --enable-scale-out.

    Every answer is checked here, and nowhere else. A row of all `vocab_size` ids must sum to 1. The
    largest log-probability of any other row has a lower bound: the likeliest of V ids has at least
    the probability 1/V, from which 1 nat is allowed for rounding. With `topk=0` a row holds the
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
        self.server, self.vocab_size, self.options = Server(url), vocab_size, options
        self.topk, self.where = min(topk, vocab_size), f"teacher {url}{GENERATE}"
        self.scores([([0, 0], 1)])  # a refusal comes before the run begins

    def scores(self, samples: Sequence[Sample]) -> list[Tensor]:
        """(n, K + 1, 2) fp64 for each sample: ids and log-probabilities at its last n tokens.

        First the token itself, then the other ids; where it is one of the K, the last place is
        empty: -inf. The vocabulary bounds K + 1.
        """
        pool = ThreadPoolExecutor(CONNECTIONS)
        try:
            return list(pool.map(self._ask, samples))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, sample: Sample) -> Tensor:
        parameters = {"max_tokens": 1, "prompt_logprobs": self.topk, "detokenize": False}
        body = {"token_ids": sample[0], "sampling_params": parameters}
        limit = TOKEN * (self.topk + 1)
        call = partial(self.server.call, "POST", GENERATE, self.options.timeout, Scores, body)
        until = time.monotonic() + self.options.patience
        while True:
            try:
                answer = call(limit=BODY + limit * len(sample[0]))
                return self._rows(answer.prompt_logprobs, *sample)
            except ServerError:
                if time.monotonic() > until:
                    raise
                time.sleep(PAUSE_S)

    def _rows(self, said: list[dict[int, Logp] | None], ids: list[int], start: int) -> Tensor:
        K, V, rows = self.topk, self.vocab_size, []
        fits, expected = len(said) == len(ids), f"a row for each of {len(ids)} tokens"
        require(fits, self.where, expected, len(said), BadAnswer)
        likeliest = f"every token and the {K} likeliest ids"
        own = f"a teacher of the student's {V} ids"
        for token, row in zip(ids[start:], said[start:], strict=True):
            # The token comes on top of the likeliest where it is none of them.
            fits = row is not None and token in row and len(row) in (K, K + 1)
            require(fits, self.where, likeliest, row and len(row), BadAnswer)
            largest = max(row)
            require(largest < V, self.where, own, largest, BadAnswer)
            first = [token, *(i for i in row if i != token)]
            pairs = [(i, row[i].logprob) for i in first] + [(0, -torch.inf)] * (K + 1 - len(row))
            rows.append(pairs[:V])
        scores = torch.tensor(rows, dtype=torch.float64)
        logps = scores[..., 1]
        sums = logps.exp().sum(1)
        are_logps = (logps <= ROUNDING).all() and (sums <= 1 + ROUNDING).all()
        expected = "log-probabilities, which sum to 1 at most"
        require(are_logps, self.where, expected, "others, or NaN", BadAnswer)
        is_whole = torch.tensor([len(row) >= V for row in said[start:]])
        self._check_mass(sums, logps.amax(1), is_whole)
        logps[logps <= CLAMPED] = -torch.inf  # vLLM writes a number for it
        return scores

    def _check_mass(self, sums: Tensor, largest: Tensor, is_whole: Tensor) -> None:  # (n,) each
        """Refuse rows that no softmax gives: they would add exactly 0 to the loss."""
        for total in sums[is_whole & ((sums - 1).abs() > ROUNDING)].tolist():
            expected = f"probabilities of all {self.vocab_size} ids, which sum to 1"
            raise wrong(self.where, expected, f"a sum of {total:.4g}", BadAnswer)
        least = -math.log(self.vocab_size) - 1 if self.topk else LEAST_LOGP
        what = f"the likeliest of {self.vocab_size} ids" if self.topk else "a completion's token"
        for came in largest[~is_whole & ~(largest > least)].tolist():
            expected = f"a log-probability above {least:.4g} of {what}"
            raise wrong(self.where, expected, f"{came:.4g}", BadAnswer)
