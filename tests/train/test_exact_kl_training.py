"""`kl_estimator: exact` and `reference.path`: value, gradient, kinds of reference, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.rollout import Rollout
from grpo_fast.train.config import ModelConfig, ReferenceConfig
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.reference import Reference, load_another
from grpo_fast.train.update.batch import StepBatch
from grpo_fast.train.update.gradients import accumulate
from tests.tiny import tiny_folder
from tests.train.test_ppo_step import weight_by_hand
from tests.train.tiny_runs import sort

AGGREGATIONS = (
    "sequence_mean", "token_mean_local", "fixed_length", "token_mean_global", "sequence_sum",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, another model of its vocabulary, and one of another vocabulary."""
    root = tmp_path_factory.mktemp("models")
    return (
        tiny_folder(root / "policy", "granite"),
        tiny_folder(root / "other", "gemma2", seed=3),
        tiny_folder(root / "stranger", "granite", vocab_size=290),
    )


def moved(policy, by=0.05):
    """The policy a little away from where it started."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in policy.trainable():
            p.add_(by * torch.randn(p.shape, generator=generator))
    return policy


def a_batch(policy, budget=10**6):
    """Two prompts, three completions each; the fourth was cut off and does not count."""
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(2, 250, (n,), generator=generator).tolist()

    lengths, prompts = (2, 5, 3, 4, 1, 6), [ids(5)] * 3 + [ids(3)] * 3
    rollout = Rollout(
        prompt_ids=prompts, completion_ids=[ids(n) for n in lengths],
        truncated=[i == 3 for i in range(6)],
        sampling_logps=[torch.zeros(n) for n in lengths],
    )  # fmt: skip
    advantages = torch.tensor([1.0, -0.5, -0.5, 0.3, 0.0, -0.3])
    return StepBatch(
        rollout, advantages, group_size=3, minibatches=1, budget=budget, device=policy.device,
        mask_truncated=True,
    )  # fmt: skip


def logits_of(policy, prompt, completion, temperature):
    """(|completion|, V) fp64 final logits by the model's own forward pass, without packing."""
    with policy.generation(), torch.enable_grad():
        out = policy.lm(torch.tensor([prompt + completion]), use_cache=False).logits[0]
    return out[len(prompt) - 1 : -1].double() / temperature


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_and_gradients_against_the_models_own_logits(folders, aggregation):
    """β·Σ w·KL + Σ w·(−A·lp), prompt by prompt, by autograd through the unpacked model."""
    policy = moved(load_policy(ModelConfig(path=folders[0])))
    kind = ReferenceConfig(kind="frozen", path=folders[1])
    reference = Reference(policy, kind, load_another(kind, ModelConfig(path=folders[0]), policy))
    config = LossConfig(
        loss_type="reinforce", aggregation=aggregation, beta=0.3, kl_estimator="exact",
        temperature=0.8, max_completion_length=6,
    )  # fmt: skip
    step = a_batch(policy)
    (batch,) = step.micro_batches
    batch.ref_hidden = reference.hidden(batch.packed)
    found = accumulate(
        policy, [batch], config, correct_sampling=False, validate="full", ref_head=reference.head
    ).result()
    grads = {n: p.grad.clone() for n, p in policy.lm.named_parameters()}
    policy.lm.zero_grad()

    rollout, loss, term, kls = step.rollout, 0.0, 0.0, []
    lengths = [0 if cut else len(c) for c, cut in zip(rollout.completion_ids, rollout.truncated,
                                                      strict=True)]  # fmt: skip
    for i, length in enumerate(lengths):
        if not length:
            continue
        w = weight_by_hand(aggregation, length, sum(lengths), len(lengths), 6)
        texts = rollout.prompt_ids[i], rollout.completion_ids[i]
        lp = logits_of(policy, *texts, 0.8).log_softmax(-1)
        q = logits_of(reference.copy, *texts, 0.8).log_softmax(-1).detach()
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


def kinds(folders, tmp_path):
    start = ModelConfig(path=folders[0])
    lora = ModelConfig(path=folders[0], lora={"r": 4})
    return {
        "frozen": (start, ReferenceConfig(kind="frozen")),
        "adapter": (lora, ReferenceConfig(kind="frozen")),
        "path": (start, ReferenceConfig(kind="frozen", path=folders[1])),
        "adapter and path": (lora, ReferenceConfig(kind="frozen", path=folders[1])),
    }


@pytest.mark.parametrize("kind", ["frozen", "adapter", "path", "adapter and path"])
def test_hidden_states_and_head_give_the_references_logps(folders, tmp_path, kind):
    model, config = kinds(folders, tmp_path)[kind]
    policy = load_policy(model)
    reference = Reference(policy, config, load_another(config, model, policy))
    moved(policy)
    start = load_policy(ModelConfig(path=config.path or folders[0]))
    (batch,) = a_batch(policy).micro_batches
    hidden, head = reference.hidden(batch.packed), reference.head
    assert hidden.shape[0] == len(batch.packed.target_ids) and not hidden.requires_grad
    z = head.logit_scale * hidden @ head.weight.T
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    lp = z.log_softmax(-1).gather(-1, batch.packed.target_ids[:, None])[:, 0]
    expected = start.logps(batch.packed).detach()
    torch.testing.assert_close(lp, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(reference.logps(batch.packed, 1.0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "shape"), [("ref_hidden", (4,)), ("teacher", (3, 2))])
def test_packing_again_hands_on_what_a_teacher_said(folders, name, shape):
    policy = load_policy(ModelConfig(path=folders[0]))
    step = a_batch(policy)
    (batch,) = step.micro_batches
    setattr(batch, name, torch.randn(len(batch.packed.target_ids), *shape))
    step.has_fixed = True
    before = dict(zip(batch.chosen, batch.packed.split(getattr(batch, name)), strict=True))
    step.pack(9, keep_fixed=True)
    assert len(step.micro_batches) > 2
    for micro in step.micro_batches:
        for i, rows in zip(micro.chosen, micro.packed.split(getattr(micro, name)), strict=True):
            assert torch.equal(rows, before[i])


EXACT = ["loss.beta=0.5", "loss.kl_estimator=exact", "optim.lr=1e-2"]


def test_a_run_with_a_synced_reference(tmp_path):
    """Copied after every second step: the next step begins at it, so its first pass has no KL."""
    synced = ["reference.kind=synced", "reference.sync_every=2", "reference.mixing=1"]
    rows = sort(tmp_path / "a", *EXACT, *synced, "steps=5")
    assert [row["kl"] > 1e-9 for row in rows] == [False, True, False, True, False]
    assert rows == sort(tmp_path / "b", *EXACT, *synced, "steps=5")
    several = sort(tmp_path / "c", *EXACT, *synced, "steps=2", "inner_iterations=2")
    assert several[0]["kl"] > 1e-9


def test_a_reference_without_a_weight_reports_the_exact_kl(tmp_path):
    """β = 0: the gradient is that of the policy term alone, the KL is reported."""
    settings = ["optim.lr=1e-2", "reference.kind=frozen", "loss.kl_estimator=exact"]
    rows = sort(tmp_path / "a", *settings)
    plain = sort(tmp_path / "b", "optim.lr=1e-2")
    assert rows[0]["kl"] == 0 and rows[1]["kl"] > 0
    for one, other in zip(rows, plain, strict=True):
        assert all(one[name] == other[name] for name in ("loss", "grad_norm", "reward"))


def test_a_reference_with_another_vocabulary_is_refused(folders, tmp_path):
    policy = load_policy(ModelConfig(path=folders[0]))
    config = ReferenceConfig(kind="frozen", path=folders[2])
    wanted = r"reference.path: expected the policy's vocabulary of \d+ tokens, got one of \d+"
    with pytest.raises(ValueError, match=wanted):
        load_another(config, ModelConfig(path=folders[0]), policy)
    gone = ReferenceConfig(kind="frozen", path=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"reference.path: expected a model.*nowhere"):
        load_another(gone, ModelConfig(path=folders[0]), policy)


def test_a_vocabulary_of_the_same_size_with_other_ids_is_refused(folders):
    policy = load_policy(ModelConfig(path=folders[0]))
    vocabulary = policy.tokenizer.get_vocab()
    one, other, *_ = vocabulary
    swapped = {**vocabulary, one: vocabulary[other], other: vocabulary[one]}
    policy.tokenizer = SimpleNamespace(get_vocab=lambda: swapped)
    config = ReferenceConfig(kind="frozen", path=folders[1])
    with pytest.raises(ValueError, match="where 2 of the policy's have no or another id"):
        load_another(config, ModelConfig(path=folders[0]), policy)


def test_a_reference_with_too_little_room_or_another_head_is_refused(folders, tmp_path):
    policy = load_policy(ModelConfig(path=folders[0]))
    config = ReferenceConfig(kind="frozen", path=folders[1])
    policy.positions = 1000
    with pytest.raises(ValueError, match="reference.path: expected room for .* 1000 tokens"):
        load_another(config, ModelConfig(path=folders[0]), policy)
    padded = load_policy(ModelConfig(path=folders[0]))
    padded.lm.resize_token_embeddings(320)
    with pytest.raises(ValueError, match="reference.path: expected a head of 320 rows"):
        load_another(config, ModelConfig(path=folders[0]), padded)


@pytest.mark.parametrize("kind", ["none", "synced"])
def test_a_path_needs_a_frozen_reference(kind):
    with pytest.raises(ValueError, match=f"path: expected .*frozen.*{kind}"):
        ReferenceConfig(kind=kind, path="somewhere")
