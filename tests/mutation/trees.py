"""Bugs planted in trees of samples: layouts, calls and merges, rows and plans."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

LAYOUT, TREE = "grpo_fast/attention/layout.py", "grpo_fast/attention/kernels/tree.py"
KERNEL, FLEX = "grpo_fast/attention/kernels/kernel.py", "grpo_fast/attention/kernels/flex.py"
TRIE, PACKING = "grpo_fast/attention/trie.py", "grpo_fast/attention/packing.py"

MUTANTS = [
    Mutant("trees-lse-of-a-part", TREE,
           "    lse.copy_(torch.logaddexp(lse, other_lse))\n", "",
           "the backward pass has the log-sum-exps of the first call", "trees"),
    Mutant("trees-rounded-at-every-merge", TREE,
           "return x if len(merges) < 2 else", "return x if True else",
           "16 bits are rounded once for each level", "trees"),
    Mutant("trees-keys-unseen", KERNEL,
           "        dk.zero_(), dv.zero_()\n", "        pass\n",
           "keys without queries have whatever stood in memory as gradients", "tree_kernels"),
    Mutant("trees-window-one-short", LAYOUT,
           "len(path) - window + 1) :", "len(path) - window + 2) :",
           "the last key of a window is not copied", "tree_kernels"),
    Mutant("trees-grandparents-unseen", LAYOUT,
           "seen[segment] |= seen[parent]", "seen[segment, parent] = True",
           "the reference and flex see parents, but no grandparents", "tree_kernels"),
    Mutant("trees-flex-blocks-of-parents", FLEX,
           "                ancestor = layout.parents[ancestor]\n",
           "                ancestor = -1\n",
           "flex lists no blocks of grandparents", "tree_kernels"),
    Mutant("trees-copies-summed-in-a-heap", LAYOUT,
           "ordered = grad[self.order]", "ordered = grad",
           "gradients of copied keys go to other rows", "tree_kernels"),
    Mutant("trees-every-node-a-level", TRIE,
           "saved < merge_cost * self.below[node]", "saved < 0",
           "three tokens of a template cost every row a call", "trees"),
    Mutant("trees-chains-are-levels", TRIE,
           "(len(below) == 1 or saved", "(saved",
           "a sample that ends inside another costs it a call", "trees"),
    Mutant("trees-path-not-counted", TRIE,
           "room = budget - self.ends[node]", "room = budget",
           "rows exceed the budget by the path of a cut subtree", "trees"),
    Mutant("trees-sample-of-a-copied-node", TRIE,
           "home.get((self.children[node] or [node])[0], -1)", "-1",
           "a sample that ends in a copied node has no rows", "trees"),
    Mutant("trees-apart-is-together", TRIE,
           "if kinds[a] == kinds[b] else 0", "if True else 0",
           "samples with other images share rows", "trees"),
    Mutant("trees-row-at-a-border", PACKING,
           "bounds, right=True)", "bounds, right=False)",
           "the first row of a segment is looked up in its parent", "trees"),
    Mutant("trees-predicted-by-itself", PACKING,
           "[trained - 1 for", "[trained for",
           "a token is predicted from the row that has it", "trees"),
    Mutant("trees-slopes-of-others", PACKING,
           "ordered = grad[ctx.terms.argsort(stable=True)]", "ordered = grad",
           "predictions that samples share have others' slopes", "trees"),
    Mutant("trees-trained-at-the-start", PACKING,
           "    if mask[0]:\n", "    if False:\n",
           "a token that nothing predicts is trained on the last row", "trees"),
]  # fmt: skip
