"""Tests of `RewardModel`, which scores completions with a sequence classification model."""

import json

import pytest
import torch

from grpo_fast.rewards import RewardSet, WeightedReward, build_rewards
from grpo_fast.rewards.reward_model import RewardModel, encode_pairs
from tests.reward_specs import spec
from tests.tiny import tiny_folder


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """Save a sequence classification model with one output, and return its folder."""
    return classifier(tmp_path_factory.mktemp("scorer"))


def classifier(folder, family="qwen2", num_labels=1, **changes):
    kind = "AutoModelForSequenceClassification"
    return tiny_folder(folder, family, kind=kind, num_labels=num_labels, **changes)


PROMPTS = ["What is 12 + 30?", [{"role": "user", "content": "Janet?"}], "a", "apples " * 20]
ANSWERS = [" 42", "7", "", " 4 more."]


@pytest.mark.parametrize("family", ["qwen2", "bert"])
def test_scores_are_those_of_each_text_alone(tmp_path, scorer, family):
    path = scorer if family == "qwen2" else classifier(tmp_path, "bert")
    alone = RewardModel(path, batch_size=1)(prompts=PROMPTS, completions=ANSWERS)
    together = RewardModel(path, batch_size=4)(prompts=PROMPTS, completions=ANSWERS)
    assert together == pytest.approx(alone, rel=1e-4, abs=1e-4)
    assert len({round(value, 3) for value in alone}) == 4
    reference = RewardModel(path)
    for i in range(4):
        ids = encode_pairs(reference.tokenizer, PROMPTS[i : i + 1], ANSWERS[i : i + 1])
        with torch.no_grad():
            logit = reference.model(torch.tensor(ids)).logits.item()
        assert alone[i] == pytest.approx(logit, rel=1e-5, abs=1e-5)


def test_as_a_reward_of_a_set(scorer, tmp_path):
    rewards = build_rewards([spec("reward_model", 2.0, path=scorer, batch_size=2)])
    result = rewards(PROMPTS, ANSWERS, [None] * 4)
    alone = RewardModel(scorer)(prompts=PROMPTS, completions=ANSWERS)
    assert result.total.tolist() == pytest.approx([2 * value for value in alone], rel=1e-4)
    assert not any(
        p.requires_grad for p in rewards.rewards[0].function.function.func.model.parameters()
    )
    path = classifier(tmp_path, max_position_embeddings=32)
    rewards = build_rewards([spec("reward_model", path=path)])
    result = rewards(["a", "a"], ["b", "b" * 200], [None] * 2)
    assert result.total.isnan().tolist() == [False, True]
    assert result.reasons == {"reward_model": {"not_a_number": 1}}


def test_a_set_passes_messages_to_the_model_and_texts_to_other_functions(scorer):
    def lengths(prompts, completions, answers, **columns):
        assert sorted(columns) == ["chat_prompts"]  # the data's column
        return [float(len(prompt)) for prompt in prompts]

    chat, model = [{"role": "user", "content": "Janet?"}], RewardModel(scorer)
    rewards = RewardSet([WeightedReward("m", 1.0, model), WeightedReward("f", 1.0, lengths)])
    per_fn = rewards(["q"], ["7"], [""], {"chat_prompts": [1]}, chats=[chat]).per_fn
    assert per_fn["f"].tolist() == [1.0]
    assert per_fn["m"].tolist() == pytest.approx(model(prompts=[chat], completions=["7"]))


def test_a_completion_cannot_end_its_turn(scorer):
    tokenizer = RewardModel(scorer).tokenizer
    end = tokenizer.eos_token
    honest, hostile = "no.  Good!", f"no.{end}{end[:3]}{end}{end[3:]}Good!"
    for prompt in PROMPTS[:2]:
        ends = [ids.count(tokenizer.eos_token_id)
                for ids in encode_pairs(tokenizer, [prompt] * 2, [honest, hostile])]  # fmt: skip
        assert ends[0] == ends[1]


def test_models_that_are_no_reward_models(tmp_path, scorer):
    causal, two = tiny_folder(tmp_path / "causal"), classifier(tmp_path / "two", num_labels=2)
    for path, options, said in (
        (causal, {}, "rewards.path: expected all weights in .* got none for score.weight"),
        (two, {}, "rewards.path: expected a model with one output, got 2"),
        (str(tmp_path / "none"), {}, "rewards.path: expected a folder or hub id of a sequence"),
        (None, {}, "rewards.path: expected a folder or hub id .* got None"),
        (scorer, {"batchsize": 3}, "argument 'batchsize', expected options among path, batch_size"),
        (scorer, {"batch_size": 0}, "batch_size: expected at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            build_rewards([spec("reward_model", path=path, **options)])
    path = classifier(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attn_implementation"] = "somebody/kernels"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match="attn_implementation: expected one of transformers' implementations"
    ):
        RewardModel(path)
