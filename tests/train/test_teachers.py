"""Tests of separate references and teachers: exact KL, divergences, both forms of `distill`."""

from types import SimpleNamespace

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.train.config import ModelConfig, ReferenceConfig
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.reference import Reference, load_another
from grpo_fast.train.update.precompute import teacher_advantages
from tests import oracles
from tests.rollout.vllm_stand_in import StandIn
from tests.tiny import tiny_folder
from tests.train.tiny_runs import sort
from tests.train.tiny_steps import accumulate, batch_of, logits_of, rollout_of, table_of

AGGREGATIONS = (
    "sequence_mean", "token_mean_local", "fixed_length", "token_mean_global", "sequence_sum",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Save three tiny models, and return their folders.

    The models are the policy, a model with the same vocabulary, and a model with a different
    vocabulary.
    """
    root = tmp_path_factory.mktemp("models")
    return (
        tiny_folder(root / "policy", "granite"),
        tiny_folder(root / "other", "gemma2", seed=3),
        tiny_folder(root / "stranger", "granite", vocab_size=290),
    )


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
    policy = moved(load_policy(ModelConfig(path=folders[0])))
    kind = ReferenceConfig(kind="frozen", path=folders[1])
    reference = Reference(policy, kind, load_another(kind, ModelConfig(path=folders[0]), policy))
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
@pytest.mark.parametrize("is_another", [False, True])
def test_hidden_states_and_head_give_the_references_logps(folders, lora, is_another):
    model = ModelConfig(path=folders[0], lora=lora)
    config = ReferenceConfig(kind="frozen", path=folders[1] if is_another else None)
    policy = load_policy(model)
    reference = Reference(policy, config, load_another(config, model, policy))
    moved(policy)
    start = load_policy(ModelConfig(path=config.path or folders[0]))
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


def test_a_reference_that_does_not_fit_the_policy_is_refused(folders, tmp_path):
    def refused(said, path, policy=None):
        model, config = ModelConfig(path=folders[0]), ReferenceConfig(kind="frozen", path=path)
        with pytest.raises(ValueError, match=f"reference.path: {said}"):
            load_another(config, model, policy or load_policy(model))

    refused(r"expected the policy's vocabulary of \d+ tokens, got \d+ tokens", folders[2])
    refused("expected a model.*nowhere", str(tmp_path / "nowhere"))
    swapped, short, padded = (load_policy(ModelConfig(path=folders[0])) for _ in range(3))
    vocabulary = swapped.tokenizer.get_vocab()
    one, other, *_ = vocabulary
    ids = {**vocabulary, one: vocabulary[other], other: vocabulary[one]}
    swapped.tokenizer = SimpleNamespace(get_vocab=lambda: ids)
    refused(".*and 2 of the policy's have a different id or none", folders[1], swapped)
    short.positions = 1000
    refused("expected a length limit of .* 1000 tokens", folders[1], short)
    padded.lm.resize_token_embeddings(320)
    refused("expected a head of 320 rows", folders[1], padded)


# ------------------------------------------------------------------------------------- Distillation
FROZEN, LR = "reference.kind=frozen", "optim.lr=1e-2"


def taught(folder, *overrides):
    return sort(folder, LR, *overrides)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train the student's initial model for two steps, and return its folder as a teacher."""
    folder = tmp_path_factory.mktemp("teacher")
    taught(folder / "run", "log.save_model=true", "steps=2")
    return folder / "run" / "model"


@pytest.mark.parametrize(
    ("estimator", "kind"), [("exact", "reverse_kl"), ("exact_reference_first", "forward_kl")]
)
def test_a_loss_of_the_teacher_is_the_exact_kl(tmp_path, trained, estimator, kind):
    reference = [FROZEN, f"reference.path={trained}"]
    kl = taught(tmp_path / "kl", *reference, "loss.beta=0.5", f"loss.kl_estimator={estimator}")
    own = taught(tmp_path / "own", f"distill.teacher={trained}", "distill.coef=0.5",
              f"distill.kind={kind}")  # fmt: skip
    assert kl[0]["kl"] > 0
    for one, other in zip(kl, own, strict=True):
        assert one["kl"] == other["divergence"]
        assert all(one[name] == other[name] for name in ("loss", "grad_norm", "reward"))


def test_the_teacher_alone(tmp_path, trained):
    """Check training on the divergence from the teacher alone (`distill.task=0`).

    The divergence must fall. If student and teacher are equal, it and its gradient must be 0.
    """
    near = [f"distill.teacher={trained}", "distill.task=0", "loss.entropy_coef=0", "steps=12"]
    rows = taught(tmp_path / "a", *near, "distill.kind=jsd", "distill.beta=0.3")
    assert rows[-1]["divergence"] < 0.5 * rows[0]["divergence"]
    itself = taught(tmp_path / "b", FROZEN, "distill={}", "distill.task=0", "loss.entropy_coef=0")
    assert all(row["divergence"] == 0 and row["grad_norm"] == 0 for row in itself)


def test_an_advantage_of_the_teacher(tmp_path, trained):
    rows = taught(tmp_path / "a", f"distill.teacher={trained}", *ADVANTAGE, "steps=15")
    assert rows[0]["kl"] > 0 and rows[-1]["kl"] < rows[0]["kl"]

    batch = batch_of(table_of([[3], [3]], [[4, 5], [6]]), torch.tensor([1.0, torch.nan]))
    batch.samples.ref_logps = torch.zeros(3)
    batch.samples.old_logps = torch.ones(3)
    assert teacher_advantages(batch, 0.5).tolist() == [0.5, 0.5, -0.5]


@pytest.fixture(scope="module")
def server(trained):
    """Start a simulated vLLM server that serves the teacher, and return the server."""
    made = StandIn(load_policy(ModelConfig(path=str(trained), device="cpu")))
    yield made
    made.stop()


ADVANTAGE = ["distill.form=advantage", "distill.task=0", "loss.entropy_coef=0"]
KINDS = {
    kind: ([f"distill.kind={kind}", "distill.task=0.5"], ["distill.topk=999"], "divergence")
    for kind in ("forward_kl", "reverse_kl", "jsd")
} | {"advantage": (ADVANTAGE, [], "kl")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_says_every_id_is_the_teacher_itself(tmp_path, trained, server, kind):
    words, every_id, name = KINDS[kind]
    own = taught(tmp_path / "own", f"distill.teacher={trained}", *words)
    said = taught(tmp_path / "said", f"distill.teacher={server.url}/", *words, *every_id)
    assert own[0][name] > 0
    for one, other in zip(own, said, strict=True):
        for each in ("loss", "grad_norm", "reward", name):
            assert one[each] == pytest.approx(other[each], rel=2e-4, abs=2e-6), each


def test_a_servers_topk_teaches(tmp_path, server):
    """Check that two tokens per position from a teacher server suffice to reduce the divergence.

    The step has several minibatches and micro-batches.
    """
    words = [f"distill.teacher={server.url}", "distill.topk=2", "distill.task=0", "steps=10",
             "loss.entropy_coef=0", "minibatches=2", "inner_iterations=2", "shuffle=completions",
             "tokens_per_microbatch=24"]  # fmt: skip
    rows = taught(tmp_path / "a", *words)
    assert rows[-1]["divergence"] < 0.6 * rows[0]["divergence"]
