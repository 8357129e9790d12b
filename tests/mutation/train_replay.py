"""Bugs planted where the sampler's kept tokens travel into the losses."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

FIXED, ACCUMULATE, BATCH, REFERENCE, EXACT, STORED, METRICS = (
    f"grpo_fast/train/{x}.py"
    for x in ("fixed", "accumulate", "batch", "reference", "exact_kl", "stored", "metrics")
)
DATA, DOOR = "grpo_fast/train/config/data.py", "grpo_fast/loss/exact_kl.py"

MUTANTS = [
    Mutant("replay-loss-over-all", ACCUMULATE,
           "support=batch.support,", "support=None,",
           "the loss is over the whole vocabulary", "replay"),
    Mutant("replay-old-over-all", FIXED,
           "policy.logps(micro.packed, temperature, hidden, micro.support)",
           "policy.logps(micro.packed, temperature, hidden)",
           "old logps are over the whole vocabulary", "replay"),
    Mutant("replay-reference-over-all", REFERENCE,
           "temperature, support=support)", "temperature)",
           "the reference's logps are over the whole vocabulary", "replay"),
    Mutant("replay-exact-kl-over-all", EXACT,
           "support=None if batch.support is None else selected(batch.support, mask),",
           "support=None,",
           "the exact KL is over the whole vocabulary", "replay"),
    Mutant("replay-exact-kl-empty-set", DOOR,
           "kept = (counts == 0)[:, None].repeat(1, vocab_size)",
           "kept = (counts < 0)[:, None].repeat(1, vocab_size)",
           "a token that was not truncated has no distribution", "exact_kl"),
    Mutant("replay-order", BATCH,
           "    for i in chosen:\n        kept = rollout.kept[i]",
           "    for i in sorted(chosen):\n        kept = rollout.kept[i]",
           "sets stand beside another completion's tokens", "replay"),
    Mutant("replay-mixed-batch", BATCH,
           "if all(kept is None for kept in rollout.kept):",
           "if any(kept is None for kept in rollout.kept):",
           "one completion that was not truncated, and none has its sets", "replay"),
    Mutant("replay-unbounded", DATA,
           'if self.wants_kept and "top_k" not in self.model_fields_set:', "if False:",
           "top_p alone keeps nearly the whole vocabulary", "replay"),
    Mutant("replay-off-bounds", DATA,
           'return self.replay_support == "auto" and self.truncates', "return self.truncates",
           "off keeps the sets", "replay"),
    Mutant("replay-forgotten-in-a-checkpoint", STORED,
           'if f"kept/{i}/ids" in tensors', 'if f"kept/{i}" in tensors',
           "a step that is resumed goes on over the whole vocabulary", "checkpoint_kept"),
    Mutant("replay-mass", METRICS,
           '"sampling/support_size/max": float(sizes.max())',
           '"sampling/support_size/max": float(sizes.mean())',
           "the largest set is reported as an average one", "replay"),
]  # fmt: skip
