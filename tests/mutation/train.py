"""Bugs planted in the training loop and around a model: what a run repeats, counts or forgets."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

COLLECT, OPTIMIZER = (f"grpo_fast/train/{x}.py" for x in ("collect", "optimizer"))
CALLING, CAUSAL_LM = "grpo_fast/rewards/calling.py", "grpo_fast/integrations/causal_lm.py"

MUTANTS = [
    Mutant("train-rollout-seed", COLLECT,
           "rewards, config, (config.seed, step), clock)", "rewards, config, (config.seed, 0), clock)",
           "every step draws the first one's random numbers", "train"),
    Mutant("train-skips-forgotten", OPTIMIZER,
           "self.adam.step()\n            self._skipped_in_a_row = 0\n", "self.adam.step()\n",
           "three bad gradients in a whole run end it", "train"),
    Mutant("reward-count-after-call", CALLING,
           "_values(result, count)", '_values(result, len(arguments["completions"]))',
           "a function that shortens its list gives everybody the same reward", "rewards"),
    Mutant("causal-lm-pre-hooks", CAUSAL_LM,
           "if layer._forward_pre_hooks or layer._forward_hooks", "if layer._forward_hooks",
           "a hook that changes the head's input is not seen", "causal_lm"),
]  # fmt: skip
