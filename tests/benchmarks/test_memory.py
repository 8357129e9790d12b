"""Tests of benchmarks/kernels/memory.py, which measures memory over the number of tokens."""

from __future__ import annotations

import json

import torch

from benchmarks.kernels import memory

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
