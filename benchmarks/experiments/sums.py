"""Data set of two-digit sums for the experiment on entropy collapse, written as JSONL.

    python -m benchmarks.experiments.sums runs/sums-data
    python -m benchmarks.experiments.compare capitals model.path=runs/capitals-data/model \
      data.path=runs/sums-data 'rewards=[exact_match]' optim.lr=2e-5,5e-6 steps=15

Each prompt has four worked examples and one question. SmolLM2-135M-Instruct answers some of the
questions correctly. If the learning rate is too large, GRPO makes the model certain of one answer
for each question, right or wrong. All completions of a group then get the same reward, so their
advantages are 0 and the model learns nothing more.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from benchmarks.options import new_parser

SHOTS = 4
TEST, TRAIN = 200, 2000


def chat(a: int, b: int) -> list[dict[str, str]]:
    """Return two chat messages: the question "What is a + b?" and its answer."""
    return [
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"role": "assistant", "content": str(a + b)},
    ]


def write_sums(folder: Path, shots: int = SHOTS) -> None:
    """Write `train.jsonl` and `test.jsonl`. They share no sum with each other or the examples.

    Args:
        folder: where the files go.
        shots: worked examples at the beginning of each prompt.
    """
    numbers = range(10, 100)
    pairs = [(a, b) for a in numbers for b in numbers]
    random.Random(0).shuffle(pairs)
    examples = [message for pair in pairs[:shots] for message in chat(*pair)]
    rest = pairs[shots:]
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("test", rest[:TEST]), ("train", rest[TEST : TEST + TRAIN])):
        lines = []
        for pair in chosen:
            question, answer = chat(*pair)
            lines.append(json.dumps({"prompt": [*examples, question], "answer": answer["content"]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path)
    write_sums(parser.parse_args().folder)


if __name__ == "__main__":
    main()
