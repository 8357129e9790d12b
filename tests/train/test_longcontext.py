"""Tests that memory options and ways of packing do not change the results of a step.

The last tests are about the long-context recipe, and about k-shot prompts with a token budget.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Linear

from benchmarks.trainers import step as bench_step
from benchmarks.trainers.step import make_problem
from grpo_fast import LossConfig, attention
from grpo_fast.attention import dispatch
from grpo_fast.data.prompts import question_key
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.train import loop
from grpo_fast.train.config import ModelConfig, ReferenceConfig, load_recipe
from grpo_fast.train.policy import Policy, Reference, apply_options, load_policy
from tests.data import test_data
from tests.data.test_data import write_lines
from tests.tiny import SYMBOLS, tiny_folder, tiny_model
from tests.train.runs import logged, questions
from tests.train.tiny_steps import batch_of, gradients, rollout_of

SHAPES = [(11, (9, 1, 4)), (5, (3, 7, 2))]


def loss_and_gradients(policy):
    batch = batch_of(rollout_of(SHAPES), torch.tensor([1.0, -1.0, 0.5, 2.0, -2.0, 1.5]))
    for micro in batch.micro_batches:
        generator = torch.Generator().manual_seed(0)
        logps = torch.randn(len(micro.packed.target_ids), generator=generator) - 3
        micro.write("old_logps", logps)
    policy.model.train()
    config = LossConfig(loss_type="grpo", compute_entropy=True)
    metrics, found = gradients(policy, batch.minibatches[0], config)
    return metrics["loss"], found


def fp64_policy(family="llama", **options):
    model = tiny_model(family, vocab_size=13, num_hidden_layers=3).double()
    apply_options(model, ModelConfig(path="x", **options))
    return Policy(model, build_symbol_tokenizer(SYMBOLS))


CHECKPOINTING = {"gradient_checkpointing": True}
OFFLOAD = {"gradient_checkpointing": "offload"}
OPTIONS = [CHECKPOINTING, OFFLOAD, {"tiled_mlp": 7}, {**OFFLOAD, "tiled_mlp": 5}]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o)))
def test_options_change_no_gradient(family, options):
    """Check that memory options of the model change neither the loss nor the gradients, in fp64."""
    loss, ours = loss_and_gradients(fp64_policy(family))
    other, theirs = loss_and_gradients(fp64_policy(family, **options))
    assert other == pytest.approx(loss, rel=1e-6)
    compare(theirs, ours, 1e-12)


def compare(found, expected, tolerance):
    """Check gradients within a tolerance, relative to the largest entry of each gradient."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        atol = tolerance * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=atol)


def test_options_are_in_force(spied):
    """Check that the memory options reduce or move the tensors that autograd saves.

    The tests that compare gradients would also pass if an option had no effect.
    """
    kept, moved = [], spied(torch.autograd.graph, "save_on_cpu")

    def saved(policy):
        kept.clear()
        hooks = lambda x: kept.append(x.numel()) or x, lambda x: x  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            loss_and_gradients(policy)
        return sum(kept)

    plain, every, tiled = (saved(fp64_policy(**o)) for o in ({}, OPTIONS[0], {"tiled_mlp": 7}))
    assert every < plain and tiled < plain and not moved
    loss_and_gradients(fp64_policy(**OPTIONS[1]))
    assert len(moved) == 3  # once per layer


@pytest.mark.parametrize("offload", [False, True])
def test_attention_may_be_chosen_inside_a_checkpointed_layer(offload):
    """Check that the attention kernel can be selected inside a checkpointed layer.

    The selection runs a self-test of the kernel when it first sees an input of a new kind.
    """
    dispatch.choose.cache_clear()
    policy = fp64_policy(gradient_checkpointing="offload" if offload else True)
    assert loss_and_gradients(policy)[1] and dispatch.choose.cache_info().misses == 1


def test_tiles_see_no_more_rows_than_asked_for():
    policy, seen = fp64_policy(tiled_mlp=7), []
    for layer in policy.lm.model.layers:
        rows = lambda _, args: seen.append(args[0].shape[-2])  # noqa: E731
        layer.mlp.down_proj.register_forward_pre_hook(rows)
    loss_and_gradients(policy)
    # The packed batch has 11 + 5 prompt rows and C − 1 rows for each completion of C tokens, in
    # total 36 rows. Each of the 3 layers computes its MLP twice, in the forward pass and again in
    # the backward pass.
    assert max(seen) == 7 and sum(seen) == 2 * 3 * 36
    with pytest.raises(ValueError, match="model.tiled_mlp: Linear has no dense MLP"):
        apply_options(torch.nn.Linear(2, 2), ModelConfig(path="x", tiled_mlp=4))


def owner(module):
    """Return the module whose `forward` a tiled MLP or a fast layer has replaced."""
    forward = module.forward
    return forward.__self__ if hasattr(forward, "__self__") else forward.args[-1]


def test_a_tile_repeats_its_dropout_in_the_backward_pass():
    """Check that a tiled MLP uses the same dropout mask in the forward and the backward pass.

    The backward pass computes each tile again. With identity weights and an input of ones, the
    output is the scaled mask, and so is the gradient of its sum.
    """

    class MLP(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.drop, self.down = Linear(6, 6), torch.nn.Dropout(0.5), Linear(6, 6)

        def forward(self, x):
            return self.down(self.drop(self.up(x)))

    model = torch.nn.ModuleDict({"mlp": MLP()})
    for linear in (model["mlp"].up, model["mlp"].down):
        torch.nn.init.eye_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    attention.tile_mlps(model, 4)
    x = torch.ones(12, 6, requires_grad=True)
    out = model["mlp"](x)
    out.sum().backward()
    assert set(out.flatten().tolist()) == {0.0, 2.0} and torch.equal(x.grad, out)


def test_a_reference_copy_keeps_its_own_tiled_mlps():
    policy = fp64_policy(tiled_mlp=3)
    reference = Reference(policy, ReferenceConfig(kind="frozen"))
    for module, twin in zip(policy.model.modules(), reference.copy.model.modules(), strict=True):
        if "forward" in vars(twin):
            assert owner(twin) is twin and owner(module) is module
    batch = batch_of(rollout_of(SHAPES), torch.zeros(6))
    before = reference.logps(batch.micro_batches[0].packed, 1.0)
    with torch.no_grad():
        policy.lm.model.layers[0].mlp.down_proj.weight.zero_()
    assert torch.equal(reference.logps(batch.micro_batches[0].packed, 1.0), before)


def test_lora_with_all_options_has_the_gradients_of_plain_lora(tmp_path):
    folder = tiny_folder(tmp_path / "base", "llama")
    results = []
    for options in ({}, OPTIONS[-1]):
        policy = load_policy(ModelConfig(path=folder, dtype="float32", lora={"r": 4}, **options))
        torch.manual_seed(0)
        for parameter in policy.trainable():  # LoRA's B starts at zero, so A would get no gradient
            torch.nn.init.normal_(parameter, std=0.1)
        results.append(loss_and_gradients(policy))
    (loss, ours), (other, theirs) = results
    assert other == pytest.approx(loss, rel=1e-5) and len(ours) == 28
    compare(theirs, ours, 1e-5)


# ------------------------------------------------------------- One step with three ways of batching
VOCAB = 512
NAMES = ("shared", "packed", "padded")


def options(lora=None):
    config = ModelConfig(path="x", device="cpu", lora=None if lora is None else {"r": lora})
    return SimpleNamespace(model=config)


def prepared(names, model, *given, **budget):
    """Build the providers. Only our own providers read `budget`."""
    return {
        name: bench_step.PROVIDERS[name](
            copy.deepcopy(model), *given, **({} if name == "padded" else budget)
        )
        for name in names
    }


@pytest.fixture(scope="module")
def problem():
    prompts = torch.randint(2, VOCAB, (2, 500), generator=torch.Generator().manual_seed(1)).tolist()
    return make_problem(prompts, group_size=4, longest=16, vocab=VOCAB)


@pytest.mark.parametrize(
    ("family", "budget", "lora"),
    [("llama", 1 << 40, None), ("qwen3", 700, None), ("llama", 700, 2)],
)
def test_shared_packed_and_padded_are_one_step(problem, family, budget, lora):
    """Check that a training step has the same results with three ways of batching, in fp32.

    The batch is padded, packed, or packed with shared prompts. Loss, gradients and metrics must
    agree to 1e-5.
    """
    model = tiny_model(family, vocab_size=VOCAB, max_position_embeddings=4096)
    providers = prepared(NAMES, model, problem, options(lora), budget=budget)
    shared, packed, padded = (providers[name].tokens for name in NAMES)
    assert 3 * shared < packed < padded
    errors = bench_step.verify(providers, problem, tolerance=1e-5)
    assert set(errors) == set(NAMES)
    for provider in providers.values():
        trained = [name for name, p in provider.model.named_parameters() if p.requires_grad]
        assert trained and all(("lora_" in name) == (lora is not None) for name in trained)


def test_a_wrong_step_is_not_timed(problem):
    model = tiny_model("llama", vocab_size=VOCAB, max_position_embeddings=4096)
    providers = prepared(("shared", "padded"), model, problem, options())
    with torch.no_grad():
        providers["shared"].policy.lm.model.layers[0].mlp.down_proj.weight[0, 0] += 1.0
    with pytest.raises(SystemExit, match="shared differs from padded"):
        bench_step.verify(providers, problem, tolerance=1e-5)


# -------------------------------------------------------------------------- Settings and the recipe
@pytest.mark.usefixtures("no_pictures")
def test_the_longcontext_recipe_trains_a_tiny_model(tmp_path):
    questions(tmp_path, test=0)
    model = tiny_folder(tmp_path / "tiny", "qwen2")
    config = load_recipe("gsm8k-longcontext", [
        f"model.path={model}", f"data.path={tmp_path}", "data.shots_tokens=220",
        "data.n_test=4", "rollout.max_new_tokens=4", "rollout.prompts_per_step=2", "steps=1",
        "log.progress=false", "model.autocast=null", "log.save_model=false", "model.tiled_mlp=64",
        "eval.n=2", f"output_dir={tmp_path / 'run'}",
    ])  # fmt: skip
    loop.train(config)
    row = logged(tmp_path / "run")[-1]
    # The batch has two groups of 16 samples. A group must contain its prompt of about 220 tokens
    # only once.
    assert 2 * 220 < row["num_tokens"] < 2 * 400
    # A longer question than that of the first prompt must not end a run in the middle.
    config.data.shots_tokens = 512 - 40
    config.output_dir = str(tmp_path / "again")
    with pytest.raises(ValueError, match="data.shots_tokens: expected at most .* a question of "):
        loop.train(config)


# --------------------------------------------------------------------- Prompts with worked examples
def words(text):
    return len(text.split())


def load(path, split="train", seed=0, **fields):
    return test_data.load(split, seed, "gsm8k", path=str(path), prompt_template="plain", **fields)


def questions_in(prompt):
    return [part.split("\nAnswer:")[0].strip() for part in prompt.split("Question: ")[1:]]


@pytest.fixture
def twins(tmp_path):
    """Write a data set with repeated questions, and return its folder.

    The third training question repeats the second one. The only test question repeats the fourth
    training question.
    """
    texts = ["One and one?", "Two and  two?", "two and two?", "Three and three?", "Five and five?"]
    lines = [{"question": text, "answer": f"It is {i}\n#### {i}"} for i, text in enumerate(texts)]
    write_lines(tmp_path / "train.jsonl", *lines)
    write_lines(tmp_path / "test.jsonl", {"question": "Three and three?", "answer": "#### 6"})
    return tmp_path


def test_draws_depend_on_seed_and_index_only(tmp_path):
    path = questions(tmp_path / "data")
    one, again, other = (load(path, seed=seed, shots_tokens=60) for seed in (0, 0, 1))
    assert one[5] == again[5] and one[5] == one[:6][5] == one[5 - len(one)]
    assert questions_in(one[5].prompt)[:-1] != questions_in(one[6].prompt)[:-1]
    same_question = next(i for i in range(len(other)) if other.examples[i] == one.examples[5])
    assert other[same_question].prompt != one[5].prompt
    first, second = (load(path, "test", seed=seed, shots_tokens=60)[3] for seed in (0, 1))
    assert first == second


def test_the_question_and_its_twins_never_leak(twins):
    for seed in range(20):
        examples = load(twins, seed=seed, shots_tokens=1000)
        for i in range(len(examples)):
            *shots, asked = (question_key(text) for text in questions_in(examples[i].prompt))
            assert asked not in shots and len(set(shots)) == len(shots) == 2
        asked = load(twins, "test", seed=seed, shots_tokens=1000)[0].prompt
        assert asked.count("Three and three?") == 1


def test_only_what_fits(twins):
    shot = words("Question: One and one?\nAnswer: It is 0\n#### 0")
    counts = [len(questions_in(e.prompt)) for e in load(twins, shots_tokens=2 * shot + 1)]
    assert counts == [3] * len(load(twins))
    with pytest.raises(ValueError, match="not one of 4 training examples fits into 3 tokens"):
        load(twins, shots_tokens=3)
    prompt = load(twins, shots_tokens=1000, chat=True, system_prompt="Be brief.")[0].prompt
    assert [m["role"] for m in prompt] == ["system", "user"]
    assert len(questions_in(prompt[1]["content"])) >= 3
