"""Tests of the data and the rewards of `examples.capitals`."""

from __future__ import annotations

import json

from grpo_fast.examples import capitals


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
