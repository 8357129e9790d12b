"""Tests that `use_fast_head` gives the same outputs, gradients and runs as TRL's fused head."""

import copy
import importlib
import logging
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl", minversion="1.16")
utils = importlib.import_module("trl.trainer.utils")
cases = importlib.import_module("tests.integrations.trl_cases")
head = importlib.import_module("grpo_fast.integrations.trl.head")
fast_head = importlib.import_module("grpo_fast.integrations.fast_head")

BOTH = utils._ChunkedLogProbFunction.apply, head.fast_log_probs
ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
RULES = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "softcap": {"final_logit_softcapping": 2.0, "temperature": 1.3},
    "scale": {"logit_scale": -0.5},
    "softcap_scale": {"final_logit_softcapping": 3.0, "logit_scale": 1.7},
}


def tensors() -> tuple:
    tokens, width, vocabulary = 37, 12, 61
    random = torch.Generator().manual_seed(3)
    hidden = 0.6 * torch.randn(tokens, width, generator=random)
    weight = torch.randn(vocabulary, width, generator=random)
    bias = torch.randn(vocabulary, generator=random)
    # In a third of the rows the target has the largest logit, so that is_top1 is True. In a third
    # it has the smallest logit, which becomes the largest if the scale is negative.
    targets = torch.randint(0, vocabulary, (tokens,), generator=random)
    targets[::3] = (hidden @ weight.T + bias).argmax(-1)[::3]
    targets[1::3] = (hidden @ weight.T + bias).argmin(-1)[1::3]
    return *(x.requires_grad_() for x in (hidden, weight, bias)), targets


def call(function: Any, arguments: tuple, outputs: tuple[str, ...] = ALL, **rule: Any) -> tuple:
    options = {"temperature": 1.0, "final_logit_softcapping": None, "logit_scale": 1.0, **rule}
    hidden, weight, bias, targets = arguments
    return function(
        hidden, weight, bias, targets, options["temperature"], 16,
        options["final_logit_softcapping"], options["logit_scale"], outputs,
    )  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_outputs_and_gradients(name, with_bias, monkeypatch):
    monkeypatch.setattr(head, "BLOCK_ELEMENTS", 150)  # computes metrics for 2 rows at a time
    results = []
    for function in BOTH:
        hidden, weight, bias, targets = tensors()
        leaves = [hidden, weight, *([bias] if with_bias else [])]
        given = hidden, weight, bias if with_bias else None, targets
        outputs = call(function, given, **RULES[name])
        slope = torch.linspace(-1, 2, hidden.shape[0])
        ((outputs[0] * slope).sum() + (outputs[1] * slope.flip(0)).sum()).backward()
        results.append((outputs, [x.grad for x in leaves]))
    (theirs, their_grads), (ours, our_grads) = results
    for field, a, b in zip(ALL, theirs, ours, strict=True):
        assert b.dtype == a.dtype
        torch.testing.assert_close(b.float(), a.float(), rtol=1e-5, atol=2e-5, msg=field)
    assert 0 < int(ours[4].sum()) < len(ours[4])
    for a, b in zip(their_grads, our_grads, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=2e-5)


def test_outputs_that_are_asked_for_ties_and_no_token():
    for outputs in ((), ("entropy",), ("is_top1",), ("log_probs", "mean_logits")):
        theirs, ours = (call(function, tensors(), outputs) for function in BOTH)
        assert [x is None for x in ours] == [x is None for x in theirs]
    hidden, weight = torch.ones(2, 4), torch.ones(5, 4)  # all logits are equal, so argmax gives 0
    for function in BOTH:
        top1 = call(function, (hidden, weight, None, torch.tensor([0, 3])))[4]
        assert top1.tolist() == [True, False]
    hidden, weight, bias, targets = tensors()
    outputs = call(head.fast_log_probs, (hidden[:0], weight, bias, targets[:0]))
    assert all(x.shape == (0,) for x in outputs)
    outputs[0].sum().backward()
    assert weight.grad.abs().sum() == 0


def fused_model(**options: Any) -> Any:
    model = cases.tiny_model("llama", **cases.SMALL)
    utils.add_fused_lm_head(model, outputs=ALL, **options)
    return model


def test_operands_have_the_dtype_trl_projects_in():
    for dtype, cast, autocast, expected in (
        (torch.float32, False, False, torch.float32),
        (torch.bfloat16, False, False, torch.bfloat16),
        (torch.bfloat16, True, False, torch.float32),
        (torch.float32, False, True, torch.bfloat16),
        (torch.bfloat16, True, True, torch.float32),
    ):
        model = fused_model(cast_lm_head_to_fp32=cast, temperature=0.7).to(dtype)
        known = head.fused_head(model)
        assert known.rule == {"temperature": 0.7, "softcap": None, "logit_scale": 1.0}
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            operands = known.operands(model.lm_head, torch.zeros(2, 16, dtype=dtype))
        assert [x.dtype for x in operands if x is not None] == [expected, expected]


def labelled() -> dict[str, Any]:
    ids = torch.arange(24).view(2, 12) % 50 + 2
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 9:] = -100
    return {"input_ids": ids, "labels": labels, "fused_lm_head": True}


def test_one_model_and_no_other(spied):
    model, other = fused_model(), fused_model()
    theirs, kernel = model(**labelled()), utils._ChunkedLogProbFunction
    calls = spied(head, "fast_log_probs")
    handle = head.use_fast_head(model)
    other(**labelled())
    assert utils._ChunkedLogProbFunction is kernel and not calls
    model(**labelled())
    assert len(calls) == 1
    assert calls[0].args[0].shape[0] == 8 + 5, "only labelled positions are scored"
    handle.undo()
    again = model(**labelled())
    assert len(calls) == 1 and torch.equal(again.log_probs, theirs.log_probs)


def test_as_a_context_with_every_output():
    model = fused_model(temperature=0.8)
    theirs = model(**labelled())
    with head.use_fast_head(model):
        ours = model(**labelled())
        # Without labels, the model must still return logits.
        logits = model(input_ids=labelled()["input_ids"]).logits
    assert logits.shape == (2, 12, 61)
    for field in (*ALL, "loss", "label_mask"):
        a, b = (getattr(outputs, field) for outputs in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert ours.log_probs.shape == (2, 11)
    model = fused_model()
    head.use_fast_head(model).undo()
    head.use_fast_head(model)
    copied = copy.deepcopy(model)
    torch.nn.init.zeros_(copied.lm_head.weight)
    uniform = torch.full((8 + 5,), -torch.tensor(61.0).log().item())
    outputs = copied(**labelled())
    torch.testing.assert_close(outputs.log_probs[outputs.label_mask], uniform)
    assert copied.lm_head(torch.ones(1, 16)).eq(0).all()


def test_nothing_labelled_keeps_a_gradient():
    model, inputs = fused_model(), labelled()
    head.use_fast_head(model)
    model(**{**inputs, "labels": torch.full_like(inputs["labels"], -100)}).loss.backward()
    gradients = [p.grad for p in model.model.layers.parameters()]
    assert all(x is not None and not x.any() for x in gradients)
    with pytest.raises(ValueError, match="model: expected one with TRL's fused LM head"):
        head.use_fast_head(cases.tiny_model("llama", **cases.SMALL))


@pytest.mark.parametrize("by", ["ZeRO-3", "tensor parallelism"])
def test_a_head_that_others_shard_stays_with_trl(caplog, monkeypatch, by):
    model = fused_model()
    theirs = model(**labelled())
    head.use_fast_head(model)
    monkeypatch.setattr(head, "fast_log_probs", lambda *_: pytest.fail("ours was called"))
    if by == "ZeRO-3":
        model.lm_head.weight.ds_id = 0  # DeepSpeed ZeRO-3 sets this attribute
    else:
        model._tp_size = 2  # transformers sets it for tensor parallelism
    fast_head._warn_partitioned.cache_clear()
    with caplog.at_level(logging.WARNING):
        ours = model(**labelled())
    assert by in caplog.text
    torch.testing.assert_close(ours.log_probs, theirs.log_probs)


ANSWERS = {
    "SFT": {"completion": " The answer is 42."},
    "DPO": {"chosen": " It is 42.", "rejected": " It may be 7 or so."},
}


def build(kind: str, path: str, output: Any, **options: Any) -> Any:
    """Build TRL's trainer for SFT or DPO."""
    data = [{"prompt": p, **ANSWERS[kind]} for p in cases.prompts(8)]
    settings = {
        "output_dir": str(output), "max_steps": 2, "learning_rate": 0.1, "max_length": 64,
        "data": data, **options,
    }  # fmt: skip
    classes = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    return cases.build(*classes, path, settings)


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize(
    ("module", "name"), [("trl.experimental.gkd", "GKDTrainer"), ("trl", "DistillationTrainer")]
)
def test_a_trainer_whose_loss_has_no_fused_head_is_refused(module, name, derived):
    """Check that `use_fast_head` rejects trainers whose loss does not call the fused head."""
    cls = getattr(importlib.import_module(module), name)
    cls = type("Derived", (cls,), {}) if derived else cls
    with pytest.raises(ValueError, match=f"trainer: expected .* got {cls.__name__}, whose loss"):
        head.use_fast_head(object.__new__(cls))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("SFT", {}), ("DPO", {}), ("DPO", {"use_weighting": True}), ("DPO", {"bf16": True})],
)
def test_runs_of_other_trainers(model_path, tmp_path, kind, options, spied):
    theirs, ours = (build(kind, model_path, tmp_path, **options) for _ in range(2))
    calls = spied(head, "fast_log_probs")
    head.use_fast_head(ours)
    theirs.train(), ours.train()
    assert len(calls) == (2 if kind == "SFT" else 4)  # policy and reference
    cases.compare_runs(theirs, ours, *((3e-2, 6e-4, 2e-3) if options.get("bf16") else ()))
