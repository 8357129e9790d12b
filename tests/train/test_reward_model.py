"""Reward models: the loss, the pairs, the saved model as a reward, and all of it in one chain."""

import json
import math
import random
from types import SimpleNamespace

import pytest
import torch

from grpo_fast.data import DatasetError, Example, load_examples
from grpo_fast.data.pairs import Pair, pairs_of
from grpo_fast.data.tokenizer import build_bpe_tokenizer
from grpo_fast.rewards import build_rewards
from grpo_fast.rewards.reward_model import RewardModel, encode_pairs
from grpo_fast.train.config.recipes import load_settings
from grpo_fast.train.config.reward_model import RewardModelConfig
from grpo_fast.train.evaluation.evaluate import mean_and_error
from grpo_fast.train.experiments.reward_model import bradley_terry, collate, train_reward_model
from tests.command_line import invoke, refused
from tests.data.test_data import write_lines
from tests.reward_specs import spec
from tests.tiny import TEXTS, tiny_folder
from tests.train.tiny_runs import logged, sort

TINY = ["model.config.hidden_size=32", "model.config.intermediate_size=64", "batch_size=32",
        "model.config.num_hidden_layers=1", "progress=false", "data.n_test=64"]  # fmt: skip


pytestmark = pytest.mark.usefixtures("no_pictures")


def train(folder, *words):
    recipe = "reward-model-sort"
    config = load_settings(RewardModelConfig, recipe, [*TINY, *words, f"output_dir={folder}"])
    return train_reward_model(config)


# ----------------------------------------------------------------------------------------- The loss
@pytest.mark.parametrize("center", [0.0, 0.3])
def test_bradley_terry_in_fp64(center):
    """From the papers: −log of the probability 1/(1 + e^−(r_c − r_r − m)), one pair at a time."""
    generator = random.Random(0)
    chosen, rejected, margin = ([generator.uniform(-3, 3) for _ in range(7)] for _ in range(3))
    losses = [
        -math.log(1 / (1 + math.exp(-(c - r - m)))) + center * (c + r) ** 2
        for c, r, m in zip(chosen, rejected, margin, strict=True)
    ]
    columns = [torch.tensor(v, dtype=torch.float64) for v in (chosen, rejected, margin)]
    assert bradley_terry(*columns, center).item() == pytest.approx(sum(losses) / 7, rel=1e-12)
    fp32 = bradley_terry(*(c.float() for c in columns), center).item()
    assert fp32 == pytest.approx(sum(losses) / 7, rel=1e-6)


def test_bradley_terry_does_not_overflow():
    far = [torch.tensor([x]) for x in (-300.0, 300.0, 0.0)]
    assert bradley_terry(*far).item() == 600


# ---------------------------------------------------------------------------------------- The pairs
@pytest.mark.parametrize("task", ["sort", "arithmetic"])
def test_made_pairs_have_more_right_in_the_chosen_answer(task):
    examples = load_examples(SimpleNamespace(task=task, digits=3), split="train", seed=0)
    pairs = pairs_of(examples, list("0123456789="), seed=0)
    assert len(pairs) == len(examples)
    perfect = cut = 0
    for i in range(400):
        pair, answer = pairs[i], examples[i].answer.split()
        right = [sum(a == b for a, b in zip(text.split(), answer, strict=False))
                 for text in pair[1:3]]  # fmt: skip
        assert pair.prompt == examples[i].prompt and right[0] > right[1] and pair.margin == 0
        perfect += pair.chosen == examples[i].answer
        cut += len(pair.rejected.split()) < len(answer)
    assert 40 < perfect < 380 and 40 < cut < 200
    assert pairs[7] == pairs_of(examples, list("0123456789="), seed=0)[7]
    assert pairs[7] != pairs_of(examples, list("0123456789="), seed=1)[7]


def test_pairs_of_a_file(tmp_path):
    line = {"prompt": "p", "chosen": "a", "rejected": "", "margin": 2, "other": 1}
    path = write_lines(tmp_path / "d.jsonl", *({**line, "prompt": f"p{i}"} for i in range(10)))
    examples = load_examples(SimpleNamespace(task="jsonl", path=str(path)), split="train", seed=0)
    pairs = pairs_of(examples, None, seed=0)
    assert len(pairs) == 9 and {pair[1:] for pair in pairs} == {("a", "", 2.0)}
    for bad, said in (
        ({"chosen": None}, "a text in field 'chosen', got None"),
        ({"rejected": ["x"]}, "a text in field 'rejected', got"),
        ({"margin": "1"}, "a finite number in field 'margin', got '1'"),
        ({"margin": True}, "got True"),
    ):
        with pytest.raises(DatasetError, match=said):
            pairs_of([Example("question", None, None, {**line, **bad})], None, seed=0)


def test_a_batch_holds_the_chosen_texts_first():
    tokenizer = build_bpe_tokenizer(TEXTS, 300)
    pairs = [Pair("What is 12?", " 42", " 7", 0.5), Pair("Janet", " has", " has 3 apples")]
    batch = collate(pairs, tokenizer, tokenizer.pad_token_id)
    texts = tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
    assert texts == ["What is 12? 42", "Janet has", "What is 12? 7", "Janet has 3 apples"]
    lengths = batch["attention_mask"].sum(1)
    ends = batch["input_ids"][torch.arange(4), lengths - 1]
    assert (ends == tokenizer.eos_token_id).all() and batch["margin"].tolist() == [0.5, 0.0]


# -------------------------------------------------------------------------------------- As a reward
@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """A random model with one output, of a size that shows what it is given."""
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
    assert not any(p.requires_grad for p in rewards.rewards[0].function.model.parameters())
    path = classifier(tmp_path, max_position_embeddings=32)
    rewards = build_rewards([spec("reward_model", path=path)])
    result = rewards(["a", "a"], ["b", "b" * 200], [None] * 2)
    assert result.total.isnan().tolist() == [False, True]
    assert result.reasons == {"reward_model": {"not_a_number": 1}}


def test_models_that_are_no_reward_models(tmp_path, scorer):
    causal, two = tiny_folder(tmp_path / "causal"), classifier(tmp_path / "two", num_labels=2)
    for path, options, said in (
        (causal, {}, "rewards.path: expected all weights in .* got none for score.weight"),
        (two, {}, "rewards.path: expected a model with one output, got 2"),
        (str(tmp_path / "none"), {}, "rewards.path: expected a folder or hub id of a sequence"),
        (None, {}, "reward_model: path: expected a folder"),
        (scorer, {"batchsize": 3}, "unexpected|expected options among batch_size, device"),
        (scorer, {"batch_size": 0}, "batch_size: expected at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=said):
            build_rewards([spec("reward_model", path=path, **options)])
    path = classifier(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attn_implementation"] = "somebody/kernels"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="attn_implementation: expected one of transformers' own"):
        RewardModel(path)
    recipe = [f"model={{path: {tmp_path}}}", f"output_dir={tmp_path / 'out'}"]
    assert refused(invoke("reward-model", "reward-model-sort", *recipe), "transformers' own")


# ----------------------------------------------------------------------------------------- Training
def test_training_on_a_file_from_a_causal_model(tmp_path):
    """A folder's model gets an output; what it learns is saved with its tokenizer."""
    lines = [{"prompt": f"What is {i}?", "chosen": f" {i}", "rejected": " apples"}
             for i in range(40)]  # fmt: skip
    data = f"data={{task: jsonl, path: {write_lines(tmp_path / 'd.jsonl', *lines)}}}"
    start = f"model={{path: {tiny_folder(tmp_path / 'start')}}}"
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"output_dir: {tmp_path / 'out'}\n")
    words = [start, data, "steps=30", "batch_size=16", "optim.lr=0.001", "progress=false"]
    result = invoke("reward-model", str(recipe), *words)
    assert result.exit_code == 0, result.output
    assert "held-out pairs: 100.0% ± 0.0 in the right order (n=4" in result.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["eval_margin"] > 0 and summary["steps"] == 30
    lines = logged(tmp_path / "out")
    assert [line["step"] for line in lines] == [*range(1, 31), 30]
    score = RewardModel(str(tmp_path / "out" / "model"))
    right, wrong = score(prompts=["What is 3?"] * 2, completions=[" 3", " apples"])
    assert right > wrong
    again = load_settings(RewardModelConfig, str(tmp_path / "out" / "config.yaml"))
    assert again.model.path == str(tmp_path / "start")


def test_the_accuracy_is_that_of_the_saved_model(tmp_path):
    summary = train(tmp_path / "a", "steps=20")
    data = SimpleNamespace(task="sort", digits=4, symbols=10, n_test=64)
    examples = load_examples(data, split="test", seed=9)
    pairs = [*pairs_of(examples, [*map(str, range(10)), "="], seed="test")]
    score, prompts = RewardModel(str(tmp_path / "a" / "model")), [pair.prompt for pair in pairs]
    chosen = score(prompts=prompts, completions=[pair.chosen for pair in pairs])
    rejected = score(prompts=prompts, completions=[pair.rejected for pair in pairs])
    right = [float(c > r) for c, r in zip(chosen, rejected, strict=True)]
    share = sum(right) / 64
    assert summary["eval_accuracy"] == share and 0.5 < share < 1 and summary["eval_n"] == 64
    assert summary["eval_accuracy_se"] == pytest.approx(math.sqrt(share * (1 - share) / 63))
    assert summary["eval_accuracy_se"] == mean_and_error(right)[1]
    assert train(tmp_path / "b", "steps=20")["train_loss"] == summary["train_loss"]
    model = f"{{name: reward_model, path: {tmp_path / 'a' / 'model'}}}"
    (first, *_) = sort(tmp_path / "policy", f"rewards=[{model}]", "data.digits=4", "steps=1")
    assert first["grad_norm"] > 0 and first["rewards/reward_model/failed"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.task=gsm8k", "data.path=x"], "data.task: expected sort, arithmetic or jsonl"),
        (["data.task=lecture"], "data.task: expected sort, arithmetic or jsonl, got lecture"),
        (["optim.states=8bit"], "optim.states: expected full, got 8bit"),
        (["model.path=x"], "model.path: expected exactly one of path"),
        (["model.tokenizer=null"], "model.tokenizer=none conflicts with config"),
        (["model.config={hidden_size: 3}"], "model.config.model_type: expected one"),
        (["optim.lrr=1"], "optim.lrr: unknown key; nearest: lr"),
        (["model.config.hidden_sizes=3"], "llama has no field hidden_sizes"),
        (["model.config.max_position_embeddings=4"], "data: expected at most 4 tokens"),
        (["data={task: jsonl, path: no.jsonl}"], "data.path: expected"),
    ],
)
def test_refusals(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert refused(invoke("reward-model", "reward-model-sort", *words), said)
    assert not (tmp_path / "runs").exists()
