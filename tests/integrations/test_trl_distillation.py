"""Tests of `use_fast_head` on TRL's `DistillationTrainer`: losses, complete runs, errors."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from grpo_fast import TeacherTopK, linear_divergence
from tests.integrations.trainer_packages import load

trl = pytest.importorskip("trl", minversion="1.16")
theirs = importlib.import_module("trl.trainer.distillation_trainer")
cases = importlib.import_module("tests.integrations.trl_cases")
head = importlib.import_module("grpo_fast.integrations.trl.head")
run_inside = importlib.import_module("grpo_fast.integrations.fast_head").run_inside

BETAS = (0.0, 0.2, 0.5, 1.0)
SIDES = "student", "teacher"
PLAIN = {"temperature": 1.0, **{f"{x}_logit_scale": 1.0 for x in SIDES}}
PLAIN |= {f"{x}_final_logit_softcapping": None for x in SIDES}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "softcaps": {
        "student_final_logit_softcapping": 2.0, "teacher_final_logit_softcapping": 3.0,
        "temperature": 1.3,
    },
    "scales": {"student_logit_scale": 1.7, "teacher_logit_scale": -0.5},
}  # fmt: skip
MASKS = {
    "some": torch.tensor([[1, 1, 0, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]),
    "none": torch.zeros(3, 5, dtype=torch.int64),
}


def both(
    beta: float, mask: torch.Tensor, items: Any = None, *, bias: bool = True, **rule: Any
) -> list[tuple]:
    """Compute the divergence loss with TRL's function and with ours, from the same random inputs.

    Returns:
        For each function, the loss, the sum of the entropies, the number of tokens, and the
        gradients.
    """
    random = torch.Generator().manual_seed(4)
    width, other, vocabulary = 12, 7, 61
    h, t = (torch.randn(3, 5, n, generator=random) for n in (width, other))
    w, u = (torch.randn(vocabulary, n, generator=random) for n in (width, other))
    a, b = (torch.randn(vocabulary, generator=random) for _ in range(2))
    h[2] = t[2] = torch.nan if mask.any() else 0.0  # the third completion is masked
    found = []
    for function in (theirs._chunked_divergence_loss, head.divergence_loss):
        layer = nn.Linear(width, vocabulary, bias=bias)
        run_inside(layer)
        with torch.no_grad():
            layer.weight.copy_(w)
            if bias:
                layer.bias.copy_(a)
        hidden = h.clone().requires_grad_()
        first = (layer,) if function is head.divergence_loss else ()
        inputs = [hidden, t, layer.weight, u]
        if not first:  # TRL also computes masked rows and would return NaN
            inputs[:2] = [x.nan_to_num() for x in inputs[:2]]
        loss, entropy, count = function(
            *first, *inputs, mask, beta, num_items_in_batch=items,
            student_lm_head_bias=layer.bias, teacher_lm_head_bias=b if bias else None,
            **(PLAIN | rule),
        )  # fmt: skip
        leaves = [hidden, *([layer.weight, layer.bias] if bias else [layer.weight])]
        found.append((loss, entropy, count, torch.autograd.grad(loss, leaves)))
    return found


def check(found: list[tuple]) -> None:
    (loss, entropy, count, gradients), mine = found
    assert mine[2] == count
    for a, b in zip((loss, entropy, *gradients), (*mine[:2], *mine[3]), strict=True):
        assert a.dtype == b.dtype and not b.isnan().any()
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("rule", RULES)
def test_the_loss_of_a_micro_batch(beta, rule):
    check(both(beta, MASKS["some"], **RULES[rule]))


@pytest.mark.parametrize("items", [None, 3.5, torch.tensor(11.0)])
@pytest.mark.parametrize("mask", MASKS)
def test_what_it_is_divided_by(items, mask):
    check(both(0.5, MASKS[mask], items, bias=False))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base, widths = tmp_path_factory.mktemp("distill"), {"student": 16, "teacher": 32}
    return tuple(cases.folder(base / name, hidden_size=n) for name, n in widths.items())


@pytest.mark.parametrize("options", [
    {"beta": 0.0, "temperature": 0.7}, {"beta": 1.0}, {"eval_strategy": "steps", "eval_steps": 2},
    {"gradient_checkpointing": True}, {"bf16": True},
    {"lora": {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}},
], ids=["forward", "reverse", "jsd_eval", "checkpointing", "autocast", "lora"])  # fmt: skip
def test_runs(folders, tmp_path, options, spied):
    calls = spied(head, "divergence_loss")
    one, other = (cases.distillation(folders, tmp_path, **options) for _ in range(2))
    start = {n: x.clone() for n, x in other.model.state_dict().items()}
    head.use_fast_head(other)
    for each in (one, other):
        assert not calls
        torch.manual_seed(0)  # both runs need the same order of completions
        each.train()
    assert len(calls) >= 6
    assert any(not torch.equal(x, start[n]) for n, x in other.model.state_dict().items())
    cases.compare_runs(one, other, *((3e-2, 6e-4, 3e-3) if options.get("bf16") else ()))


def test_undone_it_is_trls_again(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(head, "divergence_loss", lambda *a, **k: pytest.fail("ours was called"))
    made = cases.distillation(folders, tmp_path, max_steps=1)
    with head.use_fast_head(made):
        pass
    made.train()

    class Own(trl.DistillationTrainer):
        def _compute_loss(self, *given: Any) -> Any:
            return super()._compute_loss(*given)

    with pytest.raises(ValueError, match="_chunked_divergence_loss in the _compute_loss of Own"):
        head.use_fast_head(cases.distillation(folders, tmp_path, Own))


@pytest.mark.parametrize("has_tail", [True, False])
@pytest.mark.parametrize(("beta", "kind"), [(0.0, "forward_kl"), (0.3, "jsd"), (1.0, "reverse_kl")])
def test_the_asynchronous_trainers_numbers_are_those_of_a_top_k(has_tail, beta, kind):
    """Check that the loss of TRL's asynchronous trainer equals the divergence from a `TeacherTopK`.

    Every second row has one candidate fewer than the others.
    """
    name = "trl.experimental.async_distillation.async_distillation_trainer"
    theirs = load(name)._chunked_jsd_loss
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=g).requires_grad_() for n in (11, 40))
    top, ids = torch.randn(11, 40, generator=g).log_softmax(-1).topk(5)
    is_one = torch.ones_like(ids, dtype=torch.bool)
    is_one[::2, -1] = False
    given = ids.masked_fill(~is_one, -1), top, is_one, beta, 0.7, has_tail, None, 1, 4
    loss, *_ = theirs(hidden, weight, None, 1.0, None, *given)
    logps = top.masked_fill(~is_one, -torch.inf)
    logps = logps if has_tail else logps.log_softmax(-1)
    teacher, ones = TeacherTopK(ids, logps, has_tail), torch.ones(11)
    own = {} if kind != "jsd" else {"beta": beta}
    out = linear_divergence(hidden, weight, teacher, kind, weights=ones, temperature=0.7, **own)
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=1e-5)
    found, wanted = (torch.autograd.grad(x, (hidden, weight)) for x in (out.loss, loss))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
