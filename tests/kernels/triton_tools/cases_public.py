"""The public functions with backend="triton" against backend="torch", end to end in the
interpreter.

Run by test_triton_interpreter.py in a process of its own. The other two files hold the kernels
against fp64; here it is the way from the public arguments to them and back that could go wrong:
chunks, gathered rows, masks, the two layouts, the fused and the two-sweep path.
"""

from __future__ import annotations

import pytest
import torch

import grpo_fast
from grpo_fast import LossConfig
from grpo_fast.kernels.gpu import linear as linear_triton
from grpo_fast.kernels.gpu import rows as rows_triton
from grpo_fast.kernels.head import loop as linear
from tests.kernels.triton_tools import interpreter  # noqa: F401  (its repairs)

B, L, H, V = 5, 13, 12, 37
# 43 tokens: two chunks of 32 rows when the workspace is small.
LENGTHS = torch.tensor([13, 7, 0, 11, 12])
KEYS = ("hidden", "target_ids", "old_logps", "ref_logps", "temperature")


# The linear functions with the workspace as it ships and with one that holds 32 rows; logits come
# whole.
WAYS = [("linear", "one chunk"), ("linear", "chunks"), ("logits", ""), ("inplace", "")]


@pytest.fixture
def function(request, monkeypatch) -> str:
    name, chunks = request.param
    if chunks == "chunks":
        monkeypatch.setattr(linear, "workspace_bytes", lambda *_: 0)
    return name


def over(*functions: str) -> pytest.MarkDecorator:
    """Parametrize `function` by every way to call these functions."""
    ways = [way for way in WAYS if way[0] in functions]
    return pytest.mark.parametrize(
        "function", ways, indirect=True, ids=[" ".join(way).strip() for way in ways]
    )


def make(layout: str, dtype=torch.float32) -> dict:
    """Tensors of a batch, padded or packed, old and ref logps around those of the model."""
    g = torch.Generator().manual_seed(7)
    mask = torch.arange(L)[None, :] < LENGTHS[:, None]
    mask[3, 2:5] = False  # a tool wrote these
    x = {
        "hidden": torch.randn(B, L, H, generator=g).to(dtype),
        "weight": (torch.randn(V, H, generator=g) * 0.5).to(dtype),
        "bias": (torch.randn(V, generator=g) * 0.3).to(dtype),
        "target_ids": torch.randint(V, (B, L), generator=g),
        "advantages": torch.randn(B, generator=g),
        "temperature": torch.rand(B, L, generator=g) + 0.6,
    }
    logits = x["hidden"].double() @ x["weight"].double().T + x["bias"].double()
    logps = logits.log_softmax(-1).gather(-1, x["target_ids"][..., None])[..., 0]
    x["old_logps"] = (logps + 0.4 * torch.randn(B, L, generator=g)).float()
    x["ref_logps"] = (logps + 0.5 * torch.randn(B, L, generator=g)).float()
    if layout == "packed":
        kept = torch.arange(L)[None, :] < LENGTHS[:, None]
        x |= {name: x[name][kept] for name in KEYS}
        x["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.long), LENGTHS.cumsum(0)])
        mask = mask[kept]
    return x | {"completion_mask": mask}


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


def run(function: str, backend: str, x: dict, config: LossConfig) -> tuple[list, list]:
    """(loss, logps, entropy) and the gradients of one call."""
    tokens = {k: x.get(k) for k in ("completion_mask", "cu_seqlens", "old_logps", "ref_logps")}
    if function == "linear":
        hidden, weight, bias = leaves = [leaf(x[k]) for k in ("hidden", "weight", "bias")]
        out = grpo_fast.linear_grpo_loss(
            hidden,
            weight,
            x["target_ids"],
            x["advantages"],
            config,
            bias=bias,
            backend=backend,
            **tokens,
        )
    else:
        leaves = [
            leaf(torch.nn.functional.linear(*(x[k].float() for k in ("hidden", "weight", "bias"))))
        ]
        inplace = function == "inplace"
        out = grpo_fast.logits_grpo_loss(
            leaves[0] * 1 if inplace else leaves[0], x["target_ids"], x["advantages"], config,
            backend=backend, inplace=inplace, **tokens,
        )  # fmt: skip
    out.loss.backward()
    return [out.loss.detach(), out.logps, out.entropy], [y.grad for y in leaves]


def assert_agree(actual: tuple[list, list], expected: tuple[list, list]) -> None:
    for got, want in zip(actual[0], expected[0], strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert got.shape == want.shape and got.dtype == want.dtype
            assert (got - want).abs().max() <= 1e-6 * max(1.0, float(want.abs().max()))
    for got, want in zip(actual[1], expected[1], strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert want.norm() > 0 and (got - want).norm() <= 2e-6 * want.norm()


CONFIGS = {
    "kl and entropy": {
        "loss_type": "dapo",
        "beta": 0.1,
        "entropy_coef": 0.02,
        "kl_times_ratio": True,
    },
    "one ratio per completion": {"loss_type": "gspo", "beta": 0.05, "epsilon_low": 0.1},
    "softcap and temperatures": {
        "loss_type": "cispo",
        "softcap": 3.0,
        "logit_scale": 0.7,
        "compute_entropy": True,
    },
}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", CONFIGS)
@over("linear", "logits", "inplace")
def test_losses(function, name, layout):
    x = make(layout)
    config = LossConfig(**CONFIGS[name])
    if name == "softcap and temperatures":
        config = config.replace(temperature=x["temperature"])
    assert_agree(run(function, "triton", x, config), run(function, "torch", x, config))


@pytest.mark.parametrize("loss_type", ["grpo", "gspo"])
@over("linear", "inplace")
def test_rows_without_advantage(function, loss_type):
    """Most rows carry nothing: they are gathered away before the GEMMs, or written as zeros."""
    x = make("padded")
    x["advantages"][[0, 1]] = 0.0
    config = LossConfig(loss_type=loss_type, epsilon_low=0.9, epsilon_high=9.0)
    actual = run(function, "triton", x, config)
    assert_agree(actual, run(function, "torch", x, config))
    assert (actual[1][0][[0, 1, 2]] == 0).all() and (actual[1][0][~x["completion_mask"]] == 0).all()


@over("linear", "logits")
def test_logps_with_gradient(function):
    """Differentiable logps and entropy, with rows that have no target."""
    x = make("padded")
    x["target_ids"][:, 3] = -100
    weights = torch.randn(2, B, L, generator=torch.Generator().manual_seed(1))

    def call(backend: str) -> tuple[list, list]:
        options = {
            "temperature": x["temperature"],
            "softcap": 4.0,
            "return_entropy": True,
            "backend": backend,
        }
        if function == "linear":
            leaves = [leaf(x[k]) for k in ("hidden", "weight", "bias")]
            results = grpo_fast.linear_logps(
                leaves[0], leaves[1], x["target_ids"], bias=leaves[2], **options
            )
        else:
            leaves = [leaf(torch.nn.functional.linear(x["hidden"], x["weight"], x["bias"]))]
            results = grpo_fast.logits_logps(leaves[0], x["target_ids"], **options)
        sum((r * w).sum() for r, w in zip(results, weights, strict=True)).backward()
        return [r.detach() for r in results], [y.grad for y in leaves]

    actual = call("triton")
    assert_agree(actual, call("torch"))
    assert (actual[0][0][:, 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@over("linear", "logits")
def test_on_policy_ratio_is_one(function, layout, dtype):
    """logps without gradient, then the loss on the same weights: the same bits, so the ratio is
    exactly 1.
    """
    x = make(layout, dtype)
    rule = {"temperature": 0.8, "softcap": 6.0}
    mask, ids, advantages = x["completion_mask"], x["target_ids"], x["advantages"]
    leaves = [leaf(x[k]) for k in ("hidden", "weight", "bias")]
    logps, loss, last = (
        grpo_fast.linear_logps,
        grpo_fast.linear_grpo_loss,
        {"bias": leaves.pop(), "backend": "triton"},
    )
    if function == "logits":
        leaves = [leaf(torch.nn.functional.linear(*leaves))]
        logps, loss, last = (
            grpo_fast.logits_logps,
            grpo_fast.logits_grpo_loss,
            {"backend": "triton"},
        )
    with torch.no_grad():
        old = logps(*leaves, ids, **rule, **last)
    tokens = {"completion_mask": mask, "cu_seqlens": x.get("cu_seqlens"), "old_logps": old}
    out = loss(*leaves, ids, advantages, LossConfig(loss_type="grpo", **rule), **tokens, **last)
    assert torch.equal(out.logps[mask], old[mask])
    out.loss.backward()
    assert all(y.grad.norm() > 0 for y in leaves)


def test_the_kernels_ran(monkeypatch):
    """Without a launch, the cases above would compare torch with torch."""
    launched, original = [], rows_triton.launch

    def launch(kernel, *arguments, **options):
        launched.append(kernel.fn.__name__)
        original(kernel, *arguments, **options)

    for module in (rows_triton, linear_triton):
        monkeypatch.setattr(module, "launch", launch)
    for function in ("linear", "logits"):
        run(function, "triton", make("packed"), LossConfig(loss_type="dapo"))
    assert launched == ["slice_kernel", "join_kernel", "row_grad_kernel", "row_loss_kernel"]
