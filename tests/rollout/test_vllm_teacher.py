"""Tests of a teacher on a stand-in vLLM server, with valid and invalid responses."""

import math
import time
from typing import Any

import pytest
import torch

from grpo_fast.errors import EngineError
from grpo_fast.rollout.vllm.answers import BadAnswer
from grpo_fast.rollout.vllm.options import VLLMOptions
from grpo_fast.rollout.vllm.teacher import TeacherServer
from tests.rollout.vllm_stand_in import GENERATE, Raw, StandIn, all_logps

LOW = {"logprob": -99.0}
SAMPLES = [([3, 5, 2, 4, 9], 2), ([6, 8, 7], 1), ([3, 5, 1], 2)]


def teacher_of(policy: Any, server: StandIn, topk: int, **options: float) -> TeacherServer:
    options = {"timeout": 20.0, "patience": 0.5, **options}
    return TeacherServer(server.url, topk, len(policy.head.weight), VLLMOptions(**options))


@pytest.mark.parametrize("topk", [0, 1, 3, 8, 99])
def test_rows_are_the_models_log_probabilities(policy, server, topk):
    """Check that a teacher server returns the model's log-probabilities for each completion token.

    The first entry of a row must be the completion's token, followed by the most likely tokens.
    """
    V = len(policy.head.weight)
    found = teacher_of(policy, server, topk).scores(SAMPLES)
    K = min(topk, V)
    for (ids, start), rows in zip(SAMPLES, found, strict=True):
        assert rows.shape == (len(ids) - start, min(K + 1, V), 2)
        every = all_logps(policy, ids)[start - 1 :]
        for token, row, logps in zip(ids[start:], rows, every, strict=True):
            assert row[0].tolist() == [token, pytest.approx(logps[token].item(), abs=1e-6)]
            best = logps.topk(K).indices.tolist()
            wanted = [token, *(i for i in best if i != token)]
            finite = row[row[:, 1] > -torch.inf]
            assert finite[:, 0].tolist() == wanted
            torch.testing.assert_close(finite[:, 1].float(), logps[wanted])


def test_a_clamped_log_probability_means_minus_infinity(policy, server):
    """Check that a log-probability of -9999 is read as -inf.

    vLLM sends -9999 in place of -inf, because JSON has no infinite numbers.
    """

    def cut(answer: dict[str, Any]) -> None:
        for row in filter(None, answer["prompt_logprobs"]):
            row[next(i for i in row if i != next(iter(row)))]["logprob"] = -9999.0

    server.faults[GENERATE] = cut
    rows = teacher_of(policy, server, 4).scores(SAMPLES[:1])[0]
    assert rows[:, 1, 1].tolist() == [-torch.inf] * 3
    assert rows[:, 2:4, 1].isfinite().all()


def test_a_server_that_returns_is_called_again(policy, server):
    made = teacher_of(policy, server, 2, patience=20.0)
    server.faults[GENERATE] = [503, 500, Raw(lambda write: write(b"HTTP/1.1 200 OK\r\n\r\n"))]
    assert len(made.scores(SAMPLES)) == 3 and not server.faults[GENERATE]
    with pytest.raises(EngineError, match="127.0.0.1:9"):
        TeacherServer("http://127.0.0.1:9", 3, 20, VLLMOptions(patience=0.1, timeout=5.0))


def rows_of(change: Any) -> Any:
    """Return a function that applies `change` to the last row of a teacher's response."""

    def changed(answer: dict[str, Any]) -> None:
        answer["prompt_logprobs"][-1] = change(dict(answer["prompt_logprobs"][-1]))

    return changed


def first(row: dict[int, Any], logp: float) -> dict[int, Any]:
    return row | {next(iter(row)): {"logprob": logp}}


IDS, SUM = "every token and the 3 likeliest ids", "sum to 1 at most"


def pop(answer: dict[str, Any]) -> None:
    answer["prompt_logprobs"].pop()


def cut(row: dict[int, Any], count: int) -> dict[int, Any]:
    return dict(list(row.items())[:count])


def each(logp: float) -> Any:
    """Return a function that sets all log-probabilities in a teacher's response to `logp`."""

    def changed(answer: dict[str, Any]) -> None:
        for row in filter(None, answer["prompt_logprobs"]):
            row.update(dict.fromkeys(row, {"logprob": logp}))

    return changed


# No softmax can return these values: the vocabulary has 13 tokens, so the most likely one has a
# log-probability of at least -log(13) = -2.565.
@pytest.mark.parametrize(
    ("topk", "logp", "message"),
    [(0, -9999.0, "above -1000 of a completion's token"),
     (0, -math.inf, "above -1000 of a completion's token"),
     (1, -3.6, "above -3.565 of the most likely of 13 ids"),
     (99, -9999.0, "above -3.565 of the most likely of 13 ids")],
)  # fmt: skip
def test_values_that_no_softmax_returns_are_refused(policy, server, topk, logp, message):
    """Check that log-probabilities that no softmax can return are refused.

    With these values, the loss and the gradient could be 0 without any error.
    """
    assert len(policy.head.weight) == 13
    made = teacher_of(policy, server, topk)
    server.faults[GENERATE] = each(logp)
    with pytest.raises(BadAnswer, match=rf"^teacher {server.url}\S+: expected .*") as caught:
        made.scores(SAMPLES[:1])
    assert message in str(caught.value)
    server.faults[GENERATE] = each(logp)
    # The constructor queries the server, so it must raise the error as well.
    with pytest.raises(BadAnswer, match=f"teacher {server.url}"):
        teacher_of(policy, server, topk)


@pytest.mark.parametrize(("topk", "logp"), [(0, -999.0), (0, 0.0), (3, -3.5), (13, -2.5649)])
def test_unlikely_values_that_a_softmax_can_return_are_accepted(policy, server, topk, logp):
    server.faults[GENERATE] = each(logp)
    (rows,) = teacher_of(policy, server, topk).scores(SAMPLES[:1])
    assert torch.isclose(rows[:, 0, 1], torch.tensor(logp).double()).all()


HOSTILE: dict[str, tuple[Any, str]] = {
    "none": (lambda a: {"choices": []}, "prompt_logprobs: Field required"),
    "missing rows": (pop, "a row for each of 2 tokens, got 1"),
    "shifted by one": (lambda a: a["prompt_logprobs"].reverse(), IDS),
    "an empty row": (rows_of(lambda row: {}), f"{IDS}, got"),
    "more ids": (rows_of(lambda row: cut(row, 3) | dict.fromkeys((91, 92), LOW)), f"{IDS}, got 5"),
    "another token": (rows_of(lambda row: {i + 11: x for i, x in row.items()}), IDS),
    "another vocabulary": (rows_of(lambda row: cut(row, 3) | {1 << 30: LOW}), "the student's"),
    "an id without bound": (rows_of(lambda row: row | {1 << 40: LOW}), "should be less than"),
    "an id that is none": (rows_of(lambda row: row | {"\x1b[2J" * 99: LOW}), "integer"),
    "NaN": (rows_of(lambda row: first(row, float("nan"))), f"{SUM}, got larger ones, or NaN"),
    "a logit": (rows_of(lambda row: first(row, 2.5)), SUM),
    "a sum above 1": (rows_of(lambda row: dict.fromkeys(row, {"logprob": -0.2})), SUM),
    "404": (404, "--enable-scale-out"),
    "500": (500, "told to say 500"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_response_ends_with_one_message(policy, server, name):
    fault, message = HOSTILE[name]
    server.faults[GENERATE] = fault
    start = time.monotonic()
    with pytest.raises((EngineError, ValueError)) as caught:
        teacher_of(policy, server, 3, patience=0.1)
    text = str(caught.value)
    assert message in text and server.url in text, text
    assert len(text) < 600 and text.isprintable()
    assert time.monotonic() - start < 15
