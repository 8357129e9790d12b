"""Bugs planted where ranks share a head: what they tell each other, and what they make of it."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

VOCABULARY, AGREEMENT = "grpo_fast/kernels/head/vocabulary.py", "grpo_fast/loss/ranks.py"
LOOP, REFERENCE = "grpo_fast/kernels/head/loop.py", "grpo_fast/kernels/reference.py"
GRADIENT, ROWS = "csrc/rows/gradient.h", "csrc/api/rows.cpp"

MUTANTS = [
    Mutant("shards-of-one-size", VOCABULARY,
           "target_ids - sum(self.sizes[: self.rank])", "target_ids - self.rank * self.sizes[0]",
           "every shard is taken to be as large as the first", "shards"),
    Mutant("shards-owner", VOCABULARY,
           "target_ids, right=True)", "target_ids, right=False)",
           "the first target of a shard is asked of the rank below", "shards"),
    Mutant("shards-others-forgotten", VOCABULARY,
           "logp = logp - torch.logaddexp(torch.zeros_like(others), others)", "logp = logp + 0 * others",
           "a logp is that of one shard", "shards"),
    Mutant("shards-entropy-between", VOCABULARY,
           "share * (entropies[0] + (total - lse))", "share * entropies[0]",
           "the entropy of which shard it is is left out", "shards"),
    Mutant("shards-entropy-of-nothing", VOCABULARY,
           "torch.where(share == 0, 0.0, share * (entropies[0] + (total - lse)))",
           "share * (entropies[0] + (total - lse))",
           "0 times infinity where a shard has no probability", "shards"),
    Mutant("shards-hidden-not-summed", VOCABULARY,
           "        distributed.all_reduce(x, group=self.group)\n", "",
           "dH holds the columns of one rank", "shards"),
    Mutant("shards-rounded-early", VOCABULARY,
           'if route.backend == "torch":', "if False:",
           "the statistics of a shard are rounded before they are joined", "shards"),
    Mutant("shards-in-one-pass", VOCABULARY,
           "self.shard, self.in_one_pass = shard, False", "self.shard = shard",
           "the loss of a shard is formed before its ranks have joined", "shards"),
    Mutant("shards-minus-infinity", VOCABULARY,
           "lse.masked_fill(z.amax(-1) == -torch.inf, -torch.inf), logps, entropy", "lse, logps, entropy",
           "a shard whose columns are all -inf makes the row NaN", "shards"),
    Mutant("shards-chunks-of-their-own", LOOP,
           "columns = self.shard.widest if self.shard else self.weight.shape[0]",
           "columns = self.weight.shape[0]",
           "ranks with smaller shards cut larger chunks and wait for ever", "shards"),
    Mutant("shards-target-elsewhere", REFERENCE,
           "torch.where(is_here, at_target, dz.gather(-1, columns))", "at_target",
           "a shard without the target gives another column the target's gradient", "shards"),
    Mutant("shards-other-targets", AGREEMENT,
           "with checksum {checksum(target_ids)}", "of the active rows",
           "ranks with other targets, as under FSDP, are taken to share a head", "shards"),
    Mutant("csrc-shards-lse", GRADIENT,
           "if (has_target && std::fabs(logp) < std::fabs(lse))", "if (std::fabs(logp) < std::fabs(lse))",
           "the lse of a row is restored from a target that it does not have", "csrc_shards"),
    Mutant("csrc-no-target-counts", ROWS,
           "if (!counts) return write_zeros(chunk.start(d, row), chunk.columns);", "",
           "a row without a target gets the gradient of its entropy", "csrc"),
]  # fmt: skip
