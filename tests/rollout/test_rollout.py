"""Tests of the sampler and of the table of samples.

The sampler is tested with known probabilities, and with EOS, seeds, padding and NaN. The table is
tested for selection, joining and writing.
"""

import dataclasses

import pytest
import torch

from grpo_fast import Support
from grpo_fast import rollout as rollouts
from grpo_fast.rollout import Completion, NonFiniteLogits, Samples, Sampling
from grpo_fast.rollout.engine import EOS, LENGTH, Sampler, pick, seed_of
from grpo_fast.rollout.own import engine as hf
from grpo_fast.rollout.samples import COLUMNS, table_of
from tests.tiny import SYMBOLS, tiny_policy

PROMPTS = ["3 1 2 =", "5 =", "0 9 8 7 6 5 4 ="]  # different lengths need left padding


def generate(policy, prompts, *, seed, group_size=4, **options):
    sampling = Sampling(**{"max_new_tokens": 12, **options})
    return rollouts.generate(policy, prompts, sampling, group_size=group_size, seed=seed)


def test_draw_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, -1.0]])
    uniform = (torch.arange(20000) + 0.5) / 20000
    probabilities = logits.softmax(-1)
    tokens = pick(probabilities.expand(20000, 5), uniform)
    frequency = torch.bincount(tokens, minlength=5) / 20000
    torch.testing.assert_close(frequency, probabilities[0], rtol=0, atol=1e-4)
    assert frequency[2] == 0
    p = torch.full((2, 5), float("nan"))
    assert pick(p, torch.tensor([0.0, 0.99])).max() < 5


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_draw_never_takes_an_impossible_token(uniform):
    logits = torch.full((1, 1000), -torch.inf)
    logits[0, 400:600] = torch.randn(200, generator=torch.Generator().manual_seed(0))
    assert 400 <= pick(logits.softmax(-1), torch.tensor([uniform])).item() < 600


def test_top_k_then_top_p_and_a_temperature_in_the_logps():
    probabilities = torch.tensor([[0.3, 0.05, 0.4, 0.1, 0.15]])
    sampler = Sampler(torch.full((1, 1), 0.999), Sampling(top_k=4, top_p=0.72))
    # top_k keeps the tokens with the probabilities .4, .3, .15 and .1, whose sum is .95. After
    # normalization, the first two have .7 / .95 = .737 >= .72, so top_p drops the other two.
    scores = sampler(torch.zeros(1, 1), probabilities.log())
    assert scores.argmax(-1).item() == 2  # the last kept token in vocabulary order
    assert sampler.draws[0].logps.item() == pytest.approx(
        torch.tensor(0.4 / 0.7).log().item(), abs=1e-6
    )
    assert sampler.draws[0].candidates.tolist() == [[0, 2, 3, 4]]
    logits = torch.tensor([[1.0, 3.0, 0.5]])
    sampler = Sampler(torch.full((1, 1), 0.999), Sampling(top_p=1e-300))
    assert sampler(torch.zeros(1, 1), logits).argmax(-1).item() == 1
    assert sampler.draws[0].logps.item() == 0
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    sampler = Sampler(torch.zeros(1, 1), Sampling(temperature=0.5))
    token = sampler(torch.zeros(1, 1), logits.clone()).argmax(-1)
    expected = (logits / 0.5).log_softmax(-1)[0, token].item()
    assert sampler.draws[0].logps.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-45, 1e-300])
def test_a_temperature_that_fp32_cannot_divide_by(temperature):
    with pytest.raises(ValueError, match="expected 0 .greedy. or at least 1e-06"):
        Sampling(temperature=temperature)
    assert Sampling(temperature=1e-6).temperature == 1e-6


def test_the_seed_decides_and_the_batch_size_does_not(policy):
    first = generate(policy, PROMPTS, seed=(3, 1))
    again = generate(policy, PROMPTS, seed=(3, 1))
    other = generate(policy, PROMPTS, seed=(3, 2))
    pieces = generate(policy, PROMPTS, seed=(3, 1), batch_size=5)
    assert first.completion_ids == again.completion_ids != other.completion_ids
    assert all(map(torch.equal, first.sampling_logps, again.sampling_logps))
    assert pieces.completion_ids == first.completion_ids
    assert seed_of(3, 1) != seed_of(31) and 0 <= seed_of("x") < 2**63


def test_chat_messages_empty_prompts_and_prompts_without_positions(policy, monkeypatch):
    messages = [{"role": "user", "content": "1 2"}]
    rollout = generate(policy, [messages], seed=0, group_size=1)
    assert rollout.prompt_ids == [policy.tokenizer("1 2")["input_ids"]]
    with pytest.raises(ValueError, match="at least one token"):
        generate(policy, [""], seed=0)
    longest = " ".join("1" for _ in range(512))
    assert policy.positions == 512
    short = {"group_size": 1, "max_new_tokens": 1}
    assert len(generate(policy, [longest], seed=0, **short).texts) == 1
    for name in hf.RUNS:
        monkeypatch.setitem(hf.RUNS, name, lambda *_: pytest.fail("called before the check"))
    with pytest.raises(ValueError, match="at most 512 tokens .*max_position_embeddings.*, got 513"):
        generate(policy, ["1 2 =", longest + " 1"], seed=0, **short)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}])
def test_a_policy_that_gives_no_numbers(bad, how):
    broken = tiny_policy()
    with torch.no_grad():
        broken.lm.lm_head.weight.fill_(bad)
    with pytest.raises(NonFiniteLogits, match="the policy's logits are NaN"):
        generate(broken, PROMPTS, seed=1, **how)


def test_nan_after_the_end_of_a_completion_is_ignored(policy, monkeypatch):
    """Check that NaN logits of a completion are ignored after its EOS token.

    transformers' `generate` keeps computing tokens for a finished completion until all completions
    have finished.
    """
    eos, rows = policy.tokenizer.eos_token_id, len(SYMBOLS) + 2

    def ends_at_once(input_ids, logits_processor, **_):
        scores = torch.zeros(len(input_ids), rows)
        scores[:, eos] = 100.0
        for step in (scores, torch.full_like(scores, torch.nan)):
            tokens = logits_processor[0](input_ids, step).argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, tokens], dim=1)
        return input_ids

    monkeypatch.setitem(hf._differences, policy.lm, {hf.LOOP: "requested by a test"})
    monkeypatch.setattr(policy.lm, "generate", ends_at_once)
    rollout = generate(policy, PROMPTS, seed=2, group_size=1, max_new_tokens=2)
    assert rollout.completion_ids == [[eos]] * 3 and not rollout.truncated.any()
    assert rollout.texts == [""] * 3


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 1024),
        ({"rope_type": "default"}, 512),
    ],
)
def test_positions_of_a_stretched_model(rope, positions):
    policy = tiny_policy(rope_parameters={"rope_theta": 1e4, **rope})
    assert policy.positions == positions


PROMPT_IDS = [[3, 4], [5]]
COMPLETIONS = [[6, 7, 1], [8], [9, 1], [2, 2, 2]]
SUPPORTS = [
    Support(torch.tensor([6, 7, 7, 1]).int(), torch.tensor([0, 2, 3, 4])),
    None,
    Support(torch.tensor([9, 1, 2]).int(), torch.tensor([0, 1, 3])),
    None,
]
MASSES = [torch.tensor(masses) for masses in ([0.9, 1, 1], [1.0], [0.4, 0.5], [1.0, 1, 1])]


def table(**changes):
    """Build a `Samples` table of two prompts with two completions each.

    Samples 0 and 2 have a support, which is the set of tokens that the sampler kept. Keyword
    arguments replace columns of the table.
    """
    completions = []
    for i, ids in enumerate(COMPLETIONS):
        logps = torch.arange(len(ids)) - 10.0 * i
        reason = EOS if 1 in ids else LENGTH
        completions.append(Completion(ids, logps, reason, i, SUPPORTS[i], MASSES[i]))
    samples = table_of(PROMPT_IDS, completions, [f"t{i}" for i in range(4)], [5, 9])
    samples.rewards = torch.tensor([1.0, 2.0, 3.0, 4.0])
    samples.scores = {"f": samples.rewards + 10}
    samples.values = torch.arange(9.0)
    return dataclasses.replace(samples, **changes)


def test_the_columns_are_flat():
    samples = table()
    assert samples.ids.tolist() == [3, 4, 6, 7, 1, 3, 4, 8, 5, 9, 1, 5, 2, 2, 2]
    assert samples.segment.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1]
    assert samples.cu_seqlens.tolist() == [0, 5, 8, 11, 15] and len(samples) == 4
    assert samples.rows.tolist() == [0, 3, 4, 6, 9] and samples.lengths == [3, 1, 2, 3]
    assert samples.group.tolist() == [5, 5, 9, 9] and samples.prompt_lengths == [2, 2, 1, 1]
    assert samples.truncated.tolist() == [False, True, False, True]
    assert samples.weight_version.tolist() == [0, 1, 2, 3]
    assert samples.prompt_ids == [[3, 4], [3, 4], [5], [5]]
    assert samples.completion_ids == COMPLETIONS
    assert samples.support.ids.tolist() == [6, 7, 7, 1, 9, 1, 2]
    assert samples.support.offsets.tolist() == [0, 2, 3, 4, 4, 5, 7, 7, 7, 7]
    assert samples.mass.tolist() == pytest.approx([0.9, 1, 1, 1, 0.4, 0.5, 1, 1, 1])
    unknown = Completion([5], torch.zeros(1), LENGTH, 0)
    assert table_of([[1]], [unknown]).mass is None


@pytest.mark.parametrize("chosen", [[0], [3, 0], [2, 1, 0], [1, 1], [1, 3]])
def test_selecting_is_indexing(chosen):
    whole, part = table(), table()[chosen]
    assert part.completion_ids == [COMPLETIONS[i] for i in chosen]
    assert part.prompt_ids == [whole.prompt_ids[i] for i in chosen]
    assert part.texts == [f"t{i}" for i in chosen]
    assert part.rewards.tolist() == [i + 1 for i in chosen]
    assert part.scores["f"].tolist() == [i + 11 for i in chosen]
    assert part.truncated.tolist() == [bool(whole.truncated[i]) for i in chosen]
    for name in ("logps", "values", "mass"):
        views = getattr(whole, name).split(whole.lengths)
        expected = torch.cat([views[i] for i in chosen])
        torch.testing.assert_close(getattr(part, name), expected, equal_nan=True)
    sets = [SUPPORTS[i] for i in chosen if SUPPORTS[i] is not None]
    if sets:
        assert part.support.ids.tolist() == [x for one in sets for x in one.ids.tolist()]
    assert (part.support is None) == (not sets)


def test_joining_restores_the_table():
    whole = table()
    joined = Samples.cat([whole[[0, 1]], None, whole[[2]], whole[[3]]])
    assert joined.texts == whole.texts and joined.completion_ids == whole.completion_ids
    for name in (*COLUMNS, "support", "scores"):
        ours, theirs = getattr(joined, name), getattr(whole, name)
        torch.testing.assert_close(ours, theirs, equal_nan=True, msg=name)
    one = whole[[0]]
    assert Samples.cat([None, one]) is one
    assert Samples.cat([table(values=None)[[0]], one]).values is None


def test_writing_creates_a_column():
    samples = table(values=None)
    samples.write("values", torch.tensor([4, 2]), torch.tensor([1.5, 2.5]))
    samples.write("values", torch.tensor([0]), torch.tensor([7.0]))
    assert samples.values.tolist() == [7, 0, 2.5, 0, 1.5, 0, 0, 0, 0]
    samples.write("ref_hidden", torch.tensor([8]), torch.ones(1, 2))
    assert samples.ref_hidden.shape == (9, 2) and samples.ref_hidden.sum() == 2
