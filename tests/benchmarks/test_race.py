"""Tests of the race: three trainers with a tiny random model, the evaluator, and the table."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.race import __main__ as driver
from benchmarks.race.jobs import SHOTS, TASKS, Evaluator, Task
from grpo_fast.data import Example
from tests.tiny import tiny_folder

pytest.importorskip("trl", reason="the race compares with TRL: pip install 'grpo_fast[trl]'")


def write_sums(folder):
    """Write prompts with one worked example and the question for a sum."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for n in range(20):
        texts = ("user", "What is 1 + 1?"), ("assistant", "2"), ("user", f"What is {n} + 9?")
        prompt = [{"role": role, "content": text} for role, text in texts]
        rows.append(json.dumps({"prompt": prompt, "answer": str(n + 9)}) + "\n")
    (folder / "train.jsonl").write_text("".join(rows[:12]))
    (folder / "test.jsonl").write_text("".join(rows[12:]))


SUMS = Task(write_sums, 2, 2, 3, 1e-3, 2, 1, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"), "llama")


def test_three_trainers_race_and_a_finished_run_is_not_repeated(model, tmp_path, capsys):
    words = ["--model", model, "--threads", "1", "-o", str(tmp_path)]
    driver.main([*words, "--json", str(tmp_path / "report.json")], {"sums": SUMS})
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert {"hardware", "versions", "commit"} <= {*report}
    assert [case["trainer"] for case in report["cases"]] == ["grpo_fast", "FastGRPOTrainer", "TRL"]
    for case in report["cases"]:
        assert case["finished"] and [point["step"] for point in case["points"]] == [0, 1, 2]
        _, first, second = case["points"]
        assert 0 < first["cpu"] < second["cpu"] and 0 < first["wall"] < second["wall"]
        assert second["peak"] > 1 << 20 and 0 <= second["accuracy"] <= 1
        assert f"sums {case['trainer']} seed 0: step 2" in said
    assert report["cases"][2]["rows"] in (1, 2, 4)
    assert (tmp_path / "race.png").stat().st_size > 1000
    # One run is interrupted after its first evaluation.
    path = tmp_path / "sums-grpo_fast-0.json"
    cut = json.loads(path.read_text())
    path.write_text(json.dumps({**cut, "finished": False, "points": cut["points"][:2]}))
    driver.main(words, {"sums": SUMS})
    said = capsys.readouterr().out
    assert "sums grpo_fast seed 0: step 2" in said and "sums TRL seed 0" not in said


def test_a_run_that_fails_ends_the_race_and_keeps_what_was_measured(model, tmp_path):
    task = SUMS._replace(words=("rewards=[{name: 'tests.benchmarks.test_race:fails_later', "
                                "in_process: true}]",))  # fmt: skip
    words = ["--model", model, "--threads", "1", "-o", str(tmp_path), "--trainers", "grpo_fast"]
    with pytest.raises(RuntimeError, match="grpo_fast ended with code 1"):
        driver.main(words, {"sums": task})
    record = json.loads((tmp_path / "sums-grpo_fast-0.json").read_text())
    assert not record["finished"] and [point["step"] for point in record["points"]] == [0, 1]


calls = []


def fails_later(completions):
    """Return rewards in the first call, and too few of them in the second."""
    calls.append(1)
    return [float(len(x)) for x in completions][len(calls) - 1 :]


def test_the_evaluator_answers_as_generate_does_for_each_prompt(model, tmp_path):
    evaluator = Evaluator(model)
    texts = ["What is 12 + 30? ", "What is 12 + 3? The", "What is 7? ", "What is 12 + 41? "]
    examples = [Example(text, answer="1", solution=None) for text in texts]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = []
    for text in texts:
        ids = torch.tensor([evaluator.tokenizer(text)["input_ids"]])
        done = plain.generate(
            ids, do_sample=False, max_new_tokens=5, pad_token_id=0,
            eos_token_id=evaluator.tokenizer.eos_token_id,
        )  # fmt: skip
        said = evaluator.tokenizer.decode(done[0, ids.shape[1] :], skip_special_tokens=True)
        expected.append(said)
    assert evaluator.answers(examples, 5) == expected and len(set(expected)) > 1
    right = [example._replace(answer=x) for example, x in zip(examples, expected, strict=True)]
    right[0] = right[0]._replace(answer="never")
    assert evaluator.accuracy(right, 5) == 0.75


def test_worked_examples_are_training_questions(tmp_path):
    TASKS["examples"].write(tmp_path)
    files = [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]
    train, test = ([json.loads(line) for line in file.open()] for file in files)
    assert (len(train), len(test)) == (300 - SHOTS, 180)
    [worked] = {json.dumps(row["prompt"][2:-1]) for row in [*train, *test]}  # the same in all rows
    asked = {row["prompt"][-1]["content"] for row in [*train, *test]}
    assert len(json.loads(worked)) == 2 * SHOTS and len(asked) == 480 - SHOTS
    assert not any(row["content"] in asked for row in json.loads(worked))
    assert not any(row["answer"] in worked for row in test)


def runs_of(*curves):
    """Return runs of one trainer, whose evaluations are pairs of CPU seconds and accuracy."""
    settings = {"questions": 100}
    return [
        {"task": "t", "settings": settings, "points": [
            {"step": n, "cpu": cpu, "wall": 2 * cpu, "accuracy": x, "peak": 1 << 30}
            for n, (cpu, x) in enumerate(curve)
        ]} for curve in curves
    ]  # fmt: skip


def test_the_table_has_times_to_an_accuracy_and_the_gap_of_the_curves():
    ours = runs_of([(0, 0.1), (10, 0.4), (20, 0.6)], [(0, 0.1), (20, 0.2), (30, 0.5)])
    theirs = runs_of([(0, 0.1), (50, 0.4), (90, 0.45)], [(0, 0.1), (60, 0.4), (80, 0.6)])
    assert driver.mean_time(ours, 0.3, "cpu") == "20"
    assert driver.mean_time(theirs, 0.3, "wall") == "110"
    assert driver.mean_time(ours, 0.55, "cpu") == "20 (1 of 2)"
    assert driver.mean_time(ours, 0.7, "cpu") == "–"
    means, low, high = driver.curve(runs_of([(0, 1.0), (9, 4.0)], [(0, 3.0)]), "accuracy")
    assert means == [2.0, 4.0] and low == [1.0, 4.0] and high == [3.0, 4.0]
    said = driver.table({"ours": ours, "theirs": theirs})
    assert "55 ± 5%" in said and "to 45%" in said
    # At step 1 the means are 0.3 and 0.4: 0.1 over sqrt(2 * 0.35 * 0.65 / 200).
    assert driver.gap({"ours": ours, "theirs": theirs}) == pytest.approx(2.096, abs=1e-2)
