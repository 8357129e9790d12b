"""Every configuration the package ships, as calls of its own doors on CPU tensors, inside `compile_launches`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from grpo_fast.config import LossConfig
from grpo_fast.kernels import linear_triton, rows_triton, scale_triton
from grpo_fast.kernels.rows_torch import LogitRule
from grpo_fast.kl import KL_ESTIMATORS
from grpo_fast.objectives import OBJECTIVES

ROWS = 64


def linear(dtype: torch.dtype, vocab: int, hidden_size: int, *, everything: bool) -> Callable[[], object]:
    """The hidden -> logps kernel, bare (a pass without gradient), or with every option that adds code."""

    def call() -> object:
        hidden, weight = torch.empty(ROWS, hidden_size, dtype=dtype), torch.empty(vocab, hidden_size, dtype=dtype)
        target = torch.zeros(ROWS, dtype=torch.long)
        if not everything:
            rule = LogitRule(1.0, None, 1.0)
            return linear_triton.linear_logps(hidden, weight, None, target, rule, return_entropy=False)
        rule, bias, out = LogitRule(1.0, 30.0, torch.ones(ROWS)), weight[:, 0].contiguous(), torch.empty(ROWS, vocab)
        return linear_triton.linear_logps(hidden, weight, bias, target, rule, return_entropy=True, logits_out=out)

    return call


def storing(vocab: int, hidden_size: int) -> Callable[[], object]:
    """The pass with gradient as the engine runs it: no softcap, fp32 logits stored."""

    def call() -> object:
        hidden, weight = (torch.empty(n, hidden_size, dtype=torch.bfloat16) for n in (ROWS, vocab))
        target, rule, out = torch.zeros(ROWS, dtype=torch.long), LogitRule(1.0, None, 1.0), torch.empty(ROWS, vocab)
        return linear_triton.linear_logps(hidden, weight, None, target, rule, return_entropy=False, logits_out=out)

    return call


def rows(dtype: torch.dtype, vocab: int) -> Callable[[], object]:
    """The three row kernels with every option that adds code."""

    def call() -> None:
        logits, target = torch.empty(4, vocab, dtype=dtype), torch.zeros(4, dtype=torch.long)
        v, config = torch.ones(4), LossConfig(loss_type="dapo", beta=0.1, kl_times_ratio=True)
        rule = LogitRule(1.0, 30.0, v)
        rows_triton.row_logps(logits, target, rule, return_entropy=True)
        rows_triton.row_grad_(logits, target, v, v, v, v, v, rule)
        rows_triton.row_loss_(logits, logits, target, v, v, v, v, v, v, config, rule, return_entropy=True)

    return call


def scaled(dtype: torch.dtype) -> Callable[[], object]:
    return lambda: scale_triton.scale_(torch.empty(10**6, dtype=dtype), torch.ones(()))


def loss(config: LossConfig) -> Callable[[], object]:
    def call() -> None:
        logits, target, v = torch.empty(4, 1000), torch.zeros(4, dtype=torch.long), torch.ones(4)
        rule = LogitRule(1.0, None, 1.0)
        rows_triton.row_loss_(logits, logits, target, v, v, v, v, v, None, config, rule, return_entropy=False)

    return call


def shipped(arch: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of every configuration on `arch`. V = 32000 and H = 896 are aligned; 32001 and 897 are odd."""
    for dtype in (torch.bfloat16, torch.float32):
        for vocab, hidden_size in ((32000, 896), (32001, 897)):
            for everything in (False, True):
                name = f"linear {str(dtype)[6:]} V={vocab} H={hidden_size}{' all' if everything else ''}"
                yield name, linear(dtype, vocab, hidden_size, everything=everything)
    yield "linear bfloat16 V=32000 H=896 store", storing(32000, 896)
    yield "linear float16 V=32000 H=896 all", linear(torch.float16, 32000, 896, everything=True)
    for dtype, vocab in (
        (torch.float16, 1000),
        (torch.float32, 1001),
        (torch.bfloat16, 32000),
        (torch.float32, 32001),
    ):
        yield f"rows {str(dtype)[6:]} V={vocab}", rows(dtype, vocab)
    for dtype in (torch.float32, torch.bfloat16):
        yield f"scale {str(dtype)[6:]}", scaled(dtype)
    if arch == "sm_90":  # the leaves have no architecture of their own (and there are fewer estimators than losses)
        token = {o.leaf: name for name, o in OBJECTIVES.items() if o.window == "ratio" and "token" in o.levels}
        for name, estimator in zip(token.values(), itertools.cycle(KL_ESTIMATORS), strict=False):
            config = LossConfig(loss_type=name, kl_estimator=estimator, max_completion_length=8)
            yield f"loss {name}, kl {estimator}", loss(config)
