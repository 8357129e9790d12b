"""Test every keyword of the public functions in every mode of execution.

Each test checks that the result equals the result of plain eager execution, or that an error is
raised. The keywords come from the signatures, so a new keyword without an entry in `VALUES` fails.
The tests use the real torch.compile, which calls the functions outside of its graphs.
"""

import doctest
import functools
import inspect
import sys

import pytest
import torch
from torch import distributed
from torch.utils.checkpoint import checkpoint

import grpo_fast
import grpo_fast.attention as attention
from grpo_fast import DivergenceTerm, LossConfig, Support, TeacherHead
from grpo_fast.kernels.gpu import launch
from grpo_fast.objective import ppo
from tests.loss_cases import make_case, options_for, relative_l2, run

T, H, V = 7, 4, 11
LEAVES = {
    "linear_logps": ("hidden", "lm_head_weight"),
    "logits_logps": ("logits",),
    "grpo_loss": ("logps",),
    "linear_grpo_loss": ("hidden", "lm_head_weight"),
    "logits_grpo_loss": ("logits",),
    "linear_divergence": ("hidden", "lm_head_weight"),
}
CONFIG = dict(loss_type="grpo", beta=0.1)
ADVANTAGES = torch.tensor([0.7, -1.2, 0.4])


def rand(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


IDS = torch.randint(V, (T,), generator=torch.Generator().manual_seed(0))
SETS = torch.stack([(IDS + 3) % V, IDS, (IDS + 7) % V], 1).flatten()
LOGPS = -rand(T, seed=4).abs() - 0.1
TENSORS = {
    "hidden": rand(T, H, seed=0), "lm_head_weight": rand(V, H, seed=1),
    "bias": rand(V, seed=2), "logits": rand(T, V, seed=3), "logps": LOGPS,
    "entropy": rand(T, seed=5).abs(),
}  # fmt: skip
TEACHER = TeacherHead(rand(T, H, seed=9), rand(V, H, seed=10))
# Arguments without a default value, except those in LEAVES. A function gets the ones that it has.
GIVEN = {"target_ids": IDS, "advantages": ADVANTAGES, "teacher": TEACHER, "kind": "jsd"}
# Optional arguments of every function with a config.
OF_LOSSES = {
    "cu_seqlens": torch.tensor([0, 2, 2, T]), "ref_logps": LOGPS - 0.1, "old_logps": LOGPS + 0.1
}  # fmt: skip
# One value for each keyword. It changes the result, so that a test fails if the keyword is ignored.
VALUES = {
    "softcap": 3.0,
    "temperature": 0.7,
    "beta": 0.2,
    "weights": rand(T, seed=11),
    "logit_scale": 1.3,
    "return_entropy": True,
    "hidden_rows": torch.tensor([0, 0, 1, 2, 2, 5, 6]),
    "support": Support(SETS, torch.arange(T + 1) * 3),
    "backend": "torch",
    "completion_mask": torch.tensor([1, 1, 0, 1, 1, 0, 1], dtype=torch.bool),
    "cu_seqlens": torch.tensor([0, 1, 3, T], dtype=torch.int32),
    "old_logps": LOGPS - 0.3,
    "ref_logps": LOGPS + 0.2,
    "sampling_logps": LOGPS - 0.4,
    "num_items_in_batch": 9.0,
    "num_completions_in_batch": torch.tensor(5.0),
    "grad_filter": 0.2,
    "divergence": DivergenceTerm(TEACHER, "jsd", coef=0.3, beta=0.2),
    "validate": "full",
    "inplace": True,
}
IN_CONFIG = {
    "temperature": VALUES["temperature"], "softcap": 3.0, "logit_scale": 1.3, "entropy_coef": 0.1,
    "compute_entropy": True, "top_entropy_quantile": 0.5,
}  # fmt: skip
NEUTRAL = ("group", "backend", "validate", "inplace")  # these keywords do not change the result
NEEDS = {"num_items_in_batch": {"aggregation": "token_mean_global"}}


def keywords_of(function: str) -> list[str]:
    parameters = inspect.signature(getattr(grpo_fast, function)).parameters.values()
    own = [x.name for x in parameters if x.kind is inspect.Parameter.KEYWORD_ONLY]
    in_config = IN_CONFIG if function in ("linear_grpo_loss", "logits_grpo_loss") else ()
    return [*own, *(f"config.{name}" for name in in_config)]


class Call:
    """A public function with its base arguments and, if `name` is not empty, one more keyword."""

    def __init__(self, function: str, name: str = "", group=None) -> None:
        self.function = getattr(grpo_fast, function)
        self.name = name
        self.drops = True
        parameters = inspect.signature(self.function).parameters
        self.is_loss = "return_entropy" not in parameters
        self.leaves = list(LEAVES[function])
        if name in TENSORS:
            self.leaves.append(name)
        self.given = {x: value for x, value in GIVEN.items() if x in parameters}
        if not self.is_loss:  # a normal call skips this row, and a recorded call computes it
            self.given["target_ids"] = IDS.index_fill(0, torch.tensor(3), -100)
        if "config" in parameters:
            options = CONFIG | NEEDS.get(name, {})
            option = name.removeprefix("config.")
            if name == "entropy":
                options["entropy_coef"] = 0.1
            if option != name:
                options[option] = IN_CONFIG[option]
            self.given |= {**OF_LOSSES, "config": LossConfig(**options)}
        if name in VALUES:
            self.given[name] = VALUES[name]
        if name == "group":
            self.given[name] = group

    def __call__(self, *leaves):
        tensors = dict(zip(self.leaves, leaves, strict=True))
        if self.name == "inplace":
            tensors["logits"] = tensors["logits"] * 1
        found = self.function(**tensors, **self.given)
        if not self.is_loss:
            return found if isinstance(found, tuple) else (found,)
        if self.function is grpo_fast.linear_divergence:
            return found.loss, found.values
        metrics = [x for key, x in found.metrics.items() if self.drops or "grad_filter" not in key]
        return found.loss, found.logps, found.entropy, *metrics


def answer(call, run=None, *, backward=True):
    """Run a call. Return its outputs and, if `backward`, the gradients of its input tensors."""
    leaves = [TENSORS[x].clone().requires_grad_() for x in call.leaves]
    outputs = (run or call)(*leaves)
    found = [x.detach() for x in outputs if x is not None]
    if backward:
        up = rand(T, seed=8)
        parts = [outputs[0]] if call.is_loss else [(x * up).sum() for x in outputs]
        (sum(parts) * 0.7).backward()
        found += [x.grad for x in leaves]
    return found


def compiled(call, patch):
    torch._dynamo.reset()
    return answer(call, torch.compile(call.__call__, backend="eager"))


def autocast(call, patch):
    with torch.autocast("cpu", torch.bfloat16):
        return answer(call)


def recorded(call, patch):
    """Run a call on the CPU along the code path for CUDA graphs, and return its outputs.

    tests/gpu/test_cuda_graphs.py checks on a GPU that such calls do not sync.
    """
    # Skip modules of other packages. Some lazy modules of transformers raise an error when an
    # attribute is read.
    ours = [module for name, module in sys.modules.items() if name.startswith("grpo_fast.")]
    asked = launch.is_capturing
    for module in ours:
        if getattr(module, "is_capturing", None) is asked:
            patch.setattr(module, "is_capturing", lambda x: True)
    everything = "grpo_fast.kernels.head.terms.active_rows"
    patch.setattr(everything, lambda g, _: torch.ones_like(g, dtype=torch.bool))
    return answer(call)


def checkpointed(use_reentrant):
    return lambda call, patch: answer(
        call, lambda *leaves: checkpoint(call, *leaves, use_reentrant=use_reentrant)
    )


def without_gradients(call, patch):
    with torch.no_grad():
        return answer(call, backward=False)


MODES = {
    "compiled": compiled,
    "autocast": autocast,
    "recorded": recorded,
    "checkpoint": checkpointed(False),
    "reentrant": checkpointed(True),
    "no_grad": without_gradients,
}
# Compiling takes time, so the mode "compiled" is tested only with some keywords.
COMPILED = {"", "support", "group", "inplace", "hidden_rows", "divergence", "temperature"}
OUTSIDE_OF_RECORDINGS = {
    "group", "support", "completion_mask", "grad_filter", "validate"
}  # fmt: skip


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


CELLS = [
    (function, name, mode)
    for function in LEAVES
    for name in keywords_of(function)
    for mode in MODES
    if mode != "compiled" or name in COMPILED
]


@functools.cache
def plain_answer(function, name, group, drops):
    call = Call(function, name, group)
    call.drops = drops
    return answer(call)


@pytest.mark.parametrize(("function", "name", "mode"), CELLS)
def test_a_cell(function, name, mode, group, monkeypatch):
    call, run = Call(function, name, group), MODES[mode]
    # Without gradients, grad_filter drops no columns, so its metrics differ from those of `answer`.
    call.drops = mode not in ("reentrant", "no_grad")
    plain = plain_answer(function, name, group, call.drops)
    if mode == "recorded" and name in OUTSIDE_OF_RECORDINGS:
        with pytest.raises(Exception, match=f"{name}: expected .* while a CUDA graph is recorded"):
            run(call, monkeypatch)
        return
    found = run(call, monkeypatch)
    assert len(found) == len(plain) - (mode == "no_grad") * len(call.leaves)
    for x, y in zip(found, plain, strict=False):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", LEAVES)
def test_each_value_tells(function):
    """Check that each value in VALUES changes the result of a call.

    Otherwise, the other tests would not notice if a function ignored a keyword.
    """
    for name in set(keywords_of(function)).difference(NEUTRAL):
        call, without = Call(function, name), Call(function)
        if name in NEEDS:
            without.given["config"] = call.given["config"]
        found, other = answer(call), answer(without)
        pairs = zip(found, other, strict=False)
        same = all(x.shape == y.shape and torch.equal(x, y) for x, y in pairs)
        assert not same or len(found) != len(other), name


# ---------- Test that a loss in a graph of torch.compile, which it would break, raises an error
@pytest.mark.parametrize("name", LEAVES)
def test_fullgraph_is_refused_by_name(name):
    function = getattr(grpo_fast, name)
    count = sum(x.default is x.empty for x in inspect.signature(function).parameters.values())
    with pytest.raises(Exception, match=rf"{name}\(\) cannot be in a graph of torch.compile"):
        torch.compile(lambda x: function(*[x] * count), fullgraph=True)(torch.ones(2))


def test_global_precision_settings_do_not_reach_fp32_results():
    """Check that torch.set_float32_matmul_precision does not change the loss.

    Users set a lower precision for the model. The loss needs matrix products in full fp32.
    Importance ratios are near 1, so the error of a logp is not small compared with the log ratio.
    """
    case = make_case(119, H=64, **options_for("grpo"))
    plain = run("linear", case)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        relaxed = run("linear", case)
    finally:
        torch.set_float32_matmul_precision(before)
    assert relative_l2(relaxed.grads["hidden"], plain.grads["hidden"]) <= 2e-6
    assert (relaxed.logps - plain.logps).abs().max() <= 1e-5


# ----------- Test that the docstring examples of all public names print the results that they show
EXAMPLES = {name: getattr(grpo_fast, name) for name in grpo_fast.__all__}
OF_ATTENTION = ("pack_tree", "pack_groups", "plan_packs", "head_of", "register")
EXAMPLES |= {name: getattr(attention, name) for name in OF_ATTENTION}
EXAMPLES["gae"] = ppo.gae


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_examples(name: str) -> None:
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__, {}, name, None, None)
    assert test.examples, f"{name} has no Example: section"
    assert doctest.DocTestRunner().run(test).failed == 0
