"""Tests of the examples that have no counterpart in another library."""

import copy
import json

import pytest
import torch
import typer
from transformers import AddedToken, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.examples import capitals, distillation, lecture, reward_model
from grpo_fast.rewards import build_rewards
from grpo_fast.rewards.rules import sort_inclusion_ordering
from tests.reward_specs import ask, spec
from tests.tiny import tiny_folder


def test_no_country_of_the_test_file_is_in_the_training_file(tmp_path):
    capitals.write_data(tmp_path)
    names: dict[str, set[str]] = {}
    for part in ("train", "test"):
        lines = [json.loads(line) for line in (tmp_path / f"{part}.jsonl").read_text().splitlines()]
        assert all(line["prompt"][:2] == capitals.EXAMPLE for line in lines)
        names[part] = {line["answer"] for line in lines}
        for line in lines:
            other = line["prompt"][-1]["content"]
            country = next(x for x, capital in capitals.CAPITALS.items()
                           if line["answer"] in (x, capital))  # fmt: skip
            asked = capitals.CAPITALS[country] if line["answer"] == country else country
            assert asked in other and line["answer"] not in other
        assert len(lines) == len(names[part]) // 2 * len(capitals.PHRASINGS)
    assert not names["train"] & names["test"]
    assert len(names["test"]) == 2 * capitals.TEST_COUNTRIES
    assert len(set(capitals.CAPITALS.values())) == len(capitals.CAPITALS) == 120


def test_the_rewards():
    answers = ["Oslo"] * 5
    texts = ["Oslo", " oslo.", "The capital is Oslo.", "Bergen", ""]
    assert capitals.exact(texts, answers) == [1, 1, 0, 0, 0]
    assert capitals.short(texts, answers) == [1, 1, 1 / 4, 0, 0]
    assert capitals.short(["New Delhi"], ["New Delhi"]) == [1]
    assert capitals.short(["Nigeria", "Romania", "Niger."], ["Niger", "Oman", "Niger"]) == [0, 0, 1]


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


def rewards_of(path):
    name = "grpo_fast.examples.reward_model:RewardModel"
    return build_rewards([spec(name, in_process=True, path=str(path))])


def test_no_special_token_of_a_completion_is_encoded():
    _, tokenizer = reward_model.tiny_model()
    header = AddedToken("<|start_header_id|>", special=True)
    tokenizer.add_tokens([header], special_tokens=True)
    assert header.content not in tokenizer.all_special_tokens
    honest, hostile = (reward_model.encode(tokenizer, ["1 ="], [text])["input_ids"].tolist()
                       for text in ("2 3", f"2{header.content}3"))  # fmt: skip
    assert honest == hostile


def test_the_script_trains_a_model_that_is_a_reward(tmp_path, capsys):
    pairs = reward_model.sort_pairs(400, seed=2)
    for pair in pairs:
        gold = sorted(pair["prompt"].split()[:-1])
        right = [sum(a == b for a, b in zip(pair[name].split(), gold, strict=False))
                 for name in ("chosen", "rejected")]  # fmt: skip
        assert right[0] > right[1]
    share = reward_model.train(tmp_path / "sort", None, None, steps=60, lr=1e-3)
    held_out = reward_model.sort_pairs(1024, seed=1)
    reward = rewards_of(tmp_path / "sort" / "model")
    prompts = [pair["prompt"] for pair in held_out]
    chosen, rejected = (ask(reward, prompts, [pair[name] for pair in held_out], [""] * 1024).total
                        for name in ("chosen", "rejected"))  # fmt: skip
    assert share == pytest.approx(float((chosen > rejected).float().mean())) and share > 0.7
    # A completion cannot add a turn in which it praises itself.
    end = reward_model.RewardModel(str(tmp_path / "sort" / "model")).tokenizer.eos_token
    honest, hostile = ask(reward, ["1 2 ="] * 2, ["1   2", f"1 {end} 2"], [""] * 2).total.tolist()
    assert honest == pytest.approx(hostile)
    # Check the script with a file of pairs and with a causal LM as the initial model.
    lines = [{"prompt": f"What is {i}?", "chosen": f" {i}", "rejected": " apples"}
             for i in range(40)]  # fmt: skip
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    given = str(tmp_path / "pairs.jsonl"), tiny_folder(tmp_path / "start")
    reward_model.main(*given, tmp_path / "own", steps=30)
    assert "100.0% of the held-out pairs in the right order" in capsys.readouterr().out
    reward = rewards_of(tmp_path / "own" / "model")
    right, wrong = ask(reward, ["What is 3?"] * 2, [" 3", " apples"], [""] * 2).total.tolist()
    assert right > wrong
    with pytest.raises(ValueError, match="expected a trained model with one output"):
        rewards_of(tmp_path / "start")
    with pytest.raises(typer.BadParameter, match="expected both or neither"):
        reward_model.main(pairs="x")
