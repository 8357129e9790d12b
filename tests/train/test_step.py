"""Tests of a step against direct computation: normalizers, advantages, the reference and its KL."""

import math

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.objective.advantages import RunningBaseline, split_options
from grpo_fast.rollout import Samples
from grpo_fast.train.batch import Totals
from grpo_fast.train.collect import Advantages
from grpo_fast.train.config import ModelConfig, ReferenceConfig
from grpo_fast.train.critic import token_rewards
from grpo_fast.train.policy import Reference, load_policy
from tests import oracles
from tests.pairs import pairs
from tests.tiny import tiny_folder, tiny_policy
from tests.train.runs import sort
from tests.train.test_ppo_step import CUT, SCORES, make_batch
from tests.train.tiny_steps import accumulate, batch_of, gradients, logits_of, rollout_of, table_of

pytestmark = pytest.mark.usefixtures("no_pictures")


NO_VERDICT = 2


# With 4 ranks, one is idle.
@pairs(mask_truncated=[False, True], updates=[1, 3], ranks=[1, 2, 4], is_shuffled=[False, True])
def test_totals_count_what_the_masks_do(mask_truncated, updates, ranks, is_shuffled):
    scores = SCORES.clone()
    scores[NO_VERDICT] = math.nan
    options = dict(mask_truncated=mask_truncated, updates=updates, budget=14, ranks=ranks)
    steps = [make_batch(scores, rank=rank, **options) for rank in range(ranks)]
    if is_shuffled:
        for step in steps:
            step.shuffle("7")  # distributes the groups over the minibatches
    left_out, idle = {NO_VERDICT, *(CUT if mask_truncated else [])}, 0
    counted = [0 if i in left_out else n for i, n in enumerate(steps[0].samples.lengths)]
    for k in range(updates):
        everywhere = [micro for step in steps for micro in step.minibatches[k]]
        real = [micro for micro in everywhere if not micro.is_idle]
        chosen = sorted(i for micro in real for i in micro.chosen)
        assert chosen == list(steps[0].parts[k])
        items = sum(counted[i] for i in chosen)
        trunk = sum(micro.trunk_tokens for micro in real)
        expected = Totals(max(1, items), len(chosen), trunk)
        assert [step.totals[k] for step in steps] == [expected] * ranks
        assert items == sum(micro.active_tokens for micro in everywhere)
        idle += len(everywhere) - len(real)
    assert idle > 0 or ranks < 4


def test_a_step_without_a_token_that_counts_moves_nothing():
    policy, batch = tiny_policy(), make_batch(torch.full((9,), math.nan))
    assert batch.totals[0].items == 1
    seen, found = gradients(policy, batch.minibatches[0], LossConfig(), totals=batch.totals[0])
    assert seen["loss"] == 0 and not any(gradient.any() for gradient in found.values())


# --------------------------------------------------------------------------------------- Advantages
RUNNING = ["advantages=baseline", "advantage_options.running=true"]


def test_the_mean_of_the_steps_before():
    baseline = RunningBaseline(value=0.25, decay=0.5)
    assert baseline.value == 0.25
    steps = ([1.0, 0.0], [float("nan"), 0.75], [float("nan")] * 2, [2.0, 2.0])
    seen = []
    for rewards in steps:
        baseline.update(torch.tensor(rewards))
        seen.append(baseline.value)
    assert seen == [0.5, 0.625, 0.625, 1.3125]
    for mode, options in (
        ("baseline", {"running": False, "value": 1.0}), ("baseline", {"value": 1.0}),
        ("centered", {}),
    ):  # fmt: skip
        assert split_options(mode, options)[1] is None
    # Without a constant the baseline is a running mean.
    assert split_options("baseline", {})[1].value == 0.0


def test_a_step_is_measured_by_those_before_it(tmp_path, spied):
    """Check that the running baseline of a step is computed only from the rewards of earlier steps.

    In the first step the baseline is the option `value`.
    """
    calls = spied(Advantages, "of")
    options = ["advantage_options.value=0.5", "advantage_options.decay=0.75", "steps=4"]
    sort(tmp_path / "a", *RUNNING, *options)
    expected, mean = 0.5, None
    for call in calls:
        rewards = call.args[1].double()
        torch.testing.assert_close(call.result.double(), rewards - expected, rtol=0, atol=1e-6)
        now = rewards.mean().item()
        expected = mean = now if mean is None else 0.75 * mean + 0.25 * now
    assert len(calls) == 4


def test_the_reward_belongs_to_the_last_token():
    """Check `token_rewards`. An empty completion has no token for its reward."""
    samples = table_of([[1]], [[7] * n for n in (3, 0, 2)])
    samples.rewards = torch.tensor([1.0, 2.0, math.nan])
    rows = [row.tolist() for row in token_rewards(samples).split(samples.lengths)]
    assert rows[:2] == [[0.0, 0.0, 1.0], []]
    assert rows[2][0] == 0 and math.isnan(rows[2][1])
    assert token_rewards(Samples.cat([samples, samples])[[3]]).tolist() == [0.0, 0.0, 1.0]


AGGREGATIONS = (
    "sequence_mean", "token_mean_local", "fixed_length", "token_mean_global", "sequence_sum",
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Save a tiny model of each of two families, and return their folders by family.

    The first has a scale of the logits, and the second a softcap.
    """
    root = tmp_path_factory.mktemp("models")
    return {family: tiny_folder(root / family, family) for family in ("granite", "gemma2")}


def moved(policy, by=0.05):
    """Add small random numbers to the weights of a policy, and return the policy."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in policy.trainable():
            p.add_(by * torch.randn(p.shape, generator=generator))
    return policy


def a_batch():
    """Return a batch of two prompts with three completions each.

    The fourth completion is truncated, and therefore masked.
    """
    rollout = rollout_of([(5, (2, 5, 3)), (3, (4, 1, 6))], cut=[3], vocabulary=250)
    advantages = torch.tensor([1.0, -0.5, -0.5, 0.3, 0.0, -0.3])
    return batch_of(rollout, advantages, mask_truncated=True)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_gradients_against_the_models_own_logits(folders, aggregation):
    """Check the loss and the gradients with an exact KL term against an fp64 reference.

    The reference is β · Σ w · KL − Σ w · A · logp with the token weights w and the advantages A. It
    uses the logits that the models compute without packing.
    """
    policy = load_policy(ModelConfig(path=folders["gemma2"]))
    reference = Reference(policy, ReferenceConfig(kind="frozen"))
    moved(policy)
    config = LossConfig(
        loss_type="reinforce", aggregation=aggregation, beta=0.3, kl_estimator="exact",
        temperature=0.8, max_completion_length=6,
    )  # fmt: skip
    step = a_batch()
    (batch,) = step.micro_batches
    batch.write("ref_hidden", reference.hidden(batch.packed))
    found = accumulate(policy, [batch], config, ref_head=reference.head).result()
    grads = {n: p.grad.clone() for n, p in policy.lm.named_parameters()}
    policy.lm.zero_grad()

    rollout, loss, term, kls = step.samples, 0.0, 0.0, []
    lengths = [0 if i == 3 else n for i, n in enumerate(rollout.lengths)]
    weights = oracles.token_weights(lengths, config, None, None)
    for i in (0, 1, 2, 4, 5):
        w = weights[i]
        texts = rollout.prompt_ids[i], rollout.completion_ids[i]
        lp = (logits_of(policy, *texts, with_graph=True).double() / 0.8).log_softmax(-1)
        q = (logits_of(reference.copy, *texts).double() / 0.8).log_softmax(-1)
        kl = (lp.exp() * (lp - q)).sum(-1)
        own = lp.gather(-1, torch.tensor(texts[1])[:, None]).sum()
        term = term - w * step.advantages[i].double() * own
        loss = loss + w * 0.3 * kl.sum()
        kls.append(kl.detach())
    (loss + term).backward()
    assert found["loss"] == pytest.approx((loss + term).item(), rel=1e-5)
    assert found["policy_loss"] == pytest.approx(term.item(), rel=1e-4, abs=1e-5)
    assert found["kl"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-5)
    for name, p in policy.lm.named_parameters():
        assert ((grads[name] - p.grad).norm() / p.grad.norm()).item() < 1e-4, name


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["whole", "adapter"])
@pytest.mark.parametrize("family", ["granite", "gemma2"])
def test_hidden_states_and_head_give_the_references_logps(folders, lora, family):
    policy = load_policy(ModelConfig(path=folders[family], lora=lora))
    reference = Reference(policy, ReferenceConfig(kind="frozen"))
    moved(policy)
    start = load_policy(ModelConfig(path=folders[family]))
    (batch,) = a_batch().micro_batches
    hidden, head = reference.hidden(batch.packed), reference.head
    assert hidden.shape[0] == len(batch.packed.target_ids) and not hidden.requires_grad
    z = head.logit_scale * hidden @ head.weight.T
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    lp = z.log_softmax(-1).gather(-1, batch.packed.target_ids[:, None])[:, 0]
    expected = start.logps(batch.packed).detach()
    torch.testing.assert_close(lp, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(reference.logps(batch.packed, 1.0), expected, rtol=0, atol=1e-5)


def test_a_reference_without_a_weight_reports_the_exact_kl(tmp_path):
    """Check that with β = 0 the exact KL is logged but changes neither loss nor gradient."""
    settings = ["optim.lr=1e-2", "reference.kind=frozen", "loss.kl_estimator=exact"]
    rows = sort(tmp_path / "a", *settings)
    plain = sort(tmp_path / "b", "optim.lr=1e-2")
    assert rows[0]["kl"] == 0 and rows[1]["kl"] > 0
    for one, other in zip(rows, plain, strict=True):
        assert all(one[name] == other[name] for name in ("loss", "grad_norm", "reward"))
