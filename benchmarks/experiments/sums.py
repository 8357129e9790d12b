"""Two-digit sums after four worked examples, as JSONL for the experiment on collapsing entropy.

    python -m benchmarks.experiments.sums runs/sums-data
    python -m benchmarks.experiments.compare capitals model.path=runs/capitals-data/model \
      data.path=runs/sums-data 'rewards=[exact_match]' optim.lr=2e-5,5e-6 steps=15

SmolLM2-135M-Instruct answers some of these sums correctly. With too large a step GRPO makes the
model certain of one answer each, right or wrong, and groups lose the spread that they learn from.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

SHOTS = 4
TEST, TRAIN = 200, 2000


def chat(a: int, b: int) -> list[dict[str, str]]:
    """Return a sum as a question and its answer."""
    return [
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"role": "assistant", "content": str(a + b)},
    ]


def write_sums(folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl`. No sum is in both files, nor among the examples."""
    numbers = range(10, 100)
    pairs = [(a, b) for a in numbers for b in numbers]
    random.Random(0).shuffle(pairs)
    examples = [message for pair in pairs[:SHOTS] for message in chat(*pair)]
    rest = pairs[SHOTS:]
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("test", rest[:TEST]), ("train", rest[TEST : TEST + TRAIN])):
        lines = []
        for pair in chosen:
            question, answer = chat(*pair)
            lines.append(json.dumps({"prompt": [*examples, question], "answer": answer["content"]}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    write_sums(parser.parse_args().folder)


if __name__ == "__main__":
    main()
