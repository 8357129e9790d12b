"""Tests of one PPO step against dense fp64 arithmetic."""

import copy
import math

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.train.config import CriticConfig, ReferenceConfig
from grpo_fast.train.critic import Critic, value_metrics
from grpo_fast.train.policy import Reference
from grpo_fast.train.update import precompute
from tests.pairs import pairs
from tests.tiny import tiny_policy
from tests.train.tiny_steps import accumulate, batch_of, gradients, rollout_of

GROUP = 3
# Each entry has the length of a prompt, and the lengths of its completions.
SHAPES = [(4, (5, 3, 1)), (2, (1, 4, 6)), (6, (2, 2, 7))]
CUT = [0, 4, 5]  # indices of the truncated completions, which have no EOS
SCORES = torch.tensor([1.0, 0.0, 0.5, 2.0, -1.0, 0.25, 0.0, 1.5, 1.0])


def make_critic(policy, **options):
    critic = Critic(policy, CriticConfig(**options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        critic.head.weight.copy_(torch.randn(1, 32, generator=generator) / 5)
        critic.head.bias.fill_(0.3)
    return critic


def make_batch(scores=SCORES, **options):
    samples = rollout_of(SHAPES, cut=CUT)
    samples.rewards = scores
    return batch_of(samples, scores, **options)


def dense_values(critic, rollout, i):
    """Return the critic's values before each token of a completion and after the last token.

    The values are computed without packing.
    """
    ids = torch.tensor([rollout.prompt_ids[i] + rollout.completion_ids[i]])
    with critic.trunk.generation():
        states = critic.trunk.lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        return critic.head(states[len(rollout.prompt_ids[i]) - 1 :])[:, 0].double().tolist()


def oracle(critic, batch, kls=None, *, gamma, lam):
    """Compute the GAE advantages before whitening, and the returns, in a loop over the tokens.

    Args:
        critic: Computes the values.
        batch: The samples.
        kls: For each completion, the list of the weighted KL of its tokens. None means 0.
        gamma: The discount factor γ.
        lam: The parameter λ of GAE.

    Returns:
        Advantages and returns, as one list of numbers per completion.
    """
    rollout, advantages, returns = batch.samples, [], []
    for i, kl in enumerate(kls or [[0.0] * n for n in rollout.lengths]):
        values, n = dense_values(critic, rollout, i), len(kl)
        rewards = [-x for x in kl]
        rewards[-1] += float(SCORES[i])
        following = trace = 0.0
        found = [0.0] * n
        for t in reversed(range(n)):
            trace = rewards[t] + gamma * following - values[t] + gamma * lam * trace
            found[t], following = trace, values[t]
        advantages.append(found)
        returns.append([a + v for a, v in zip(found, values[:n], strict=True)])
    return advantages, returns


def fixed(batch, policy, critic, **options):
    loss = LossConfig(kl_estimator=options.pop("kl_estimator", "k3"))
    precompute(batch, policy, loss, keep_old=True, critic=critic, **options)
    return batch


def of_each(batch, name):
    """Return a column of the batch's samples as one tensor per completion."""
    return getattr(batch.samples, name).split(batch.samples.lengths)


def check(batch, **expected):
    """Check that columns of the batch's samples have the expected values.

    `expected` maps the name of a column to one list of numbers per completion.
    """
    for name, lists in expected.items():
        wanted = torch.tensor([x for row in lists for x in row], dtype=torch.float64)
        got = getattr(batch.samples, name).double()
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


@pairs(kind=["shared", "model"], budget=[1, 14, 10**6], shared=[True, False])
def test_advantages_and_returns(kind, budget, shared):
    policy = tiny_policy()
    options = {"gamma": 0.9, "lam": 0.8}
    critic = make_critic(policy, kind=kind, whiten=False, **options)
    batch = fixed(make_batch(budget=budget, shared=shared), policy, critic)
    advantages, returns = oracle(critic, batch, **options)
    check(batch, token_advantages=advantages, returns=returns)


KL_BY_HAND = {"k1": lambda d: -d, "abs": abs, "k3+": lambda d: math.exp(d) - d - 1}


@pytest.mark.parametrize("estimator", KL_BY_HAND)
def test_the_kl_in_the_reward(estimator):
    """Check the returns if the KL penalty is part of the reward.

    The reward of each token is -β · KL. The score of the completion is added to the reward of its
    last token.
    """
    policy = tiny_policy()
    reference = Reference(policy, ReferenceConfig(kind="frozen"))
    with torch.no_grad():
        reference.copy.lm.get_output_embeddings().weight.mul_(1.3)
    critic = make_critic(policy, gamma=1.0, lam=1.0, whiten=False)
    batch = fixed(
        make_batch(), policy, critic, reference=reference, reward_beta=0.3, kl_estimator=estimator
    )
    pairs_of = zip(of_each(batch, "ref_logps"), of_each(batch, "old_logps"), strict=True)
    kls = [[0.3 * KL_BY_HAND[estimator](d) for d in (ref - old).tolist()] for ref, old in pairs_of]
    assert sum(abs(x) for row in kls for x in row) > 0.1
    _, returns = oracle(critic, batch, kls, gamma=1, lam=1)
    check(batch, returns=returns)


def test_whitening_is_over_the_whole_batch_after_masking():
    scores = SCORES.clone()
    scores[7] = math.nan  # a sample without a reward is excluded
    policy = tiny_policy()
    plain = make_critic(policy, whiten=False)
    raw = fixed(make_batch(scores, mask_truncated=True), policy, plain)
    counts = raw.completion_mask
    lengths = enumerate(raw.samples.lengths)
    assert int(counts.sum()) == sum(n for i, n in lengths if i not in (*CUT, 7))
    a = raw.samples.token_advantages.double()
    assert a.isfinite().all() and (a[~counts] == 0).all()
    expected = torch.where(counts, (a - a[counts].mean()) / a[counts].std(correction=0), 0.0)
    for budget in (1, 10**6):
        batch = make_batch(scores, mask_truncated=True, updates=3, budget=budget)
        got = fixed(batch, policy, make_critic(policy)).samples.token_advantages.double()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    # Whitening changes only the advantages. The returns must stay the same.
    mine, theirs = batch.samples.returns, raw.samples.returns
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_the_values_metrics():
    policy = tiny_policy()
    batch = fixed(make_batch(mask_truncated=True, budget=14), policy, make_critic(policy))
    rows = [i for i in range(9) if i not in CUT]
    values, returns = of_each(batch, "values"), of_each(batch, "returns")
    v, r = (torch.cat([x[i] for i in rows]).double() for x in (values, returns))
    found = value_metrics(batch)
    assert found["value/mean"] == pytest.approx(v.mean().item(), rel=1e-6)
    assert found["value/error"] == pytest.approx(((v - r) ** 2).mean().item(), rel=1e-6)
    explained = 1 - (r - v).var() / r.var()
    assert found["value/explained_variance"] == pytest.approx(explained.item(), rel=1e-6)


@pytest.mark.parametrize("loss", ["clipped", "plain", "huber"])
def test_the_value_heads_gradient(loss):
    """Check the value loss and the gradient of the value head against an fp64 reference.

    The reference computes the values without packing, and the loss in a loop over the tokens.
    """
    policy = tiny_policy()
    critic = make_critic(policy, loss=loss, epsilon=0.1, coef=0.7)
    batch = fixed(make_batch(), policy, critic)
    with torch.no_grad():
        critic.head.bias += 0.15  # some values are then outside of the clip range
        critic.head.weight *= 0.8
    config = LossConfig(loss_type="grpo")
    metrics, found = gradients(policy, batch.minibatches[0], config, critic)
    twin = copy.deepcopy(policy.lm).double()
    twin.set_attn_implementation("eager")
    tokens = sum(batch.samples.lengths)
    total, bounded, head = 0.0, 0, copy.deepcopy(critic.head).double()
    known = zip(of_each(batch, "values"), of_each(batch, "returns"), strict=True)
    for i, (old, returns) in enumerate(known):
        ids = batch.samples.prompt_ids[i] + batch.samples.completion_ids[i]
        first, n = len(batch.samples.prompt_ids[i]) - 1, len(old)
        with torch.no_grad():
            states = twin.base_model(input_ids=torch.tensor([ids]), use_cache=False)[0][0]
        values = head(states[first : first + n])[:, 0]
        for v, o, target in zip(values, old.double(), returns.double(), strict=True):
            plain = (v - target) ** 2 / 2
            if loss == "clipped":
                other = (o + (v - o).clamp(-0.1, 0.1) - target) ** 2 / 2
                bounded += int(other > plain)
                plain = torch.maximum(plain, other)
            elif loss == "huber" and abs(v - target) > 1:
                plain = (v - target).abs() - 0.5
            total = total + plain / tokens
    (0.7 * total).backward()
    assert metrics["value/loss"] == pytest.approx(total.item(), rel=1e-4)
    assert metrics["value/clip_ratio"] == pytest.approx(bounded / tokens, abs=1e-6)
    assert bounded > 0 or loss != "clipped"
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + 0.7 * total.item(), rel=1e-3)
    for name, parameter in head.named_parameters(prefix="value"):
        torch.testing.assert_close(found[name].double(), parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["shared", "model"])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean_global"])
def test_gradients_however_the_step_is_packed(kind, aggregation):
    policy = tiny_policy()
    critic = make_critic(policy, kind=kind)
    options = {"aggregation": aggregation, "max_completion_length": 9, "entropy_coef": 0.1}
    config = LossConfig(loss_type="grpo", **options)
    batch = fixed(make_batch(), policy, critic)
    seen, whole = gradients(policy, batch.minibatches[0], config, critic)
    assert any(name.startswith("own.") for name in whole) == (kind == "model")
    assert "own.lm_head.weight" not in whole
    for options in ({"budget": 12}, {"budget": 1, "shared": False}):
        batch = fixed(make_batch(**options), policy, critic)
        assert len(batch.micro_batches) > 2
        again, pieces = gradients(policy, batch.minibatches[0], config, critic)
        assert pieces.keys() == whole.keys()
        for name, gradient in whole.items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(pieces[name], gradient, rtol=0, atol=2e-4 * scale + 1e-6)
        for name in ("loss", "policy_loss", "value/loss"):
            assert again[name] == pytest.approx(seen[name], rel=1e-4, abs=1e-5)


def test_a_model_of_its_own_leaves_the_policy_alone():
    """Check that the value loss of a separate critic does not change the gradient of the policy."""
    policy = tiny_policy()
    config = LossConfig(loss_type="grpo")
    found = []
    for coef in (0.0, 2.0):
        critic = make_critic(policy, kind="model", coef=coef)
        batch = fixed(make_batch(), policy, critic)
        found.append(gradients(policy, batch.minibatches[0], config, critic)[1])
    without, with_it = found
    assert without.keys() == with_it.keys()
    for name, gradient in with_it.items():
        same = torch.equal(gradient, without[name])
        assert same != name.startswith(("own.", "value."))


def test_the_kl_that_is_reported_is_that_of_the_tokens_that_count():
    """Check that the reported KL is the mean over the tokens that contribute to the loss."""
    policy = tiny_policy()
    reference = Reference(policy, ReferenceConfig(kind="frozen"))
    with torch.no_grad():
        reference.copy.lm.get_output_embeddings().weight.mul_(1.3)
    batch = make_batch(mask_truncated=True, budget=14)
    precompute(batch, policy, LossConfig(), keep_old=True, reference=reference)
    pairs = zip(of_each(batch, "ref_logps"), of_each(batch, "old_logps"), strict=True)
    differences = [(ref - old).double() for ref, old in pairs]
    d = torch.cat([x for i, x in enumerate(differences) if i not in CUT])
    seen = accumulate(policy, batch.minibatches[0], LossConfig())
    assert seen.result()["kl"] == pytest.approx((d.exp() - d - 1).mean().item(), rel=1e-4)


def test_what_is_fixed_follows_its_completion_through_a_shuffle():
    policy = tiny_policy()
    critic = make_critic(policy)
    batch = fixed(make_batch(updates=3, budget=14), policy, critic)
    names = ("old_logps", "values", "returns", "token_advantages")
    before = {name: of_each(batch, name) for name in names}
    dealt = set()
    for seed in ("0/1/0", "0/1/1", "0/2/0", "1/1/0"):
        batch.shuffle(seed)
        dealt.add(tuple(map(tuple, batch.parts)))
        assert sorted(i for part in batch.parts for i in part) == list(range(9))
        assert [len(part) for part in batch.parts] == [3, 3, 3]
        assert batch.has_fixed
        for name in names:
            after = of_each(batch, name)
            assert all(map(torch.equal, after, before[name]))
    batch.shuffle("0/1/0")
    first = batch.parts
    batch.shuffle("0/1/0")
    assert len(dealt) > 1 and batch.parts == first


def test_a_separate_critic_does_not_train_its_lm_head():
    policy = tiny_policy()
    own = Critic(policy, CriticConfig(kind="model"))
    trained = {id(p) for p in own.parameters()}
    assert id(own.trunk.lm.get_output_embeddings().weight) not in trained
    assert len(trained) == len(policy.trainable()) + 1  # without the LM head, with the value head
