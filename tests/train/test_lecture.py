"""The lecture's model against its formulas, its recipe learns; the notebook's with tiny GPT-2."""

import math

import pytest
import torch

from grpo_fast.attention import pack_groups
from grpo_fast.data import load_examples, task_symbols
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rewards import build_rewards
from grpo_fast.rewards.rules import sort_inclusion_ordering, sort_positions
from grpo_fast.rollout import generate
from grpo_fast.train import loop
from grpo_fast.train.config import ModelConfig
from grpo_fast.train.config.recipes import load_recipe
from grpo_fast.train.models.loading import load_policy
from grpo_fast.train.models.self_check import self_check
from tests.tiny import tiny_folder
from tests.train import tiny_runs
from tests.train.tiny_runs import logged

QUICK = ["log.progress=false", "log.save_model=false", "log.completions_every=0",
         "log.every_update=false", "eval.every=0"]  # fmt: skip


pytestmark = pytest.mark.usefixtures("no_pictures")


def make_policy(**sizes):
    config = ModelConfig(config={"model_type": "lecture", **sizes}, tokenizer="symbols")
    return load_policy(config, build_symbol_tokenizer(["0", "1", "2", "3", "4"]))


def lectures_logits(lm, prompts):
    """(N, P) → (N, places, V): the lecture's forward pass, word for word, in fp64."""
    weights = lm.model.embed_tokens.weight, lm.model.encode, lm.model.decode
    E, encode, decode = (x.detach().double() for x in weights)
    encoded = torch.einsum("npd,pdk->nk", E[prompts], encode)
    decoded = torch.einsum("nk,pkd->npd", encoded, decode)
    return torch.einsum("npd,vd->npv", decoded, E)[..., 2:]  # the five symbols


@pytest.mark.parametrize("shared", [True, False])
def test_the_models_logps_are_those_of_the_lectures_formulas(shared):
    policy = make_policy()
    generator = torch.Generator().manual_seed(3)
    prompts = torch.tensor([[3, 2, 4], [5, 4, 6], [3, 4, 5]])
    groups = [(p.tolist(), torch.randint(2, 7, (4, 3), generator=generator).tolist())
              for p in prompts]  # fmt: skip
    logps = policy.logps(pack_groups(groups, shared=shared)).reshape(3, 4, 3)
    z = lectures_logits(policy.lm, prompts).log_softmax(-1)
    for n, (_, completions) in enumerate(groups):
        for g, tokens in enumerate(completions):
            expected = z[n, range(3), torch.tensor(tokens) - 2]
            torch.testing.assert_close(logps[n, g].double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "sizes", [{}, {"prompt_length": 1, "response_length": 5}, {"prompt_length": 6}]
)
def test_packed_rows_agree_with_the_plain_forward_pass(sizes):
    assert self_check(make_policy(**sizes)) < 1e-4


def test_it_starts_as_the_lecture_starts():
    torch.manual_seed(0)
    model = make_policy(hidden_size=64, prompt_length=20).lm.model
    assert model.embed_tokens.weight.std().item() == pytest.approx(1.0, rel=0.1)
    for matrices in (model.encode, model.decode):
        assert matrices.std().item() == pytest.approx(64**-0.5, rel=0.05)
    small = make_policy(hidden_size=64, initializer_range=0.25).lm
    assert small.model.embed_tokens.weight.std().item() == pytest.approx(0.25, rel=0.1)
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert small.lm_head.bias.tolist() == [-100.0, -100.0] + [0.0] * 5


def test_responses_are_symbols_with_the_models_probabilities():
    policy = make_policy(initializer_range=0.3)
    options = load_recipe("lecture").rollout
    rollout = generate(policy, ["1 0 2", "3 2 4"], options, group_size=200, seed=1)
    assert set(rollout.lengths) == {3}
    assert not {0, 1} & {i for ids in rollout.completion_ids for i in ids}
    groups = [(rollout.prompt_ids[i], rollout.completion_ids[i : i + 200]) for i in (0, 200)]
    logps = policy.logps(pack_groups(groups))
    torch.testing.assert_close(torch.cat(rollout.sampling_logps), logps, rtol=0, atol=1e-5)
    p = lectures_logits(policy.lm, torch.tensor([[3, 2, 4]])).softmax(-1)[0]
    drawn = torch.tensor(rollout.completion_ids[:200]) - 2
    seen = torch.stack([(drawn == v).double().mean(0) for v in range(5)], dim=-1)
    assert (seen - p).abs().max() < 0.12
    # Padding on the left moves no position.
    policy = make_policy(prompt_length=2)
    options = load_recipe("lecture").rollout
    rollout = generate(policy, ["1 0 2", "3 2"], options, group_size=8, seed=1)
    groups = [(rollout.prompt_ids[i], rollout.completion_ids[i : i + 8]) for i in (0, 8)]
    logps = policy.logps(pack_groups(groups))
    torch.testing.assert_close(torch.cat(rollout.sampling_logps), logps, rtol=0, atol=1e-5)


def test_a_saved_model_comes_back(tmp_path):
    policy = make_policy()
    policy.save(tmp_path / "model")
    again = load_policy(ModelConfig(path=str(tmp_path / "model")))
    packed = pack_groups([([3, 2, 4], [[2, 3, 4], [4, 4, 2]])])
    assert torch.equal(policy.logps(packed), again.logps(packed))
    assert len(again.trainable()) == 3  # embedding, encode, decode: not the bias
    with pytest.raises(ValueError, match="lecture has no field prompt_lenght"):
        make_policy(prompt_lenght=3)


def run(folder, *overrides):
    loop.train(load_recipe("lecture", [*overrides, f"output_dir={folder}"]))
    return logged(folder)


def test_the_recipe_learns(tmp_path):
    lines = run(tmp_path / "run", *QUICK, "steps=24")
    rewards = [line["reward"] for line in lines if "reward" in line]
    assert sum(rewards[:3]) / 3 < 1.4 and min(rewards[-3:]) > 1.7
    assert lines[-1]["eval_reward"] > lines[0]["eval_reward"] + 0.4 and lines[-1]["eval_n"] == 3
    # the copy is taken after steps 10 and 20: the KL falls there
    kl = [line["kl"] for line in lines if "kl" in line]
    assert kl[10] < kl[9] and kl[20] < kl[19] and min(kl) >= 0


def test_the_lectures_points_and_prompts():
    """Included numbers + neighbours in order, of `1 0 2` and `3 2 4`; and their scaled twins."""
    given = {"answers": ["0 1 2"] * 3 + ["2 3 4"],
             "completions": ["0 1 2", "1 0 2", "0 0 1", "4 4 4"]}  # fmt: skip
    assert sort_inclusion_ordering(**given, scaled=False) == [5.0, 4.0, 4.0, 3.0]
    assert sort_inclusion_ordering(**given) == pytest.approx([2.0, 1.5, 5 / 3, 4 / 3])
    assert sort_positions(**given, scaled=False) == [3.0, 1.0, 1.0, 1.0]
    assert sort_positions(**given) == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3])
    data = load_recipe("lecture").data
    for split in ("train", "test"):
        found = [(e.prompt, e.answer) for e in load_examples(data, split=split, seed=5)]
        assert found == [("1 0 2", "0 1 2"), ("3 2 4", "2 3 4"), ("1 2 3", "1 2 3")]
    assert task_symbols(data) == ["0", "1", "2", "3", "4"]
    with pytest.raises(ValueError, match="data.chat: expected none, task lecture makes its own"):
        load_recipe("lecture", ["data.chat=true"])


# ------------------------- The notebook: open prompts, another reference, a summed ratio


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpt2")
    return [tiny_folder(root / name, "gpt2", seed=i) for i, name in enumerate(("policy", "other"))]


def run_notebook(folder, models, *overrides):
    settings = [f"model.path={models[0]}", f"reference.path={models[1]}", "steps=3",
                "optim.lr=1e-3", "rollout.max_new_tokens=8", "log.progress=false",
                "log.save_model=false"]  # fmt: skip
    return tiny_runs.run(folder, "notebook", *settings, *overrides)[1]


def test_learned_absolute_positions_of_the_notebook_are_packed_rightly(models):
    """A completion goes on where its prompt ends, in a shared row as in a row of its own."""
    policy = load_policy(ModelConfig(path=models[0]))
    assert self_check(policy) < 1e-4 and policy.positions == 512
    groups = [([5, 6, 7], [[8, 9], [10, 11, 12]]), ([20, 21], [[22, 23, 24], [25]])]
    one = policy.logps(pack_groups(groups, shared=True))
    torch.testing.assert_close(one, policy.logps(pack_groups(groups, shared=False)))


@pytest.mark.parametrize("estimator", ["k3", "exact", "exact_reference_first"])
def test_the_notebooks_recipe_with_tiny_models(tmp_path, models, estimator):
    rows = run_notebook(tmp_path / "a", models, f"loss.kl_estimator={estimator}")
    # another model from the first update on, and ratios that multiply over a completion's tokens
    assert rows[0]["kl"] > 0.01 and rows[0]["ratio/max"] > 1.0
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)


def test_the_notebooks_rewards_have_room(tmp_path, models):
    """They need no answer, and a tiny model learns to end its sentences."""
    config = load_recipe("notebook")
    examples = load_examples(config.data, split="train", seed=0)
    assert len(examples) == 8 and all(e.answer is None and e.solution is None for e in examples)
    texts = ["the cat the CAT", "One two three.", "", "  "]
    found = build_rewards(config.rewards)([""] * 4, texts, [None] * 4)
    assert found.total.tolist() == [0.5, 2.0, 0.0, 0.0] and not any(found.failures.values())
    rows = run_notebook(tmp_path, models, "steps=24", "optim.lr=3e-3")
    first, last = ([row["reward"] for row in part] for part in (rows[:4], rows[-4:]))
    assert sum(last) > sum(first) + 0.8
