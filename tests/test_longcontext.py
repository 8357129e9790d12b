"""Options that make room change no result: loss and every gradient against the plain run; and the OOM fallback."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from grpo_fast import LossConfig
from grpo_fast.attention import dispatch
from grpo_fast.data.tokenizer import build_symbol_tokenizer
from grpo_fast.rollout import Rollout
from grpo_fast.train import loop, optimizer
from grpo_fast.train.batch import StepBatch
from grpo_fast.train.config import ModelConfig, OptimConfig, load_recipe
from grpo_fast.train.long_context import apply_options, freeze, tile_mlps
from grpo_fast.train.metrics import is_timing
from grpo_fast.train.optimizer import Optimizer, build_adam
from grpo_fast.train.policy import Policy, load_policy
from grpo_fast.train.reference import Reference
from grpo_fast.train.update import accumulate
from tests.tiny import tiny_folder, tiny_model

SYMBOLS = [*map(str, range(10)), "="]


def a_rollout(seed=0):
    """Two groups of three completions of 1 to 9 tokens after prompts of 11 and 5."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n):
        return torch.randint(2, 13, (n,), generator=generator).tolist()

    prompts = [p for n in (11, 5) for p in [ids(n)] * 3]
    completions = [ids(n) for n in (9, 1, 4, 3, 7, 2)]
    logps = [torch.randn(len(c), generator=generator) - 3 for c in completions]
    return Rollout(prompt_ids=prompts, completion_ids=completions, sampling_logps=logps, truncated=[False] * 6)


def loss_and_gradients(policy, seed=0):
    rollout = a_rollout(seed)
    batch = StepBatch(rollout, torch.tensor([1.0, -1.0, 0.5, 2.0, -2.0, 1.5]), group_size=3, minibatches=1,
                      budget=10**6, device="cpu")  # fmt: skip
    for micro in batch.micro_batches:
        micro.old_logps = micro.sampling_logps
    policy.model.train()
    config = LossConfig(loss_type="grpo", compute_entropy=True)
    seen = accumulate(policy, batch.minibatches[0], config, correct_sampling=False, validate="full")
    gradients = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    return seen.losses.result()["loss"], gradients


def fp64_policy(family="llama", **options):
    model = tiny_model(family, vocab_size=13, num_hidden_layers=3).double()
    apply_options(model, ModelConfig(path="x", **options))
    return Policy(model, build_symbol_tokenizer(SYMBOLS))


OPTIONS = [
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "checkpoint_every": 2},
    {"gradient_checkpointing": True, "checkpoint_offload": True},
    {"gradient_checkpointing": True, "checkpoint_every": 2, "checkpoint_offload": True},
    {"tiled_mlp": 7},
    {"tiled_mlp": 5, "gradient_checkpointing": True, "checkpoint_offload": True},
]


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o)))
def test_options_change_no_gradient(family, options):
    """Asserted in fp64: the loss and every gradient within 1e-12 of the plain run's."""
    loss, gradients = loss_and_gradients(fp64_policy(family))
    other, theirs = loss_and_gradients(fp64_policy(family, **options))
    assert other == pytest.approx(loss, rel=1e-6) and gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-12, atol=1e-12 * float(gradient.abs().max()))


def test_options_are_in_force(monkeypatch):
    """Equal gradients alone would also come from options that do nothing."""
    kept, moved = [], []
    pack = torch.autograd.graph.save_on_cpu

    def counting(*args, **kwargs):
        moved.append(1)
        return pack(*args, **kwargs)

    def saved(policy):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            loss_and_gradients(policy)
        return sum(kept)

    monkeypatch.setattr("torch.autograd.graph.save_on_cpu", counting)
    plain, second, every, tiled = (
        saved(fp64_policy(**o)) for o in ({}, OPTIONS[1], OPTIONS[0], {"tiled_mlp": 7})
    )  # fmt: skip
    assert every < second < plain and tiled < plain and not moved
    loss_and_gradients(fp64_policy(**OPTIONS[3]))
    assert len(moved) == 2  # layers 0 and 2 of three


@pytest.mark.parametrize("offload", [False, True])
def test_attention_may_be_chosen_inside_a_checkpointed_layer(offload):
    """The kernel's self-test runs when a kind of input is first seen; here that is under the checkpoint's hooks."""
    dispatch.choose.cache_clear()
    policy = fp64_policy(gradient_checkpointing=True, checkpoint_offload=offload)
    assert loss_and_gradients(policy)[1] and dispatch.choose.cache_info().misses == 1


def test_tiles_see_no_more_rows_than_asked_for():
    policy, seen = fp64_policy(tiled_mlp=7), []
    for layer in policy.lm.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[-2]))
    loss_and_gradients(policy)
    # T = 11 + 5 + Σ(C − 1) = 36 rows; each tile runs once forward and once more for its backward
    assert max(seen) == 7 and sum(seen) == 2 * 3 * 36
    with pytest.raises(ValueError, match="model.tiled_mlp: Linear has no dense MLP"):
        tile_mlps(torch.nn.Linear(2, 2), 4)


def test_a_reference_copy_keeps_its_own_tiled_mlps():
    policy = fp64_policy(tiled_mlp=3)
    reference = Reference(policy, SimpleNamespace(kind="frozen"))
    for module, twin in zip(policy.model.modules(), reference.copy.model.modules(), strict=True):
        if "forward" in vars(twin):
            assert twin.forward.__self__ is twin and module.forward.__self__ is module
    rollout = a_rollout()
    batch = StepBatch(rollout, torch.zeros(6), group_size=3, minibatches=1, budget=10**6, device="cpu")
    before = reference.logps(batch.micro_batches[0].packed, 1.0)
    with torch.no_grad():
        policy.lm.model.layers[0].mlp.down_proj.weight.zero_()
    assert torch.equal(reference.logps(batch.micro_batches[0].packed, 1.0), before)


def test_frozen_weights_get_no_gradient_and_change_no_other():
    _, gradients = loss_and_gradients(fp64_policy("llama"))
    for options in ({}, {"gradient_checkpointing": True, "tiled_mlp": 6}):
        _, rest = loss_and_gradients(
            fp64_policy("llama", frozen=["*embed_tokens*", "lm_head*", "*layers.0.*"], **options)
        )
        assert rest and not [name for name in rest if "embed" in name or "lm_head" in name or "layers.0" in name]
        for name, gradient in rest.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-12, atol=1e-12)
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="model.frozen: no parameter matches 'lm_heads'"):
        freeze(model, ["lm_heads"])
    with pytest.raises(ValueError, match="leave no parameter"):
        freeze(model, ["*"])


def test_lora_with_all_options_has_the_gradients_of_plain_lora(tmp_path):
    folder = tiny_folder(tmp_path / "base", "llama")
    results = []
    for options in ({}, {"gradient_checkpointing": True, "checkpoint_offload": True, "tiled_mlp": 6}):
        torch.manual_seed(0)
        policy = load_policy(ModelConfig(path=folder, dtype="float32", lora={"r": 4}, **options))
        for number, parameter in enumerate(policy.trainable()):  # B starts at zero: nothing would flow into A
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
        results.append(loss_and_gradients(policy))
    (loss, gradients), (other, theirs) = results
    assert other == pytest.approx(loss, rel=1e-5) and gradients.keys() == theirs.keys() and len(gradients) == 28
    for name, gradient in gradients.items():
        torch.testing.assert_close(theirs[name], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


# Optimizer states ----------------------------------------------------------------------------------------------------


def test_states_that_need_a_package_name_it(monkeypatch):
    weights = [torch.nn.Parameter(torch.ones(3))]
    monkeypatch.setattr(optimizer, "optional", lambda *_: None)
    for states, message in (("8bit", "8bit needs torchao or bitsandbytes"), ("offload", "offload needs torchao")):
        with pytest.raises(ValueError, match=rf"optim.states: {message} \(pip install torchao\)"):
            build_adam(weights, OptimConfig(states=states))
    monkeypatch.setattr(optimizer, "optional", lambda *_: torch.optim.AdamW)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match="offload moves states from an accelerator"):
        build_adam(weights, OptimConfig(states="offload"))


def test_an_optimizer_that_keeps_its_rate_in_a_tensor(monkeypatch):
    """torchao's contract: the rate is a tensor, filled in place."""

    class TensorRate(torch.optim.SGD):
        def __init__(self, parameters, lr, betas, eps, weight_decay):
            super().__init__(parameters, lr=torch.tensor(lr))
            self.rate = self.param_groups[0]["lr"]

        def step(self):
            assert self.param_groups[0]["lr"] is self.rate
            return super().step()

    monkeypatch.setattr(optimizer, "optional", lambda *_: TensorRate)
    weight = torch.nn.Parameter(torch.zeros(1))
    stepper = Optimizer([weight], OptimConfig(states="8bit", lr=1.0, schedule="linear", max_grad_norm=9.0), 4)
    for expected in (-1.0, -1.75):
        weight.grad = torch.ones(1)
        stepper.step()
        assert weight.item() == expected


# Out of memory -------------------------------------------------------------------------------------------------------

TINY_SORT = ["model.config.hidden_size=32", "model.config.intermediate_size=64", "data.n_test=16", "steps=3",
             "rollout.prompts_per_step=4", "rollout.group_size=4", "log.progress=false", "log.save_model=false",
             "loss.beta=0.05", "reference.kind=frozen", "optim.lr=0.01"]  # fmt: skip


def sort_run(folder, *overrides):
    loop.train(load_recipe("sort", [*TINY_SORT, *overrides, f"output_dir={folder}"]))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not is_timing(k)} for line in lines if "loss" in line]


GPU_ERROR = torch.OutOfMemoryError("CUDA out of memory.")
CPU_ERROR = RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory")


@pytest.fixture
def no_room(monkeypatch):
    """`no_room(fails)` makes the k-th call of the trunk run out of memory when `fails(k, tokens)`."""
    monkeypatch.setattr("grpo_fast.train.report.plot_runs", lambda *_: None)
    original, calls = Policy.hidden, []

    def install(fails, error=GPU_ERROR):
        def hidden(self, packed):
            calls.append(packed.layout.total)
            states = original(self, packed)
            if fails(len(calls), packed.layout.total):
                raise error
            return states

        monkeypatch.setattr(Policy, "hidden", hidden)
        return calls

    return install


def lowered_budget(folder):
    return json.loads((folder / "summary.json").read_text())["tokens_per_microbatch"]


@pytest.mark.parametrize("error", [GPU_ERROR, CPU_ERROR], ids=["cuda", "cpu"])
@pytest.mark.parametrize(
    ("room", "overrides"), [(40, []), (24, ["inner_iterations=2", "minibatches=2"])], ids=["once", "reused"]
)
@pytest.mark.parametrize("where", ["anywhere", "with gradients"])
def test_out_of_memory_halves_the_budget_and_starts_the_step_again(
    tmp_path, no_room, caplog, error, room, overrides, where
):
    """The run equals, bit for bit, one with the lower budget from its start: nothing is counted twice."""
    every = where == "anywhere"  # otherwise the old logps were computed in the larger micro-batches already
    no_room(lambda call, tokens: tokens > room and (every or torch.is_grad_enabled()), error)
    with caplog.at_level(logging.WARNING, "grpo_fast"):
        lowered = sort_run(tmp_path / "lowered", *overrides, "tokens_per_microbatch=80")
    budget, lines = lowered_budget(tmp_path / "lowered"), [r.message for r in caplog.records if "lowered" in r.message]
    assert 10 < budget <= room
    assert lines == [f"out of memory: tokens_per_microbatch lowered to {budget} ({error})"]
    assert sort_run(tmp_path / "lower", *overrides, f"tokens_per_microbatch={budget}") == lowered


def test_out_of_memory_between_micro_batches_forgets_the_gradients_so_far(tmp_path, no_room):
    """The second micro-batch of the first backward pass fails, after the first has left gradients."""
    options = ["reference.kind=none", "loss.beta=0"]
    calls = no_room(lambda call, tokens: call == 3)  # the self-check, then the first micro-batch, then the second
    lowered = sort_run(tmp_path / "lowered", *options, "tokens_per_microbatch=50")
    budget = lowered_budget(tmp_path / "lowered")
    assert budget < calls[1] and max(calls[1:3]) // 2 == budget and max(calls[3:]) <= budget
    assert sort_run(tmp_path / "lower", *options, f"tokens_per_microbatch={budget}") == lowered


def test_out_of_memory_later_keeps_the_old_logps(tmp_path, no_room):
    """In the second pass the weights behind the old logps are gone, so the logps are handed on, not computed again."""
    options = ["inner_iterations=2", "reference.kind=none", "loss.beta=0", "steps=1", "tokens_per_microbatch=400"]
    whole = sort_run(tmp_path / "whole", *options)
    calls = no_room(lambda call, tokens: call == 4)  # self-check, old logps, first pass, second pass
    lowered = sort_run(tmp_path / "lowered", *options)
    assert len(calls) > 5 and max(calls[4:]) <= calls[3] // 2
    for name in ("loss", "grad_norm", "approx_kl", "ratio/max", "policy_loss"):
        assert lowered[0][name] == pytest.approx(whole[0][name], rel=1e-4, abs=1e-6), name
    assert whole[0]["approx_kl"] > 0


def test_one_completion_that_does_not_fit_ends_the_run(tmp_path, no_room):
    no_room(lambda call, tokens: call > 1)
    with pytest.raises(ValueError, match="tokens_per_microbatch: one completion with its prompt .* does not fit"):
        sort_run(tmp_path / "run")


def test_other_errors_are_not_taken_for_out_of_memory(tmp_path, no_room):
    no_room(lambda call, tokens: call == 2, RuntimeError("shape mismatch"))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        sort_run(tmp_path / "run")


# Settings ------------------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_share_falls_back_with_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("grpo_fast.train.report.plot_runs", lambda *_: None)
    packed = sort_run(tmp_path / "packed", "shared_prompt=false")
    monkeypatch.setattr("grpo_fast.train.policy.shared_prompt_supported", lambda _: "rope_type: 'some'")
    with caplog.at_level(logging.WARNING, "grpo_fast"):
        fallen_back = sort_run(tmp_path / "back")
    assert fallen_back == packed
    assert [r.message for r in caplog.records] == [
        "every completion gets its own copy of the prompt: rope_type: 'some'"
    ]


def test_shared_prompts_are_the_default_and_change_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_fast.train.report.plot_runs", lambda *_: None)
    shared, packed = sort_run(tmp_path / "shared"), sort_run(tmp_path / "packed", "shared_prompt=false")
    assert shared[0]["num_tokens"] < packed[0]["num_tokens"]
    for a, b in zip(shared, packed, strict=True):
        for name in ("loss", "grad_norm", "reward", "kl", "policy_loss", "completions/mean_length"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=2e-6), name


def test_the_longcontext_recipe_trains_a_tiny_model(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_fast.train.report.plot_runs", lambda *_: None)
    lines = [{"question": f"Tom has {i} apples, then {i + 1} more. Sum?", "answer": f"{i} + {i + 1}\n#### {2 * i + 1}"}
             for i in range(30)]  # fmt: skip
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = tiny_folder(tmp_path / "tiny", "qwen2")
    config = load_recipe("gsm8k-longcontext", [
        f"model.path={model}", "data.name=null", f"data.path={tmp_path}", "data.shots_tokens=220", "data.n_test=4",
        "rollout.max_new_tokens=4", "rollout.prompts_per_step=2", "steps=1", "log.progress=false",
        "model.autocast=null", "log.save_model=false", "model.tiled_mlp=64", "eval.n=2",
        f"output_dir={tmp_path / 'run'}",
    ])  # fmt: skip
    summary = loop.train(config)
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 2 * 220 < row["num_tokens"] < 2 * 400  # two groups of 16, each with one copy of its long prompt
    assert summary["largest_microbatch"] == row["num_tokens"] and summary["predicted_memory"] > 0
