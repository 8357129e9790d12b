"""Tests that `examples.distillation` minimises the exact divergence of the student's samples."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.examples import distillation


def saved_teacher(folder):
    tokenizer = build_symbol_tokenizer([*map(str, range(10)), "="])
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, initializer_range=0.3, max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_student_approaches_its_teacher(tmp_path, monkeypatch, capsys):
    folder = saved_teacher(tmp_path / "teacher")
    monkeypatch.setattr(distillation, "PROMPTS", 4)
    seen = []

    def spied(model, *args, **options):
        samples = sample(model, *args, **options)
        seen.append((copy.deepcopy(model), samples))
        return samples

    sample = distillation.generate
    monkeypatch.setattr(distillation, "generate", spied)
    history = distillation.distill(folder, steps=30)
    # Compare the first divergence with the logits that both models compute without packing.
    student, samples = seen[0]
    student.set_attn_implementation("sdpa")
    teacher = AutoModelForCausalLM.from_pretrained(folder)
    divergences = []
    for prompt, completion in zip(samples.prompt_ids, samples.completion_ids, strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            logits = [m(ids).logits[0, len(prompt) - 1 : -1].double() for m in (student, teacher)]
        lp, lq = (z.log_softmax(-1) for z in logits)
        divergences.append((lp.exp() * (lp - lq)).sum(-1))
    assert history[0]["divergence"] == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-4)
    assert history[-1]["divergence"] < 0.7 * history[0]["divergence"]
    distillation.main(folder, steps=2)
    assert "step   2: KL" in capsys.readouterr().out
