"""Test the packing of prompts, completions and trees into rows, and attention over such trees.

The logps of all completions and the gradients of all parameters must equal those of one forward
pass per completion, with LoRA, in bf16 and in the README's example, too.
"""

import random
import re
import time
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_fast import LossConfig, attention, grpo_loss
from grpo_fast.attention import (
    Share,
    TreeLayout,
    pack_groups,
    pack_tree,
    plan_packs,
    plan_trees,
    register,
    trunk_tokens,
)
from grpo_fast.attention.dispatch import dense_attention
from grpo_fast.attention.layout import AttentionParams
from grpo_fast.train.policy import enable_checkpointing
from tests.attention.families import MODELS, small_model
from tests.attention.layouts import ATTENTION, inputs, results
from tests.tiny import tiny_model

VOCABULARY = 61
# Each entry is a group: the length of a prompt, and the lengths of its completions. The shortest
# length is one token. A group with a single completion has nothing to share.
GROUPS = ((9, (5, 1, 7, 2)), (3, (1, 1)), (12, (4,)), (1, (3, 2)), (20, (6, 6, 14)))


@pytest.fixture
def everything_in_fp64(monkeypatch):
    """Make transformers compute norms, RoPE and softmax in fp64 instead of fp32.

    Otherwise the results could not be equal up to fp64 rounding.
    """
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def random_groups():
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(2, 61, (n,), generator=generator).tolist()

    return [(ids(prompt), [ids(n) for n in completions]) for prompt, completions in GROUPS]


def samples_of(groups):
    """Return the completions of all groups as samples (ids, trained) for `pack_tree`."""
    return [(p + c, [0] * len(p) + [1] * len(c)) for p, completions in groups for c in completions]


def by_sample(model, samples):
    """Return the logps (R,) of the trained tokens from a separate forward pass for each sample."""
    model.set_attn_implementation("eager")
    logps = []
    for ids, trained in samples:
        ids, at = torch.tensor(ids), torch.tensor(trained).nonzero()[:, 0]
        if len(at):
            logits = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
            logps.append(logits[at - 1].gather(1, ids[at][:, None])[:, 0])
    return torch.cat(logps)


def by_pack(model, pack):
    """Return the logps (R,) of the trained tokens from one packed row."""
    model.set_attn_implementation(register())
    logits = model(**pack.model_inputs).logits[0].log_softmax(-1)
    return logits[pack.predicting].gather(1, pack.target_ids[:, None])[:, 0]


def gradients(model, loss):
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, [*trained.values()], materialize_grads=True)
    return dict(zip(trained, found, strict=True))


def assert_close(got, expected, bar=1e-12):
    """Check that differences are small relative to the largest entry of each tensor.

    The tolerance is `bar` times the largest entry, or `bar` if this entry is below 1.
    """
    for name, value in expected.items():
        error = float((got[name] - value).detach().abs().max())
        assert error <= bar * max(1.0, float(value.detach().abs().max())), (name, error)


def random_samples(rng, depth=5, most=20, ids=VOCABULARY):
    """Return random samples (ids, trained) that share prefixes.

    Their ids are paths through random tries. Samples may end inside nodes, be equal, or be prefixes
    of other samples, and they train different tokens.
    """
    paths = []
    for _ in range(rng.randint(1, 3)):
        grown = [[rng.randrange(ids) for _ in range(rng.randint(1, 6))]]
        for _ in range(rng.randrange(depth)):
            grown = [
                path + [rng.randrange(ids) for _ in range(rng.randint(1, 6))]
                for path in grown
                for _ in range(rng.choice([1, 1, 2, 2, 3]))
            ][:12]
            grown += [p[: rng.randint(1, len(p))] for p in grown if rng.random() < 0.15]
        paths += grown
    rng.shuffle(paths)

    def mask(path):
        is_trained = rng.random() < 0.9
        return [is_trained and t > 0 and rng.random() < 0.6 for t in range(len(path))]

    samples = [(path, mask(path)) for path in paths[:most]]
    if not any(any(trained) for _, trained in samples):
        samples.append(([1, 2, 3], [0, 1, 1]))
    return samples


def comb(turns, tokens=3):
    """Return the samples of a conversation in which each turn has a different continuation.

    Sample n has the first n turns and a branch, whose tokens are trained.
    """
    numbers = iter(range(10**7))
    history, samples = [next(numbers)], []
    for _ in range(turns):
        history = history + [next(numbers) for _ in range(tokens)]
        branch = history + [next(numbers) for _ in range(tokens)]
        samples.append((branch, [0] * len(history) + [1] * tokens))
    return samples


@pytest.mark.parametrize("family", MODELS)
def test_random_trees_equal_one_sample_at_a_time(everything_in_fp64, family):
    """Check that packed random trees give the logps and gradients of one forward pass per sample.

    The test covers windows, softcaps, copied nodes and checkpointing. Every logp has a different
    weight in the loss, so a test fails if the gradients of two samples are exchanged.
    """
    model, rng = small_model(family).double(), random.Random(family)
    for number, cost in enumerate((0.0, 0.0, 0.3, 1 / 128)):
        samples = random_samples(rng)
        pack = pack_tree(samples, merge_cost=cost)
        weights = torch.randn(len(pack.target_ids), dtype=torch.float64)
        expected = by_sample(model, samples)
        assert expected.dtype == torch.float64
        wanted = gradients(model, weights @ expected.sin())
        if number == 1:
            enable_checkpointing(model.train())
        logps = by_pack(model, pack)
        assert_close({"logps": logps}, {"logps": expected})
        assert_close(gradients(model, weights @ logps.sin()), wanted)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_same_bits_every_time_and_with_gradients_recomputed(family):
    model, samples = tiny_model(family), random_samples(random.Random(5), depth=6)
    runs = []
    for number in range(3):
        if number == 2:
            enable_checkpointing(model.train())
        logps = by_pack(model, pack_tree(samples))
        runs.append([logps, *gradients(model, logps.square().sum()).values()])
    for again in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], again, strict=True))


def contexts(pack):
    """Yield the context of each loss term: the ids that the predicting row sees, in order."""
    seen, position, ids = pack.layout.visible(), pack.layout.position_ids[0], pack.input_ids[0]
    for row in pack.predicting.tolist():
        rows = seen[row].nonzero()[:, 0]
        rows = rows[position[rows].argsort()]
        assert position[rows].tolist() == list(range(len(rows)))
        yield ids[rows].tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0, 1 / 128, 0.1, 1.0]), st.sampled_from([2, 5, 61]))
def test_every_term_sees_its_own_history(seed, cost, ids):
    samples = random_samples(random.Random(seed), ids=ids)
    pack = pack_tree(samples, merge_cost=cost)
    expected = [(p[:t], p[t]) for p, trained in samples for t, on in enumerate(trained) if on]
    assert list(contexts(pack)) == [context for context, _ in expected]
    assert pack.target_ids.tolist() == [target for _, target in expected]
    assert pack.lengths == tuple(sum(trained) for _, trained in samples)
    assert pack.cu_seqlens.tolist()[-1] == len(expected)
    prefixes = {tuple(context[:n]) for context, _ in expected for n in range(1, len(context) + 1)}
    total = pack.layout.total
    assert total == len(prefixes) if cost == 0 else total >= len(prefixes)


def test_rows_by_hand():
    samples = [
        ([5, 6, 7, 8, 9], [0, 0, 0, 1, 1]),
        ([5, 6, 1, 2], [0, 0, 1, 1]),
        ([3, 4], [0, 1]),
        ([5, 6, 7, 8, 2], [0, 0, 0, 0, 1]),
        ([5, 6, 7, 8, 9, 3], [0, 1, 0, 0, 0, 0]),
    ]
    # Samples with different numbers in `apart` share no rows.
    pack = pack_tree(samples, apart=[1, 1, 1, 2, 1], merge_cost=0)
    assert pack.input_ids.tolist() == [[5, 6, 7, 8, 1, 3, 5, 6, 7, 8]]
    # If `apart` assigns a number to each token, samples share rows only up to the first token with
    # different numbers.
    later = [
        torch.tensor([0, 0, *[int(n == 3)] * (len(ids) - 2)]) for n, (ids, _) in enumerate(samples)
    ]
    pack = pack_tree(samples, apart=later, merge_cost=0)
    assert pack.input_ids.tolist() == [[5, 6, 7, 8, 1, 7, 8, 3]]
    assert pack.predicting.tolist() == [2, 3, 1, 4, 7, 6, 0]
    # A shared prefix of two tokens becomes a separate segment if this saves two of about 100 rows.
    # It is copied if this saves only two of about 400 rows.
    for tokens, segments in ((50, 3), (200, 2)):
        two = [([1, 2, n, *range(tokens)], [0, 0] + [1] * (tokens + 1)) for n in (3, 4)]
        assert len(pack_tree(two).layout.lengths) == segments


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 60))
def test_rows_of_a_budget(seed, budget):
    samples = random_samples(random.Random(seed))
    plan = plan_trees(samples, budget)
    assert sorted(i for row in plan for i in row) == list(range(len(samples)))
    assert plan == sorted(plan) and all(row == sorted(row) for row in plan)

    def distinct(row):
        paths = [
            samples[i][0][: max((t for t, on in enumerate(samples[i][1]) if on), default=0)]
            for i in row
        ]
        return len({tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)})

    assert all(distinct(row) <= budget or len(row) == 1 for row in plan)
    if distinct(range(len(samples))) <= budget:
        assert len(plan) == 1


def test_a_plan_cuts_below_the_branch_that_exceeds_it():
    # The tree has a trunk of 4 tokens. Below it are a branch of 2 tokens with two leaves of 3
    # tokens, and a leaf of 2 tokens. These are 4 + 2 + 6 + 2 = 14 tokens.
    paths = [[1, 2, 3, 4, 5, 6, n, n, n, 0] for n in (7, 8)] + [[1, 2, 3, 4, 9, 9, 0]]
    samples = [(path, [0] * (len(path) - 1) + [1]) for path in paths]
    assert plan_trees(samples, 14) == [[0, 1, 2]] and plan_trees(samples, 13) == [[0, 1], [2]]
    assert plan_trees(samples, 11) == [[0, 2], [1]]  # 4 + 2 + 3 + 2 = 11, and 4 + 2 + 3
    assert plan_trees(samples, 10) == [[0], [1], [2]]
    assert plan_trees([], 10) == []


def test_thousands_of_turns_take_no_recursion_and_little_time():
    samples, start = comb(1200), time.process_time()
    pack = pack_tree(samples, merge_cost=0)
    assert len(pack.layout.lengths) == 2399 and len(pack.layout.calls) == 1200
    assert time.process_time() - start < 10  # takes 1.3 s on an idle machine
    assert len(plan_trees(samples, 500)) > 20
    ids = list(range(5000))
    nested = [(ids[: n + 2], [0] * (n + 1) + [1]) for n in range(0, 4998, 2)]
    assert len(pack_tree(nested).layout.lengths) == 1


@pytest.mark.parametrize("depth", [3, 20])
def test_depth_costs_no_accuracy_in_16_bits(depth):
    """Check that in bf16, splitting a path into many nodes costs almost no accuracy.

    The comparison is with the same path as a single segment.

    The errors against fp64 may be at most 1.5 times as large.
    """
    whole, params = TreeLayout.of([8 * depth]), AttentionParams(0.3)
    cut = TreeLayout.of([8] * depth, parents=range(-1, depth - 1))
    given_ = inputs(whole, dim=16, dtype=torch.bfloat16)
    exact, errors = results(dense_attention, given_, whole, params, torch.float64), []
    for layout in (cut, whole):
        found = results(ATTENTION["flash_cpu"], given_, layout, params)
        errors.append([float((x - y).norm() / y.norm()) for x, y in zip(found, exact, strict=True)])
    for in_nodes, in_one in zip(*errors, strict=True):
        assert in_nodes <= 1.5 * in_one


BAD_SAMPLES = [
    ([([1, 2], [0, 1]), ([], [])], r"samples\[1\]: expected token ids, .* got \(0,\)"),
    ([([1.5, 2], [0, 1])], r"samples\[0\]: expected token ids"),
    ([([1, -2], [0, 1])], r"samples\[0\]: expected token ids"),
    ([([1, 2], [0, None])], r"samples\[0\]: expected token ids and a bool for each"),
    ([([[1, 2]], [[0, 1]])], r"samples\[0\]: expected token ids"),
    ([([1, 2], [0, 1]), ([1, 2, 3], [0, 1])], r"samples\[1\]: expected a bool for each of 3"),
    ([([1, 2], [0, 0.5])], r"samples\[0\]: expected a bool for each of 2 ids"),
    ([([1, 2], [0, 2])], r"samples\[0\]: expected a bool for each of 2 ids"),
    ([([1, 2], [0, 1]), ([1, 2], [1, 1])], r"expected no trained token at position 0"),
]
BAD_GROUPS = [
    ([([1], [[2]]), ([], [[1]])], r"groups\[1\]: expected a prompt"),
    ([([1], [])], r"groups\[0\]: expected at least one completion"),
    ([([1], [[1], []])], r"groups\[0\]: .* got lengths \[1, 0\]"),
]
ONE = [([1, 2], [0, 1])]
UNTRAINED = "samples: expected at least one trained token, got none"
REFUSED = [
    *[(partial(pack_tree, x), UNTRAINED) for x in ([], [([1, 2], [0, 0])])],
    *[(partial(pack_tree, x), message) for x, message in BAD_SAMPLES],
    *[(partial(plan_trees, x, 10), message) for x, message in BAD_SAMPLES],
    (partial(pack_tree, ONE, apart=[1, 2]), "apart: expected a number for each of 1 samples"),
    (partial(plan_trees, ONE, 0), "budget: expected at least 1"),
    (partial(pack_groups, []), "groups: expected at least one"),
    *[(partial(pack_groups, x), message) for x, message in BAD_GROUPS],
    *[(partial(plan_packs, [(len(p), [len(c) for c in cs]) for p, cs in x], 10), message)
      for x, message in BAD_GROUPS],
    (partial(plan_packs, [(1, [1])], 0), "budget: expected at least 1"),
    (partial(TreeLayout.of, [3, 0]), "lengths: expected at least one segment and none empty"),
    *[(partial(TreeLayout.of, [2] * len(x), parents=x), "parents: expected an earlier segment than")
      for x in ([0, -1], [-1, 1], [-1, 5], [-1, -2], [-1, 0, 1, 0], [-1, -1, 1, -1, 1])],
    (partial(TreeLayout.of, [3, 2, 2], parents=[-1, 0]),
     "parents: expected one for each of 3 segments, got 2"),
    (partial(pack_groups([([1, 2], [[3, 4]])]).split, torch.zeros(3)),
     "values: expected one row for each of 2 tokens"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals(number):
    call, message = REFUSED[number]
    with pytest.raises(ValueError, match=message):
        call()


# ------------------------- Test the packing of prompts and completions into rows of limited length
sizes = st.lists(
    st.tuples(st.integers(1, 7), st.lists(st.integers(1, 6), min_size=1, max_size=5)),
    min_size=1,
    max_size=6,
)


def numbered(groups):
    """Return groups with the given prompt and completion lengths, and a unique id for each token.

    Because the ids are unique, a misplaced token changes the result.
    """
    numbers = iter(range(10_000))
    return [
        ([next(numbers) for _ in range(p)], [[next(numbers) for _ in range(c)] for c in cs])
        for p, cs in groups
    ]


@settings(max_examples=120, deadline=None)
@given(sizes, st.booleans(), st.integers(1, 40))
def test_groups_are_a_tree_of_two_levels(lengths, shared, budget):
    """Compare groups with `pack_tree` and `plan_trees`, which get their completions as samples.

    If prompts are not shared, no samples share rows of the tree.
    """
    groups = numbered(lengths)
    samples = samples_of(groups)
    apart = None if shared else range(len(samples))
    # 1. Compare the packed rows.
    pack, tree = pack_groups(groups, shared=shared), pack_tree(samples, apart=apart, merge_cost=0)
    for name in ("input_ids", "predicting", "target_ids", "cu_seqlens"):
        assert torch.equal(getattr(pack, name), getattr(tree, name))
    assert pack.layout.lengths == tree.layout.lengths and pack.lengths == tree.lengths
    assert pack.layout.parents == tree.layout.parents
    assert pack.layout.has_tree == (shared and any(sum(c > 1 for c in cs) > 1 for _, cs in lengths))
    assert pack.cu_seqlens.dtype == torch.int32
    tokens = sum(trunk_tokens(p, cs, shared=shared) for p, cs in lengths)
    assert pack.layout.total == pack.input_ids.numel() == tokens
    expected = [p + c[:i] for p, cs in groups for c in cs for i in range(len(c))]
    assert list(contexts(pack)) == expected
    split = [[v.tolist() for v in views] for views in pack.split_groups(pack.target_ids)]
    assert split == [cs for _, cs in groups]
    # 2. Compare the rows of a budget.
    plan = plan_packs(lengths, budget, shared=shared)
    first = [0, *accumulate(len(cs) for _, cs in groups)]
    placed = [[first[s.group] + i for s in shares for i in s.completions] for shares in plan]
    assert placed == plan_trees(samples, budget, apart=apart)
    completions = [ids for shares in plan for s in shares for ids in s.of(groups)[1]]
    assert sorted(completions) == sorted(ids for _, cs in groups for ids in cs)
    if shared:  # only a group that is longer than the budget may be split
        for group, (prompt, counts) in enumerate(lengths):
            parts = sum(share.group == group for shares in plan for share in shares)
            assert parts == 1 or trunk_tokens(prompt, counts) > budget


def test_best_fit_by_hand():
    # The groups cost 10, 9, 5, 4 and 2 tokens, and the budget of a row is 14. Best fit places the
    # largest group first. It then places each other group into the fullest row that has room.
    groups = [(1, [10]), (1, [5]), (1, [9]), (1, [4]), (1, [2])]
    plan = plan_packs(groups, 14)
    assert [[share.group for share in shares] for shares in plan] == [[0, 3], [1, 2], [4]]
    # The groups cost 12, 10, 9 and 1 tokens, and the budget is 20. Best fit places the last group
    # into the second row, which is fuller. First fit would place it into the first row.
    plan = plan_packs([(1, [12]), (1, [10]), (1, [9]), (1, [1])], 20)
    assert [[share.group for share in shares] for shares in plan] == [[0], [1, 2, 3]]
    # The group needs 5 + 3·4 = 17 tokens, because the last token of a completion is not an input.
    # This exceeds the budget of 14, so two completions share one copy of the prompt, and the third
    # completion gets a second copy.
    assert plan_packs([(5, [5, 5, 5])], 14) == [[Share(0, (0, 1))], [Share(0, (2,))]]
    # The third completion of the split group shares its row with a different group.
    assert plan_packs([(5, [5, 5, 5]), (2, [2, 2])], 14) == [
        [Share(0, (0, 1))],
        [Share(0, (2,)), Share(1, (0, 1))],
    ]
    # The completion of 9 tokens exceeds the budget, so it gets a separate row. The completion of
    # one token adds nothing to its prompt, because the last token of a completion is not an input.
    assert plan_packs([(9, [2, 9, 1])], 10) == [[Share(0, (0, 2))], [Share(0, (1,))]]
    assert plan_packs([], 10) == []
    # Without sharing, every completion has a copy of the prompt and is placed separately.
    assert plan_packs([(5, [5, 5, 5])], 18, shared=False) == [[Share(0, (0, 1))], [Share(0, (2,))]]


def test_ids_may_be_lists_or_tensors_and_tensors_stay_where_they_are_asked_for():
    lists = numbered([(3, [2, 4]), (2, [1])])
    tensors = [
        (torch.tensor(p), [torch.tensor(c, dtype=torch.int32) for c in cs]) for p, cs in lists
    ]
    one, other = pack_groups(lists), pack_groups(tensors, device="meta")
    assert torch.equal(one.input_ids, pack_groups(tensors).input_ids)
    for name in ("input_ids", "predicting", "target_ids", "cu_seqlens"):
        here, there = getattr(one, name), getattr(other, name)
        assert there.device.type == "meta" and (here.dtype, here.shape) == (
            there.dtype,
            there.shape,
        )
    assert one.model_inputs.keys() == {"input_ids", "position_ids", "use_cache", "packed_layout"}
    assert one.model_inputs["packed_layout"] is one.layout
    assert one.model_inputs["use_cache"] is False


def test_lora(everything_in_fp64):
    """Check that shared prompts give the right gradients of a LoRA adapter.

    The adapter is only in q_proj, so k and v of the first layer do not require grad.
    """
    import peft

    config = peft.LoraConfig(
        r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    model, groups = peft.get_peft_model(tiny_model("llama").double(), config), random_groups()
    expected, got = by_sample(model, samples_of(groups)), by_pack(model, pack_groups(groups))
    assert_close(gradients(model, got.sum()), gradients(model, expected.sum()))


def test_fp32_and_autocast_stay_within_rounding():
    model, groups = tiny_model("gemma2"), random_groups()
    samples, pack = samples_of(groups), pack_groups(groups)
    expected = by_sample(model, samples)
    torch.testing.assert_close(by_pack(model, pack), expected, rtol=0, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        by_itself, got = by_sample(model, samples), by_pack(model, pack)
    ours, theirs = ((x.float() - expected).norm() for x in (got, by_itself))
    assert ours <= 1.5 * theirs


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "granite"])
def test_the_readme_runs_as_it_stands(family):
    """Check that the README's example gives the right logps and gradients.

    The three families cover a plain head, a head with a softcap, and a head with a logit scale.
    """
    text = (Path(attention.__file__).parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 3 and len([line for line in blocks[0].splitlines() if line.strip()]) <= 15
    model, groups = tiny_model(family), random_groups()
    advantages = torch.cat([torch.arange(len(completions)) - 1.0 for _, completions in groups])
    names = {"model": model, "groups": groups, "advantages": advantages}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    logps = by_sample(model, samples_of(groups))
    found = torch.cat([of_one for of_group in names["logps"] for of_one in of_group])
    torch.testing.assert_close(found, logps.detach(), rtol=0, atol=2e-5)
    lengths = torch.tensor([0] + [len(c) for _, cs in groups for c in cs])
    cu_seqlens = lengths.cumsum(0).int()
    loss = grpo_loss(logps, advantages, LossConfig(), cu_seqlens=cu_seqlens).loss
    assert_close(got, gradients(model, loss), bar=1e-5)
    assert names["pack"].layout.total <= 64
