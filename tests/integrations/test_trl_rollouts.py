"""Tests of the rollouts of FastGRPOTrainer: greedy tokens, fallbacks, seeds and tools."""

import importlib
import logging
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

trl = pytest.importorskip("trl", minversion="1.16")
cases = importlib.import_module("tests.integrations.trl_cases")
tools = importlib.import_module("tests.integrations.trl_cases")
fast = importlib.import_module("grpo_fast.integrations.trl.trainer")

OURS = {"forward": "packed", "loss": "single pass", "rollouts": "ours"}
GREEDY = {"generation_kwargs": {"do_sample": False}}
CHATS = [{"prompt": [{"role": "user", "content": text}]} for text in cases.prompts(8)]
ENDS = list(range(1, 130))  # end tokens: half of the vocabulary, so that lengths differ


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    return tools.train_caller(tmp_path_factory.mktemp("trl") / "caller")


def build(cls: type, path: str, output: Any, **options: Any) -> Any:
    """Build a trainer that samples completions from its model.

    The attribute `drawn` of the trainer records the prompts and completions of each call, and
    `seen` records the batches.
    """
    ends = options.pop("ends", None)
    made = cases.trainer(cls, path, output, **options)
    del made._generate_single_turn
    if ends is not None:
        made.eos_token_ids = ends
        made.generation_config.eos_token_id = ends
    made.drawn, inner = [], made._generate_single_turn

    def turn(prompts: Any, *args: Any, **more: Any) -> Any:
        found = inner(prompts, *args, **more)
        made.drawn.append([[*map(list, prompts)], [*map(list, found[0])]])
        return found

    made._generate_single_turn = turn
    made.seen, score = [], made._generate_and_score_completions
    made._generate_and_score_completions = lambda x: made.seen.append(score(x)) or made.seen[-1]
    return made


def run(cls: type, path: str, output: Any, **options: Any) -> Any:
    trainer = build(cls, path, output, **options)
    trainer.train()
    if options.get("evaluation"):
        trainer.evaluate()
    return trainer


def both(path: str, output: Any, **options: Any) -> list[Any]:
    """Train with `GRPOTrainer` and with `FastGRPOTrainer`, and return both trainers."""
    return [run(cls, path, output, **options) for cls in (trl.GRPOTrainer, fast.FastGRPOTrainer)]


GREEDY_RUNS = [
    {},
    {"ends": ENDS, "max_completion_length": 12},
    {"ends": ENDS, "mask_truncated_completions": True, "max_completion_length": 3},
    {"ends": [1, 0], "max_completion_length": 40},  # the padding token 0 is an end token, too
    {"ends": ENDS, "evaluation": True, "num_generations_eval": 2},
    {"ends": ENDS, "num_iterations": 2, "gradient_accumulation_steps": 2,
     "steps_per_generation": 4, "per_device_train_batch_size": 2, "max_steps": 5},
    {"gradient_checkpointing": True, "ends": ENDS},
    {"lora": {}, "beta": 0.1},
    {"bf16": True, "ends": ENDS},
    {"dtype": torch.bfloat16, "cast_lm_head_to_fp32": True},
    {"pad_to_multiple_of": 8, "ends": ENDS},
    {"data": CHATS},
]  # fmt: skip
# With each of these sampling settings only one token is possible. The log-probabilities and the
# entropy must still be computed over the full vocabulary.
ONE_TOKEN = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1, "temperature": 0.7}]
SAMPLED = {"generation_kwargs": None, "evaluation": True, "beta": 0.05, "num_iterations": 2}


@pytest.mark.parametrize(
    "options",
    [*GREEDY_RUNS, *({**x, **SAMPLED} for x in ONE_TOKEN)],
    ids=lambda x: "-".join(x) or "plain",
)
def test_runs_without_chance_are_trls(model_path, tmp_path, options):
    given = {**GREEDY, "learning_rate": 0.5, "max_steps": 3, **options}
    theirs, ours = both(model_path, tmp_path, **given)
    assert ours.fast_path == OURS
    assert ours.drawn == theirs.drawn
    assert options in GREEDY_RUNS or theirs.state.log_history[0]["entropy"] > 1
    if options.get("ends") == ENDS:
        assert len({len(ids) for _, found in ours.drawn for ids in found}) > 1
    bars = (0.02, 5e-3) if options.keys() & {"bf16", "dtype"} else (1e-4, 1e-5)
    cases.compare_logs(theirs.state.log_history, ours.state.log_history, *bars)
    modes = [
        [x.is_gradient_checkpointing, x.config.use_cache, *(m.training for m in x.modules())]
        for x in (ours.model, theirs.model)
    ]
    assert modes[0] == modes[1]


def test_seed_step_and_turn_decide_the_tokens(model_path, tmp_path, monkeypatch):
    """Check that the tokens also depend on the rank, and not on torch's global random state."""

    def drawn(**options: Any) -> list:
        made = {"max_steps": 3, "evaluation": True, "learning_rate": 0.0, **options}
        return run(fast.FastGRPOTrainer, model_path, tmp_path, **made).drawn

    first = drawn()
    assert drawn() == first
    assert drawn(seed=8) != first
    trainer = build(fast.FastGRPOTrainer, model_path, tmp_path)
    prompts, state = [[5, 6, 7]] * 4, torch.get_rng_state()
    turns = [trainer._generate_single_turn(prompts, None, {}, 4)[0] for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), state)
    assert turns[0] != turns[1] != turns[2]
    trainer.state.global_step = 1
    assert trainer._generate_single_turn(prompts, None, {}, 4)[0] not in turns
    trainer.state.global_step = 0
    trainer._drawn_at = None
    monkeypatch.setattr(type(trainer.accelerator), "process_index", 1)
    assert trainer._generate_single_turn(prompts, None, {}, 4)[0] not in turns


REASONS = [
    ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
    ({"generation_kwargs": {"num_beams": 2}}, "num_beams=2"),
    ({"generation_kwargs": {"no_repeat_ngram_size": 2}}, "no_repeat_ngram_size=2"),
    ({"generation_kwargs": {"typical_p": 0.9}}, "typical_p=0.9"),
    ({"generation_kwargs": {"suppress_tokens": [5]}}, "suppress_tokens=[5]"),
    ({"generation_kwargs": {"min_new_tokens": 3}}, "min_new_tokens=3"),
    ({"generation_kwargs": {"guidance_scale": 0}}, "guidance_scale=0"),
    ({"generation_kwargs": {"eos_token_id": 5}}, "eos_token_id=5"),
    ({"generation_kwargs": {"temperature": 1e-7}}, "temperature"),
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ({"torch_compile": True}, "torch_compile"),
]


@pytest.mark.parametrize(("options", "reason"), REASONS, ids=lambda x: x if type(x) is str else "")
def test_what_our_sampler_does_not_read_is_named(model_path, tmp_path, caplog, options, reason):
    trainer = build(fast.FastGRPOTrainer, model_path, tmp_path, **options)
    trainer.model.train()
    with caplog.at_level(logging.WARNING):
        trainer._unsuited or trainer._record("rollouts", str(trainer._sampling()))
    assert trainer.fast_path["rollouts"].startswith("TRL's: ")
    assert reason in trainer.fast_path["rollouts"], trainer.fast_path
    assert reason in caplog.text or trainer._unsuited


def test_the_models_own_generation_config_counts(model_path, tmp_path):
    """Check that the model's generation config fills in None values of the trainer's config."""
    trainer = build(fast.FastGRPOTrainer, model_path, tmp_path)
    trainer.model.generation_config.min_p = 0.25
    assert trainer._sampling().min_p == 0.25
    trainer.model.generation_config.top_h = 0.5
    assert "top_h=0.5" in trainer._sampling()


@pytest.mark.parametrize("how", ["attribute", "generate"])
def test_trls_way_is_trls_to_the_bit(model_path, tmp_path, how):
    """Check that TRL samples if `fast_rollouts` is False or if `generate` was replaced.

    `generate` must run with the original attention of the model.
    """
    pair, attention = [], []
    for cls in (trl.GRPOTrainer, fast.FastGRPOTrainer):
        trainer = build(cls, model_path, tmp_path, max_steps=1)
        if how == "attribute" and cls is fast.FastGRPOTrainer:
            trainer.fast_rollouts = False
        if how == "generate":
            trainer.model.generate = lambda *a, m=trainer.model, f=trainer.model.generate, **k: (
                attention.append(m.config._attn_implementation) or f(*a, **k)
            )
        pair.append(trainer)
        trainer.train()
    theirs, ours = pair
    assert ours.drawn == theirs.drawn and set(attention) <= {"sdpa"}
    ours.fast_rollouts = False
    assert ours._sampling() == fast.OFF
    ours.fast_rollouts = True
    assert (type(ours._sampling()) is not str) == (how == "attribute")
    said = {"attribute": "fast_rollouts is False", "generate": "model.generate is not"}[how]
    assert said in ours.fast_path["rollouts"]
    cases.compare_logs(theirs.state.log_history, ours.state.log_history, 1e-4, 1e-6)


LATER = "a forward hook was added after the trainer was built"
OTHERS = "model.generate is not transformers' own"


@pytest.mark.parametrize("options", [{}, {"lora": {}}], ids=["plain", "lora"])
def test_a_changed_model_is_sampled_by_trl(model_path, tmp_path, options, monkeypatch):
    """Check that TRL samples while a new hook is registered or `generate` is replaced."""
    trainer = build(fast.FastGRPOTrainer, model_path, tmp_path, **options)
    for name in ("", "lm_head", "model.layers.0"):
        module = trainer._lm.get_submodule(name)
        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            with register(lambda *_: None):
                assert trainer._sampling() == LATER
            assert not isinstance(trainer._sampling(), str)
    for owner in (vars(trainer.model), vars(trainer._lm)):
        with monkeypatch.context() as patch:
            patch.setitem(owner, "generate", lambda **given: given["input_ids"])
            assert trainer._sampling() == OTHERS
        assert not isinstance(trainer._sampling(), str)
    monkeypatch.setattr(type(trainer._lm), "generate", lambda *_, **__: None)
    assert trainer._sampling() == OTHERS


def test_a_prompt_without_a_token_is_trls_error(model_path, tmp_path):
    classes = trl.GRPOTrainer, fast.FastGRPOTrainer
    theirs, ours = (build(cls, model_path, tmp_path, max_steps=1) for cls in classes)
    assert isinstance(ours._sampling(), fast.Sampling)
    with pytest.raises(Exception) as error:  # noqa: PT011
        theirs._generate_single_turn([[], []], None, {}, 1)
    with pytest.raises(type(error.value)):
        ours._generate_single_turn([[], []], None, {}, 1)
    assert ours.fast_path["rollouts"] == "TRL's: a prompt has no token"


ABSOLUTE = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0},
}


@pytest.mark.parametrize("family", ABSOLUTE)
def test_our_loop_samples_for_models_with_absolute_positions(tmp_path, family):
    """Check that greedy runs draw TRL's tokens if dropout is off.

    TRL samples with dropout. Its `disable_dropout` does not change the dropout of OPT.
    """
    if family == "opt" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("OPT of transformers 5.17 builds a padding mask, so TRL's forward pass is used")
    path = cases.folder(tmp_path / family, family, **ABSOLUTE[family])
    options = {"disable_dropout": True, "ends": ENDS, "num_iterations": 2, "max_steps": 3}
    theirs, ours = both(path, tmp_path, **options, **GREEDY)
    assert ours.fast_path["rollouts"] == "ours" and ours.drawn == theirs.drawn
    assert ours.fast_path["forward"] == "packed"
    for name in ("clip_ratio/region_mean", "frac_reward_zero_std"):
        logged = [[entry.get(name) for entry in x.state.log_history] for x in (ours, theirs)]
        assert logged[0] == logged[1]


def test_lora_dropout_is_off_while_it_samples(model_path, tmp_path):
    options = {"lora": {"lora_dropout": 0.5, "init_lora_weights": False}, "max_steps": 1}
    trainer = build(fast.FastGRPOTrainer, model_path, tmp_path, **options, **GREEDY)
    assert trainer.fast_path["rollouts"] == "ours"
    trainer.model.train()
    (ids,), _ = trainer._generate_single_turn([[5, 6, 7]], None, {}, 1)
    assert trainer.model.training
    trainer.model.eval()
    logits = trainer.model(input_ids=torch.tensor([[5, 6, 7, *ids]])).logits[0, 2:-1]
    assert logits.argmax(-1).tolist() == ids


TOOLS = {"tools": [tools.multiply]}
CONVERSATION = {"data": [{"prompt": tools.QUESTION}] * 4, "max_completion_length": 120,
                "num_iterations": 2}  # fmt: skip


@pytest.mark.parametrize("more", [TOOLS, {"environment_factory": tools.Calculator}], ids=list)
def test_a_calculator_is_called_in_turns(caller, tmp_path, more):
    options = {**CONVERSATION, **GREEDY, "learning_rate": 1e-3, "more": more}
    theirs, ours = both(caller, tmp_path, **options)
    assert ours.fast_path["rollouts"] == "ours"
    for a, b in zip(theirs.seen, ours.seen, strict=True):
        assert torch.equal(a["completion_ids"], b["completion_ids"])
        assert torch.equal(a["tool_mask"], b["tool_mask"]) and b["tool_mask"].min() == 0
    assert ours.state.log_history[0]["tools/call_frequency"] == 1
    cases.compare_logs(theirs.state.log_history, ours.state.log_history, 1e-4, 1e-5)
