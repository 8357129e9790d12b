"""Train the lecture example with three losses, four advantages and several seeds.

    python -m benchmarks.experiments.lecture [--seeds 5] [-o FOLDER]

The command calls grpo_fast/examples/lecture.py for every combination of loss and advantage. It then
writes the same files as compare.py: `table.md` and `compare.png`.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from benchmarks.experiments.compare import report
from benchmarks.options import new_parser, positive
from grpo_fast.examples import lecture

LOSSES = ("reinforce", "unclipped", "grpo")
ADVANTAGES = ("rewards", "centered", "normalized", "max")
STEPS = 50


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=positive(int), default=5)
    parser.add_argument("-o", "--out", type=Path, default=Path("runs/lecture"))
    options = parser.parse_args()
    rows = {}
    settings = {}
    for loss, advantages in itertools.product(LOSSES, ADVANTAGES):
        name = f"loss_type={loss},advantages={advantages}"
        settings[name] = {"loss_type": loss, "advantages": advantages}
        rows[name] = [
            lecture.train(loss, advantages, steps=STEPS, seed=seed) for seed in range(options.seeds)
        ]
        print(name, flush=True)
    report(rows, settings, options.out)


if __name__ == "__main__":
    main()
