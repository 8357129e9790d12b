"""Tests of `rollout.replay_support`.

If a sampler truncates the vocabulary with top_k or top_p, this setting makes the trainer compute
the log-probs over the tokens that the sampler kept.
"""

import itertools

import pytest
import torch

from grpo_fast import Support, grpo_loss
from grpo_fast.objective.kl import KL_ESTIMATORS
from grpo_fast.rollout import generate
from grpo_fast.train.config import EvalConfig, ReferenceConfig, RolloutConfig, load_recipe
from grpo_fast.train.metrics import support_metrics
from grpo_fast.train.policy import Reference
from grpo_fast.train.update import precompute
from tests.tiny import tiny_policy
from tests.train.runs import sort
from tests.train.tiny_steps import accumulate, batch_of, table_of

PROMPTS = ["3 1 2 =", "5 =", "0 9 8 7 6 5 4 ="]
TRUNCATING = [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 5, "top_p": 0.7, "temperature": 0.6}]


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def sampled(policy, **options):
    options = RolloutConfig(max_new_tokens=9, **options)
    return generate(policy, PROMPTS, options, group_size=4, seed=1), options


@pytest.mark.parametrize("options", TRUNCATING, ids=str)
def test_with_unchanged_weights_trainer_and_sampler_agree(policy, options):
    """Check that trainer and sampler compute the same log-probs if the weights are unchanged.

    The trainer's log-probs over the kept tokens must be equal to the sampler's. Its log-probs over
    the full vocabulary must differ by the log of the probability mass of the kept tokens.
    """
    rollout, asked = sampled(policy, **options, batch_size=5)
    assert all(mass.min() < 0.999 for mass in rollout.mass.split(rollout.lengths))
    assert rollout.support.ids.dtype == torch.int32
    order = [[7, 4], [0, 1, 3], [11]]  # micro-batches with completions in any order
    micro = batch_of(rollout, torch.zeros(12)).packed(order)
    sampled_logps, mass = micro.column("logps"), micro.column("mass")
    logps = policy.logps(micro.packed, asked.temperature, support=micro.support)
    assert (logps - sampled_logps).abs().max() <= 1e-5
    dense = policy.logps(micro.packed, asked.temperature)
    torch.testing.assert_close(dense - sampled_logps, mass.log(), rtol=0, atol=1e-5)


def test_who_is_not_asked_hands_on_nothing(policy):
    """Check that an evaluation and a rollout with replay_support=off store no supports.

    The sampled tokens must be the same as in a rollout that stores the supports.
    """
    rollout, _ = sampled(policy, top_p=0.6)
    off, _ = sampled(policy, top_p=0.6, replay_support="off")
    asked = EvalConfig(max_new_tokens=9, top_p=0.6, temperature=1.0)
    plain = generate(policy, PROMPTS, asked, group_size=4, seed=1)
    assert plain.completion_ids == off.completion_ids == rollout.completion_ids
    assert plain.support is off.support is None
    assert batch_of(off, torch.zeros(12)).packed([[0]]).support is None
    assert sampled(policy)[0].support is None  # nothing is truncated


def masked_logps(policy, micro, temperature):
    """Compute log-probabilities (R, V) in plain torch, with −inf for ids outside the support."""
    hidden, head = policy.hidden(micro.packed)[micro.packed.predicting], policy.head
    z = hidden @ head.weight.T / temperature
    kept = torch.zeros_like(z, dtype=torch.bool)
    for t, (a, b) in enumerate(itertools.pairwise(micro.support.offsets.tolist())):
        kept[t, micro.support.ids[a:b].long()] = True
    return z.masked_fill(~kept, -torch.inf).log_softmax(-1)


def test_loss_kl_and_entropy_are_over_the_sets():
    """Check that loss, KL and entropy of a step are computed over the kept tokens.

    The gradients must equal the gradients of a plain torch loss on logits that are masked with
    −inf.
    """
    policy = tiny_policy()
    reference = Reference(policy, ReferenceConfig(kind="frozen"))
    rollout, asked = sampled(policy, top_p=0.7, temperature=0.8)
    with torch.no_grad():
        for p in policy.trainable():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(7)))
    config = load_recipe("sort", [
        "loss.beta=0.3", "loss.entropy_coef=0.2", "reference.kind=frozen",
        "rollout.temperature=0.8",
    ]).loss_config()  # fmt: skip
    batch = batch_of(rollout, torch.linspace(-1, 1, 12), budget=60)
    assert len(batch.micro_batches) > 1
    precompute(batch, policy, config, keep_old=True, reference=reference)
    groups = [range(i, i + 4) for i in range(0, 12, 4)]
    whole = batch.packed(groups)
    target = whole.packed.target_ids[:, None]
    with torch.no_grad():
        old = masked_logps(policy, whole, 0.8).gather(1, target)[:, 0]
        policy.head.weight.mul_(1.02)  # the policy differs from the old policy
    seen = accumulate(policy, batch.minibatches[0], config, ref_head=reference.head)
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters()}
    policy.model.zero_grad()
    lp = masked_logps(policy, whole, 0.8)
    p, finite = lp.exp(), lp.masked_fill(lp == -torch.inf, 0.0)
    with torch.no_grad():
        ref = masked_logps(reference.copy, whole, 0.8)
    logps, ref_logps = lp.gather(1, target)[:, 0], ref.gather(1, target)[:, 0]
    output = grpo_loss(
        logps, whole.advantages, config, cu_seqlens=whole.packed.cu_seqlens, old_logps=old,
        entropy=-(p * finite).sum(-1), ref_logps=ref_logps,
    )  # fmt: skip
    output.loss.backward()
    expected = KL_ESTIMATORS["k3"](ref_logps - logps)[0]
    assert seen.result()["kl"] == pytest.approx(expected.mean().item(), rel=1e-4)
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=2e-4, atol=2e-6)


def test_completions_with_and_without_sets_in_one_batch():
    supports = [
        Support(torch.tensor([4, 9, 5], dtype=torch.int32), torch.tensor([0, 2, 3])), None,
        Support(torch.tensor([7, 8, 2], dtype=torch.int32), torch.tensor([0, 1, 3])),
    ]  # fmt: skip
    samples = table_of([[3]], [[4, 5], [6], [7, 8]], supports=supports)
    assert samples[[2, 1, 0]].support.offsets.tolist() == [0, 1, 3, 3, 5, 6]
    assert support_metrics(samples) == {
        "sampling/support_size/mean": 1.5, "sampling/support_size/max": 2.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "top_k"),
    [
        (["top_p=0.9"], 512), (["top_p=0.9", "top_k=7"], 7), (["top_p=0.9", "top_k=0"], 0),
        (["top_p=0.9", "replay_support=off"], 0), ([], 0),
    ],
)  # fmt: skip
def test_top_p_alone_is_bounded_where_its_sets_are_kept(words, top_k):
    config = load_recipe("sort", [f"rollout.{word}" for word in words])
    assert config.rollout.top_k == top_k
    assert RolloutConfig(**config.rollout.model_dump()).top_k == top_k  # as if saved and loaded
    assert config.rollout.needs_support == (words != [] and "replay_support=off" not in words)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("replay", ["auto", "off"])
def test_a_run_says_how_much_the_sampler_kept(tmp_path, capsys, replay):
    words = ["rollout.top_p=0.5", f"rollout.replay_support={replay}", "steps=1"]
    (row,) = sort(tmp_path / "run", *words)
    line = "tokens that the sampler kept, where it says which (top_k 512, top_p 0.5)"
    assert (line in capsys.readouterr().out.replace("\n", " ")) == (replay == "auto")
    if replay == "auto":
        assert row["sampling/sampling_logp_difference/max"] <= 1e-5
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-5)
        assert 1 <= row["sampling/support_size/mean"] <= row["sampling/support_size/max"] < 13
        assert 0.5 <= row["sampling/kept_mass/mean"] < 0.8
    else:
        assert row["sampling/importance_sampling_ratio/mean"] < 0.8
        assert "sampling/support_size/mean" not in row
