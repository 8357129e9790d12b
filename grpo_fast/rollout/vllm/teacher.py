"""A teacher model on a vLLM server, which returns its most likely ids for each completion token."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from grpo_fast.errors import LEAST_LOGP, require
from grpo_fast.rollout.vllm import answers
from grpo_fast.rollout.vllm.answers import ROUNDING, BadAnswer, Reply, ServerError
from grpo_fast.rollout.vllm.http import GENERATE, Server, at_once
from grpo_fast.rollout.vllm.options import VLLMOptions

CONNECTIONS = 64  # most connections to the server
PAUSE_S = 1.0  # seconds between two tries
Sample = tuple[list[int], int]  # token ids of prompt and completion, and the prompt's length


class Logp(Reply):
    logprob: float


class Scores(Reply):
    """Log-probabilities of each token and of the most likely ids at its position.

    The entry of the first token is None.
    """

    prompt_logprobs: Annotated[list[dict[answers.Id, Logp] | None], answers.FAST]


class TeacherServer:
    """Client for a teacher's server, started with --enable-scale-out.

    The teacher must use the student's token ids. Every response is checked. Log-probabilities that
    no softmax returns, such as -9999 for every token, could otherwise make the loss exactly 0, and
    the student would learn nothing without any error.

    Args:
        url: the server, as `http://host:port`.
        topk: number of most likely ids to request for each token. 0 requests only the
            log-probability of the completion's token.
        vocab_size: number of rows of the student's LM head.
        options: uses `timeout`, the limit in seconds for a response, and `patience`, the time in
            seconds to wait for a server that does not respond.

    Raises:
        ValueError: the server refuses the requests, for example because `topk` is larger than its
            --max-logprobs.
        ServerError: the server does not respond, or fails.
        BadAnswer: the response does not contain the requested log-probabilities.
    """

    def __init__(self, url: str, topk: int, vocab_size: int, options: VLLMOptions) -> None:
        self.server = Server(url)
        self.vocab_size = vocab_size
        self.options = options
        self.topk = min(topk, vocab_size)
        self.where = f"teacher {url}{GENERATE}"
        self.scores([([0, 0], 1)])  # if the server refuses requests, fail before the run starts

    def scores(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the teacher's ids and log-probabilities at each completion token.

        Args:
            samples: for each sample, the token ids of prompt and completion, and the prompt's
                length.

        Returns:
            One (n, K + 1, 2) fp64 tensor for each sample with n completion tokens. Entry [t, k] is
            (token id, log-probability). k = 0 is the completion's token, followed by the other ids.
            If this token is among the K most likely, the last entry is padding with log-probability
            -inf. K + 1 is at most the size of the vocabulary.
        """
        return at_once(CONNECTIONS, self._scores, samples)

    def _scores(self, sample: Sample) -> Tensor:
        """Request the scores of one sample. Retry for up to `patience` seconds."""
        parameters = {"max_tokens": 1, "prompt_logprobs": self.topk, "detokenize": False}
        body = {"token_ids": sample[0], "sampling_params": parameters}
        seconds = self.options.timeout
        until = time.monotonic() + self.options.patience
        while True:
            try:
                answer = self.server.call("POST", GENERATE, seconds, Scores, body)
                return self._rows(answer.prompt_logprobs, *sample)
            except ServerError:
                if time.monotonic() > until:
                    raise
                time.sleep(PAUSE_S)

    def _rows(self, given: list[dict[int, Logp] | None], ids: list[int], start: int) -> Tensor:
        """Check the server's response for one sample and return its tensor, (n, K + 1, 2)."""
        K = self.topk
        V = self.vocab_size
        rows = []
        expected = f"a row for each of {len(ids)} tokens"
        require(len(given) == len(ids), self.where, expected, len(given), BadAnswer)
        likeliest = f"every token and the {K} likeliest ids"
        same_ids = f"a teacher with the student's {V} ids"
        # 1. Collect a row of (id, log-probability) pairs for each completion token.
        for token, row in zip(ids[start:], given[start:], strict=True):
            # A row has K + 1 ids if the token is not among the K most likely.
            fits = row is not None and token in row and len(row) in (K, K + 1)
            require(fits, self.where, likeliest, row and len(row), BadAnswer)
            require(max(row) < V, self.where, same_ids, max(row), BadAnswer)
            first = [token, *(i for i in row if i != token)]
            pairs = [(i, row[i].logprob) for i in first] + [(0, -torch.inf)] * (K + 1 - len(row))
            rows.append(pairs[:V])
        # 2. Check that log-probabilities are at most 0 and sum to a probability of at most 1. NaN
        #    fails both checks.
        scores = torch.tensor(rows, dtype=torch.float64)
        logps = scores[..., 1]
        are_logps = (logps <= ROUNDING).all() and (logps.exp().sum(1) <= 1 + ROUNDING).all()
        expected = "log-probabilities whose probabilities sum to 1 at most"
        require(are_logps, self.where, expected, "larger ones, or NaN", BadAnswer)
        # 3. Check that no row is too unlikely for a softmax. The most likely of V ids has a
        #    probability of at least 1/V. Allow 1 nat for rounding.
        least = -math.log(V) - 1 if K else LEAST_LOGP
        largest = logps.amax(1).min()
        what = f"the most likely of {V} ids" if K else "a completion's token"
        expected = f"a log-probability above {least:.4g} of {what}"
        require(largest > least, self.where, expected, f"{largest:.4g}", BadAnswer)
        logps[logps <= answers.CLAMPED] = -torch.inf  # JSON has no -inf
        return scores
