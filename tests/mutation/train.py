"""Bugs planted in the training loop: what a run repeats, counts or forgets."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

LOOP, OPTIMIZER = (f"grpo_fast/train/{x}.py" for x in ("loop", "optimizer"))

MUTANTS = [
    Mutant("train-rollout-seed", LOOP,
           "seed=(config.seed, step)", "seed=(config.seed, 0)",
           "every step draws the first one's random numbers", "train"),
    Mutant("train-skips-forgotten", OPTIMIZER,
           "self.adam.step()\n            self._skipped_in_a_row = 0\n", "self.adam.step()\n",
           "three bad gradients in a whole run end it", "train"),
]  # fmt: skip
