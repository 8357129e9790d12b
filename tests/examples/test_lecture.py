"""Tests that `examples.lecture` has the model and rewards of the lecture, and learns to sort."""

from __future__ import annotations

import pytest
import torch

from grpo_fast.examples import lecture
from grpo_fast.rewards.rules import sort_inclusion_ordering


def test_the_script_learns_the_lectures_task(capsys):
    model = lecture.LectureModel()
    prompts, responses, logps = lecture.sample(model, 40, torch.Generator().manual_seed(3))
    # Check the model's log-probs against the formula of the lecture, computed in fp64.
    E, encode, decode = (x.detach().double() for x in model.parameters())
    vector = torch.einsum("npd,pdk->nk", E[prompts], encode)
    expected = torch.einsum("npd,vd->npv", torch.einsum("nk,pkd->npd", vector, decode), E)
    taken = expected.log_softmax(-1).gather(-1, responses[..., None])[..., 0]
    torch.testing.assert_close(logps.double(), taken, rtol=0, atol=1e-5)
    words = [" ".join(map(str, row)) for row in responses.tolist()]
    answers = [" ".join(map(str, sorted(row))) for row in prompts.tolist()]
    found = lecture.rewards_of(prompts, responses).tolist()
    assert found == pytest.approx(sort_inclusion_ordering(completions=words, answers=answers))
    # The README states that the accuracy rises from 1.0% to 100% in 40 steps.
    rows = lecture.train(steps=40, seed=1)
    assert rows[0]["eval_accuracy_strict"] == pytest.approx(0.0104, abs=1e-4)
    assert rows[-1]["eval_accuracy_strict"] == 1.0
    # After steps 10 and 20, the weights are copied to the reference, so the KL must fall in the
    # next step.
    assert rows[11]["kl"] < rows[10]["kl"] and rows[21]["kl"] < rows[20]["kl"]
    assert min(row["kl"] for row in rows[1:]) >= 0
    lecture.main(steps=10)
    assert "step  10:" in capsys.readouterr().out
