"""Bugs planted in comparisons of runs and in the variance of the gradient."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

COMPARE, PLOT, VARIANCE = (
    f"grpo_fast/{x}.py"
    for x in (
        "train/experiments/compare",
        "train/experiments/compare_plot",
        "train/update/gradients",
    )
)

MUTANTS = [
    Mutant("compare-one-seed", COMPARE,
           '"seed": first.seed + index', '"seed": first.seed',
           "all seeds draw the same numbers: the error is 0", "compare"),
    Mutant("compare-unfinished-kept", COMPARE,
           'return (folder / "summary.json").is_file()', "return True",
           "a run that was cut off counts as finished", "compare"),
    Mutant("compare-removes-without-the-lock", COMPARE,
           "            with locked(config.output_dir):", "            if True:",
           "the folder of a run that another process is making is removed", "compare"),
    Mutant("compare-strangers", COMPARE,
           "    if differing:\n", "    if not differing:\n",
           "a folder of other settings is replaced", "compare"),
    Mutant("compare-last-tenth", COMPARE,
           "len(points) // 10", "len(points) // 5",
           "a fifth of the run is averaged", "compare"),
    Mutant("compare-failed-counted", COMPARE,
           "if config.output_dir not in self.failed]", "if True]",
           "a failed run is read like the others", "compare"),
    Mutant("compare-seeds-of-the-failed", COMPARE,
           '"seeds": [config.seed for config in comparison.done(arm)],',
           '"seeds": [config.seed for config in arm.runs],',
           "values stand beside the seeds of other runs", "compare"),
    Mutant("compare-axis-in-common", COMPARE,
           "if len(values) > 1}", "if len(values) > 2}",
           "a key with two values is no axis", "compare"),
    Mutant("compare-brackets", "grpo_fast/train/config/words.py",
           "slices if len(slices) > 1 else [text]", 'text.split(",")',
           "a list is torn apart at its commas", "words"),
    Mutant("compare-band", PLOT,
           "high.append(mean + error)", "high.append(mean)",
           "the band is half of one", "compare"),
    Mutant("variance-of-one", VARIANCE,
           "/ (count * (count - 1))", "/ (count - 1)",
           "the variance of one group instead of the mean's", "variance"),
    Mutant("variance-biased", VARIANCE,
           "squares - count * mean_square", "squares - mean_square",
           "the mean is hardly taken off", "variance"),
    Mutant("variance-left-behind", VARIANCE,
           "                p.grad = None\n", "                pass\n",
           "the diagnosis is added to the update", "variance"),
    Mutant("variance-bonus", VARIANCE,
           "entropy_coef=0.0)", "entropy_coef=config.entropy_coef)",
           "the entropy bonus is taken for the policy term", "variance"),
]  # fmt: skip
