"""Tests of benchmarks/kernels/memory.py, and of the problem of benchmarks/trainers/step.py.

The first measures memory over the number of tokens, the second compares the providers of a step.
"""

from __future__ import annotations

import json

import torch

from benchmarks.kernels import memory
from benchmarks.trainers.step import make_problem
from grpo_fast import grpo_loss
from tests.loss_cases import relative_l2

NAN = torch.tensor(float("nan"))


def test_a_repeated_problem_has_the_exact_results_of_the_small_one(monkeypatch):
    monkeypatch.setattr(memory, "ROWS", 16)
    monkeypatch.setattr(memory, "HIDDEN", 8)
    monkeypatch.setattr(memory, "VOCABULARY", 40)
    monkeypatch.setattr(memory.resource, "setrlimit", lambda *limits: None)
    monkeypatch.setattr(memory.torch, "set_num_threads", lambda count: None)
    ours = next(one for one in memory.candidates() if one.name == memory.OURS)
    assert memory.measured(ours, 64)["status"] == "ok"
    step = ours.prepare
    broken = ours._replace(prepare=lambda problem: lambda: {**step(problem)(), "loss": NAN})
    assert memory.measured(broken, 64)["status"] == "wrong"


def test_a_provider_is_not_tried_again_after_it_ran_out_of_memory(tmp_path, monkeypatch, capsys):
    path, seen = tmp_path / "memory.json", []

    def child(name, tokens):
        seen.append((name, tokens))
        if name == "plain torch" and tokens == 1024:
            return {"status": memory.OUT_OF_MEMORY, "reason": "can't allocate memory"}
        return {"status": "ok", "workspace_mib": tokens / 8}

    monkeypatch.setattr(memory, "run_child", child)
    monkeypatch.setattr(memory, "TOKENS", [512, 1024, 2048])
    assert memory.main(["--out", str(path)]) == 0
    found = json.loads(path.read_text())["providers"]
    assert ("plain torch", 2048) not in seen and (memory.OURS, 2048) in seen
    assert found["plain torch"]["tokens"]["1024"]["status"] == memory.OUT_OF_MEMORY
    assert found["Liger SM90"]["missing"] and "tokens" not in found["Liger SM90"]
    assert "1,024 tokens  out of memory" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == [path]


def test_rounding_errors_of_logps_move_no_ratio_across_a_clip_bound():
    """Check that errors of about 0.03 in the logps, as in bf16, change the gradient by only 4%.

    A ratio that crosses a clip bound changes the gradient of its token from 0 to its full value.
    """
    problem = make_problem([[2, 3]], group_size=64, longest=64, vocab=9)
    noise = torch.cat(problem.noise)
    errors = 0.03 * torch.randn(len(noise), generator=torch.Generator().manual_seed(0))
    gradients = []
    for moved in (0.0, errors):
        logps = (moved - 3.0 + torch.zeros_like(noise)).requires_grad_()
        grpo_loss(
            logps, problem.samples.advantages, problem.loss,
            cu_seqlens=torch.tensor([0, *problem.samples.lengths]).cumsum(0), old_logps=noise - 3.0,
        ).loss.backward()  # fmt: skip
        gradients.append(logps.grad)
    exact, found = gradients
    assert relative_l2(found, exact) < 0.04
    clipped = exact == 0
    assert torch.equal(found == 0, clipped)
    for side in (noise < 0, noise > 0):
        assert clipped[side].any() and not clipped[side].all()
