"""Tests of what benchmarks measure: GPU work, memory, and the problem of a training step.

A call must stay within its budget of GPU work, as counted by benchmarks/gpu/trace.py.
benchmarks/kernels/memory.py measures memory over the number of tokens, and
benchmarks/trainers/step.py compares the providers of a step.
"""

import json

import pytest
import torch

from benchmarks.kernels import memory
from benchmarks.trainers.step import make_problem
from grpo_fast import grpo_loss
from tests.kernels.test_triton_interpreter import HAS_TRITON, run_python
from tests.loss_cases import relative_l2

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
TRAINED = ("full, H = 4096", "full, H = 2048", "full, H = 896", "1024 rows, H = 896")
# For each case, the exact number of chunks and of products of N·V·H, and the largest number of
# kernels per chunk, of other kernels, and of gigabytes that the kernels read and write. A full call
# has 8192 rows at V = 151936. A call with `support=` computes no logits of the full vocabulary. It
# may read the weight and `hidden` once, and write the gradient of the weight once.
LIMITS: dict[str, dict[str, float]] = {
    TRAINED[0]: dict(chunks=1, products=6, per_chunk=10, outside=11, gigabytes=0.75),
    TRAINED[1]: dict(chunks=1, products=6, per_chunk=10, outside=11, gigabytes=0.38),
    TRAINED[2]: dict(chunks=1, products=6, per_chunk=10, outside=11, gigabytes=0.18),
    TRAINED[3]: dict(products=6, per_chunk=10, outside=11),
    "with KL": dict(per_chunk=10, outside=11),
    "frozen head (LoRA)": dict(products=4, per_chunk=10, outside=11),
    "head alone": dict(products=4, per_chunk=10, outside=11),
    "with a mask": dict(outside=12),
    "sequence level": dict(products=6, outside=52),
    "three heads of one weight": dict(products=6),
    "no gradient": dict(products=2),
    "support, 50 ids": dict(chunks=0, products=0, outside=52, gigabytes=8.5),
    "support, frozen head": dict(chunks=0, products=0, outside=44, gigabytes=3.9),
}
# The number of times that a call waits while the GPU has no other work. The number of tokens that a
# mask keeps, of targets in a large call with gradients, of rows without gradient in the backward
# pass of such a call, and of ids in a support determine shapes.
WAITS = {
    "with a mask": 1,
    "with a mask, 1024 rows": 1,
    "logits_grpo_loss, mask": 1,
    "linear_logps, gradient": 2,
    "support, 50 ids": 1,
    "support, frozen head": 1,
}


@pytest.fixture(scope="module")
def budgets():
    return json.loads(run_python("-m", "benchmarks.gpu.trace", "--json", interpret=False))


@needs_triton
@pytest.mark.parametrize("name", LIMITS)
def test_a_call_stays_in_its_limits(budgets, name):
    for what, limit in LIMITS[name].items():
        found = budgets[name][what]
        if what in ("chunks", "products"):
            assert found == pytest.approx(limit, rel=1e-3), what
        else:
            assert found <= limit, what


@needs_triton
def test_waits(budgets):
    """Check every case, including zero advantages and several chunks.

    A call may also wait for the number of active rows while the GPU has other work. If the GEMMs of
    the gradient are small, it does not wait. In the case "several chunks", the wait ends while the
    GPU computes the first product.
    """
    assert {name: x["syncs"] for name, x in budgets.items() if x["syncs"]} == WAITS
    assert {name for name, x in budgets.items() if x["reads"]} == {
        *TRAINED[:3], "with a mask", "frozen head (LoRA)", "head alone", "several chunks",
        "three heads of one weight",
    }  # fmt: skip


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
