"""Tests of FastGRPOTrainer on single micro-batches: packing, fallbacks, wrapped models."""

import functools
import importlib
import logging
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

trl = pytest.importorskip("trl", minversion="1.16")
peft = importlib.import_module("peft")
transformers = importlib.import_module("transformers")
cases = importlib.import_module("tests.integrations.trl_cases")
fast = importlib.import_module("grpo_fast.integrations.trl.trainer")
options_module = importlib.import_module("grpo_fast.integrations.trl.options")
packed = importlib.import_module("grpo_fast.integrations.trl.packed")


PACKED = {"forward": "packed", "loss": "single pass"}


def build(path: str, output: Any, cls: type = fast.FastGRPOTrainer, **options: Any) -> Any:
    """Build a trainer, and prepare it for a direct call of `_compute_loss`."""
    made = cases.trainer(cls, path, output, **options)
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made


def micro_batch(**changes: Any) -> dict[str, Any]:
    """Return a micro-batch of four completions of two prompts. `changes` replaces tensors by name.

    One prompt is padded, and one completion is empty.
    """
    random = torch.Generator().manual_seed(5)
    short, long = [0, 0, 11, 12, 13], [21, 22, 23, 24, 25]
    prompt_ids = torch.tensor([short, long, short, long])
    completion_ids = torch.randint(2, 200, (4, 6), generator=random)
    completion_mask = torch.ones(4, 6, dtype=torch.int64)
    completion_mask[1, 3:] = completion_mask[3] = 0
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": (prompt_ids != 0).long(),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.0, -0.5, -1.2, 0.3]),
        "num_items_in_batch": completion_mask.sum(),
    }
    return batch | changes


def gradients(trainer: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a micro-batch, and its gradients by parameter name."""
    trainer.model.zero_grad(set_to_none=True)
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    found = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    return loss.item(), {name: gradient.clone() for name, gradient in found.items()}


def same_gradients(ours: tuple, theirs: tuple) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4, abs=1e-6)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def compared(
    path: str, output: Any, batch: Any = None, *, mixin: type = object, **options: Any
) -> Any:
    """Check that `GRPOTrainer` and `FastGRPOTrainer` compute the same loss and gradients.

    The class `mixin` is the first base class of both trainers.

    Returns:
        Our trainer.
    """
    found = []
    for base in (trl.GRPOTrainer, fast.FastGRPOTrainer):
        cls = base if mixin is object else type(base.__name__, (mixin, base), {})
        trainer = build(path, output, cls, **options)
        found.append(gradients(trainer, batch or micro_batch()))
    same_gradients(*reversed(found))
    return trainer


def test_a_shared_prompt_is_packed_once():
    batch = micro_batch()
    pairs = ([batch[f"prompt_{x}"], batch[f"completion_{x}"]] for x in ("ids", "mask"))
    ids, mask = (torch.cat(pair, 1) for pair in pairs)
    result = packed.pack_padded(ids, mask, batch["completion_mask"])
    # Rows 0 and 2 share the prompt [11, 12, 13], which is packed once. Row 1 has a different
    # prompt. Row 3 has no scored token and is not packed.
    assert result.inputs["input_ids"].shape[1] == 3 + 5 + 5 + (5 + 2)
    assert result.order.tolist() == [0, 2, 1, 3]
    assert result.cu_seqlens.tolist() == [0, 6, 12, 15, 15]
    assert result.packed(batch["advantages"]).tolist() == batch["advantages"][[0, 2, 1, 3]].tolist()
    tokens = result.packed(batch["completion_ids"])
    assert torch.equal(tokens, result.target_ids)
    assert torch.equal(result.padded(tokens), batch["completion_ids"] * batch["completion_mask"])


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
@pytest.mark.parametrize("empty", ["completions", "prompt"])
def test_fast_path_with_empty_prompts_or_completions(model_path, tmp_path, spied, empty, loss_type):
    batch = micro_batch()
    if empty == "prompt":
        batch["prompt_mask"][0] = 0
    else:
        batch["completion_mask"][:] = 0
    theirs = gradients(build(model_path, tmp_path, trl.GRPOTrainer, loss_type=loss_type), batch)
    ours = build(model_path, tmp_path, loss_type=loss_type)
    before = dict(ours.fast_path)
    padded = spied(trl.GRPOTrainer, "_get_per_token_logps_and_entropies")
    same_gradients(gradients(ours, batch), theirs)
    assert before["forward"] == "packed" and len(padded) == (empty == "prompt")
    if empty == "completions":
        assert ours.fast_path == before
        return
    assert "TRL's: a completion of this micro-batch has no prompt" in ours.fast_path["forward"]
    assert ours.fast_path["loss"].startswith("TRL's")
    gradients(ours, micro_batch())
    assert ours.fast_path == before and len(padded) == 1


# Positions where a mask leaves out a token that a subclass or a custom rollout does not want.
MASKED = {
    "first": ("completion_mask", 0, 0), "middle": ("completion_mask", 2, 3),
    "prompt": ("prompt_mask", 1, 2), "right_padded_prompt": ("prompt_mask", 1, -1),
}  # fmt: skip


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
@pytest.mark.parametrize("case", MASKED)
def test_holes_in_a_mask_are_trls(model_path, tmp_path, caplog, case, loss_type):
    name, row, column = MASKED[case]
    batch = micro_batch(ref_per_token_logps=torch.full((4, 6), -4.0))
    batch[name][row, column] = 0
    with caplog.at_level(logging.WARNING):
        ours = compared(model_path, tmp_path, batch, loss_type=loss_type, beta=0.1)
    assert "a mask of this micro-batch leaves out a token" in ours.fast_path["forward"]
    assert ours.fast_path["loss"].startswith("TRL's")
    assert caplog.text.count("leaves out a token") == 1
    gradients(ours, micro_batch(ref_per_token_logps=torch.full((4, 6), -4.0)))
    assert ours.fast_path["forward"] == "packed"


def missing(*_: Any, **__: Any) -> None:
    raise AttributeError("no attribute is_moved")


MOVED = "AttributeError: no attribute is_moved"
# What a new release of TRL may move, and why TRL then computes the forward pass and the loss.
NEW_RELEASES = {
    "options.forward_reason": (missing, f"TRL's: trl {trl.__version__}: {MOVED}"),
    "options.single_pass": (missing, f"TRL's on our logps: trl {trl.__version__}: {MOVED}"),
    "options.probe": (missing, f"TRL's on our logps: trl {trl.__version__}: {MOVED}"),
    "head.KERNEL": ("gone", f"TRL's: trl {trl.__version__}: ValueError: trl: expected ['gone'] in"),
}


@pytest.mark.parametrize("name", NEW_RELEASES)
def test_what_a_new_release_moves_is_trls(model_path, tmp_path, monkeypatch, caplog, name):
    value, reason = NEW_RELEASES[name]
    monkeypatch.setattr(f"grpo_fast.integrations.trl.{name}", value)
    path = compared(model_path, tmp_path).fast_path
    assert path["loss"].startswith(reason)
    assert ("TRL's LM head is used" in caplog.text) == (name == "head.KERNEL")
    on_logps = reason.startswith("TRL's on")
    assert path["forward"] == ("packed" if on_logps else path["loss"])


def test_one_token_per_completion_with_advantages_per_token(model_path, tmp_path):
    """Check advantages per token in a batch with as many scored tokens as completions.

    The number of advantages then does not tell whether they belong to tokens or to completions.
    """
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0]])
    batch = micro_batch(completion_ids=torch.arange(12).view(4, 3) + 40, completion_mask=mask)
    batch |= {"advantages": torch.linspace(-1, 1, 12).view(4, 3), "num_items_in_batch": mask.sum()}
    ours = compared(model_path, tmp_path, batch)
    assert ours.fast_path["forward"] == "packed"
    assert ours.fast_path["loss"].startswith("TRL's on our logps: advantages per token, and this")
    gradients(ours, micro_batch())
    assert ours.fast_path.items() >= PACKED.items()


def test_mixed_precision_casts_no_logps(model_path, tmp_path, one_process, spied):
    """Check that old logps stay in fp32, although FSDP2 casts float arguments of a forward pass.

    A cast to bf16 would change the old logps by 1%.
    """
    trainer, mesh = build(model_path, tmp_path), init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (trainer.model.lm_head, trainer.model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    calls = spied(packed, "linear_grpo_loss")
    batch = micro_batch(old_per_token_logps=torch.linspace(-7, -4, 24).view(4, 6))
    trainer._compute_loss(trainer.model, batch).backward()
    (hidden, weight, _), given = calls[0].args, calls[0].options
    assert hidden.dtype == weight.dtype == torch.bfloat16
    assert set(given["advantages"].tolist()) == set(batch["advantages"].tolist())
    old_logps = set(given["old_logps"].tolist())
    assert old_logps <= set(batch["old_per_token_logps"].flatten().tolist())


GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
PREFIX = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
# For each reason why TRL computes the forward pass: the model's family, changes of its config, and
# options of the trainer. `disable_dropout` of TRL changes only dropout modules.
REASONS: dict[str, tuple[str, dict, dict]] = {
    "peft: prompt learning changes the inputs": ("llama", {}, {"more": {"peft_config": PREFIX}}),
    "torch_compile: our forward is not compiled": ("llama", {}, {"torch_compile": True}),
    "neftune_noise_alpha: noise is scaled": ("llama", {}, {"neftune_noise_alpha": 5.0}),
    "attention dropout: LlamaAttention.attention_dropout is 0.1": (
        "llama", {"attention_dropout": 0.1}, {"disable_dropout": True}),
    "attention dropout: GPT2Attention.attn_dropout is 0.1": ("gpt2", GPT2, {}),
    "rope_type: 'dynamic' depends on the length": ("llama", {"rope_parameters": DYNAMIC}, {}),
    f"trl {trl.__version__}: ValueError: model_type bloom: its attention is not on": (
        "bloom", {"hidden_dropout": 0.0, "attention_dropout": 0.0}, {}),
}  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
def test_options_and_models_that_stay_with_trl(tmp_path, reason):
    family, changes, options = REASONS[reason]
    trainer = build(cases.folder(tmp_path / family, family, **changes), tmp_path, **options)
    assert trainer.fast_path["forward"].startswith(f"TRL's: {reason}"), trainer.fast_path
    if reason.startswith("rope_type"):  # our sampling loop would also compute it wrongly
        assert trainer.fast_path["rollouts"] == trainer.fast_path["forward"]


def test_heads_that_stay_with_trl(model_path, tmp_path):
    trainer = build(model_path, tmp_path)
    trainer.model.lm_head.__class__ = type("Linear4bit", (torch.nn.Linear,), {})
    reason = options_module.forward_reason(trainer, trainer.model)
    assert reason == "lm_head: Linear4bit is no plain linear layer"
    assert options_module.unsuited(trainer, trainer.model) == reason
    trainer.model._tp_size = 2  # transformers sets it for tensor parallelism
    assert "tp_size: tensor parallelism" in options_module.forward_reason(trainer, trainer.model)


class RightPositions:
    """Mixin that makes TRL's forward use correct position ids, which do not count padding."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *rest, **more):
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        run = functools.partial(model, position_ids=positions)
        inputs = run, input_ids, attention_mask
        return super()._get_per_token_logps_and_entropies(*inputs, *rest, **more)


@pytest.mark.parametrize("loss_type", ["dapo", "vespo"])
def test_absolute_positions_do_not_count_the_padding(tmp_path, loss_type):
    """Check that left-padded GPT-2 rows give the results of TRL with corrected position ids."""
    path = cases.folder(tmp_path / "gpt2", "gpt2", **GPT2, **NO_DROPOUT, initializer_range=1.0)
    ours = build(path, tmp_path, loss_type=loss_type)
    assert ours.fast_path["forward"] == "packed"
    batch = micro_batch(ref_per_token_logps=torch.full((4, 6), -4.0))
    right = type("Right", (RightPositions, trl.GRPOTrainer), {})
    expected = gradients(build(path, tmp_path, right, loss_type=loss_type), batch)
    same_gradients(gradients(ours, batch), expected)


def steer(module: Any, args: Any, output: Any) -> Any:
    """Forward hook that changes only the last token of each row, so packed rows would be wrong."""
    states = (output[0] if isinstance(output, tuple) else output).clone()
    states[:, -1] += 0.5
    return (states, *output[1:]) if isinstance(output, tuple) else states


DIFFERS = "model_type llama: packed logps differ"
LATER = "a forward hook was added after the trainer was built"
COMPILED = "torch_compile: our forward is not compiled"
# aLoRA starts at a certain token of the prompt, but a packed row may contain several prompts.
ALORA = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM",
                        alora_invocation_tokens=[12], init_lora_weights=False)  # fmt: skip
# Each entry has the expected reason, the time of the change ("before" or "later" than the trainer
# is built), and a function that changes the model.
CHANGES: dict[str, tuple[str, str, Any]] = {
    "hook_before": (DIFFERS, "before", lambda m: m.model.layers[0].register_forward_hook(steer)),
    "hook_later": (LATER, "later", lambda m: m.model.layers[0].register_forward_hook(steer)),
    "compiled": (COMPILED, "before", lambda m: m.compile(backend="eager")),
    "compiled_later": (COMPILED, "later", lambda m: m.compile(backend="eager")),
    "layers": (COMPILED, "before", lambda m: m.model.layers[0].compile(backend="eager")),
    "wrapped": (COMPILED, "before", lambda m: torch.compile(m, backend="eager")),
    "alora": ("peft: the adapter looks at", "before", lambda m: peft.get_peft_model(m, ALORA)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_uses_trls_forward(model_path, tmp_path, name):
    reason, when, change = CHANGES[name]

    class Changed:
        def __init__(self, model: Any, **options: Any) -> None:
            torch._dynamo.reset()
            torch.manual_seed(1)  # of the adapter
            changed = change(model) if when == "before" else None
            is_model = isinstance(changed, torch.nn.Module)
            super().__init__(model=changed if is_model else model, **options)
            if when == "later":
                change(self.model)

    trainer = compared(model_path, tmp_path, mixin=Changed)
    assert trainer.fast_path["forward"].startswith(f"TRL's: {reason}")
    if reason == COMPILED:
        assert trainer._sampling() == COMPILED


def test_a_changed_objective_is_noticed(model_path, tmp_path, monkeypatch, caplog):
    """Check that a change of TRL's loss function is detected before the first step."""
    original = trl.GRPOTrainer._compute_loss
    louder = lambda self, *given: 1.01 * original(self, *given)  # noqa: E731
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", louder)
    with caplog.at_level(logging.WARNING):
        ours = compared(model_path, tmp_path)
    assert "the loss differs from TRL's by" in caplog.text
    assert "the loss differs" in ours.fast_path["loss"]


def test_the_model_goes_on_taking_padded_batches(model_path, tmp_path):
    """Check that the model still accepts padded batches, which callbacks and evaluation use."""
    trainer = build(model_path, tmp_path)
    assert trainer.fast_path["forward"] == "packed"
    plain = build(model_path, tmp_path, trl.GRPOTrainer)
    batch = {
        "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1] * 4]),
    }
    real = batch["attention_mask"].bool()
    ours, theirs = (t.model(**batch).logits[real] for t in (trainer, plain))
    # Our CPU kernels round differently, so allow a small difference.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    greedy = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(*(t.model.generate(**batch, **greedy) for t in (trainer, plain)))
    trainer.save_model(tmp_path / "saved")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.config._attn_implementation == "sdpa"
