"""Tests of the reference and of the exact KL to it."""

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.train.config import ModelConfig, ReferenceConfig
from grpo_fast.train.policy import Reference, load_policy
from tests import oracles
from tests.tiny import tiny_folder
from tests.train.tiny_runs import sort
from tests.train.tiny_steps import accumulate, batch_of, logits_of, rollout_of

AGGREGATIONS = (
    "sequence_mean", "token_mean_local", "fixed_length", "token_mean_global", "sequence_sum",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_pictures")


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
