"""Launches, waits, bytes and products of a call on a GPU, counted without a GPU (recorder.py).

    python -m benchmarks.gpu.trace                  prints a table in Markdown
    python -m benchmarks.gpu.trace --json           prints the same numbers as JSON

The traced call does not use autograd, which needs a CUDA build. It includes the work of the
backward pass, which scales the gradients. Some of the work depends on values, which are unknown
here. The trace assumes that every row is active, that no sum in dW cancels almost to zero, and that
the upstream gradient is 1. The GPU has the memory of an H200.
tests/benchmarks/test_gpu_trace.py has the budgets of the calls.
"""

from __future__ import annotations

import collections
import json
import sys
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.recorder import SET_SIZE, Recorder, recording
from benchmarks.gpu.report import table
from benchmarks.options import new_parser
from grpo_fast import LossConfig, Support
from grpo_fast.kernels.types import Wanted
from grpo_fast.loss import autograd
from grpo_fast.loss.call import Call


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)


class Context(SimpleNamespace):
    """Replacement for the context that autograd passes to a function."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, on: bool) -> None:
        pass


class Case(NamedTuple):
    """A call in bf16 on eight packed completions.

    Attributes:
        rows: number of tokens.
        hidden: hidden size.
        vocab: vocabulary size.
        wants: whether dH and dW are computed.
        loss_type: `loss_type` of the LossConfig.
        beta: weight of the KL term.
        mask: True passes padded completions with a mask instead of packed completions.
        calls: number of calls with the same LM head.
        support: True passes a support of SET_SIZE ids for each row.
        logits: the logits are given.
        logps: the call computes logps, with the gradients in `wants`, instead of a loss.
    """

    rows: int
    hidden: int
    vocab: int = 151936
    wants: tuple[bool, bool] = (True, True)
    loss_type: str = "dapo"
    beta: float = 0.0
    mask: bool = False
    calls: int = 1
    support: bool = False
    logits: bool = False
    logps: bool = False

    def run(self) -> Recorder:
        with recording() as recorder:
            weight = new(self.vocab, self.hidden)
            for _ in range(self.calls):
                hidden = new(self.rows, self.hidden)
                self._call((new(self.rows, self.vocab),) if self.logits else (hidden, weight, None))
        return recorder

    def _call(self, tensors: tuple[Tensor | None, ...]) -> None:
        flags = (*self.wants, False)[: len(tensors)]
        wanted = Wanted(*flags, *[False] * (3 - len(flags)))
        if self.logps:
            like = new(self.rows, dtype=torch.int64)
            call = Call(tensors=tensors, like=like, backend="triton")
            call.wanted = wanted
            self._logps(call.find_targets())
            return
        shape = (8, self.rows // 8) if self.mask else (self.rows,)
        support = None
        if self.support:
            ids = new(self.rows * SET_SIZE, dtype=torch.int32)
            support = Support(ids, new(self.rows + 1, dtype=torch.int64))
        call = Call(
            tensors=tensors, like=new(*shape, dtype=torch.int64), backend="triton",
            config=LossConfig(loss_type=self.loss_type, beta=self.beta),
            advantages=new(8, dtype=torch.float32), support=support,
            completion_mask=new(*shape, dtype=torch.bool) if self.mask else None,
            cu_seqlens=None if self.mask else new(9, dtype=torch.int32),
            old_logps=new(*shape, dtype=torch.float32),
            ref_logps=new(*shape, dtype=torch.float32) if self.beta else None,
            num_items_in_batch=self.rows,
        )  # fmt: skip
        call.wanted = wanted
        result = autograd.loss_from_logits(call.find_tokens(), tensors)
        needed = [x for x in result.gradients if x.numel()]
        autograd.scale_(needed, [result.loss] * len(needed))

    def _logps(self, call: Call) -> None:
        """Compute logps and their gradients, as autograd would."""
        needs = call.wanted[: len(call.tensors)]
        context = Context(needs_input_grad=(False, *needs))
        logps, *_ = autograd.LogpsFunction.forward(context, call, *call.tensors)
        if any(call.wanted):
            with torch.no_grad():
                autograd.LogpsFunction.backward(context, torch.empty_like(logps), None)


class Budget(NamedTuple):
    """Counts of a trace.

    Attributes:
        chunks: number of chunks of all calls.
        per_chunk: number of launches in the largest chunk.
        outside: number of launches of one call outside of its chunks.
        syncs: number of times that the host waits in one call while the GPU has no other work.
        reads: number of times that the host waits in one call while the GPU has other work.
        gigabytes: memory traffic in GB of all operations except matrix products.
        products: flops of the matrix products, as a multiple of N·V·H.
    """

    chunks: int
    per_chunk: int
    outside: int
    syncs: int
    reads: int
    gigabytes: float
    products: float

    @classmethod
    def of(cls, recorder: Recorder, case: Case) -> Budget:
        phases = collections.Counter(x.phase for x in recorder.launches)
        totals = phases.pop("outside", 0), len(recorder.syncs), len(recorder.reads)
        outside, syncs, reads = (-(-total // case.calls) for total in totals)
        per_chunk = max(phases.values(), default=0)
        moved = sum(x.bytes for x in recorder.launches)
        work = case.calls * case.rows * case.hidden * case.vocab
        products = recorder.flops / work
        return cls(recorder.chunks, per_chunk, outside, syncs, reads, moved / 1e9, products)


CASES: dict[str, Case] = {
    "full, H = 4096": Case(8192, 4096),
    "full, H = 2048": Case(8192, 2048),
    "full, H = 896": Case(8192, 896),
    "1024 rows, H = 896": Case(1024, 896),
    "with KL": Case(8192, 4096, beta=0.1),
    "with a mask": Case(8192, 4096, mask=True),
    "frozen head (LoRA)": Case(8192, 4096, wants=(True, False)),
    "head alone": Case(8192, 4096, wants=(False, True)),
    "no gradient": Case(8192, 4096, wants=(False, False)),
    "linear_logps": Case(8192, 4096, wants=(False, False), logps=True),
    "linear_logps, gradient": Case(8192, 4096, logps=True),
    "linear_logps, gradient, 1024 rows": Case(1024, 896, logps=True),
    "logits_logps": Case(8192, 1, wants=(False, False), logits=True, logps=True),
    "logits_logps, gradient": Case(8192, 1, logits=True, logps=True),
    "logits_grpo_loss": Case(8192, 1, logits=True),
    "logits_grpo_loss, sequence level": Case(8192, 1, logits=True, loss_type="gspo"),
    "logits_grpo_loss, mask": Case(8192, 1, logits=True, mask=True),
    "with a mask, 1024 rows": Case(1024, 896, mask=True),
    "several chunks": Case(65536, 2048),
    "several chunks, sequence level": Case(65536, 2048, loss_type="gspo"),
    "three heads of one weight": Case(2048, 4096, calls=3),
    "support, 50 ids": Case(8192, 4096, support=True),
    "support, frozen head": Case(8192, 4096, support=True, wants=(True, False)),
    "sequence level": Case(8192, 4096, loss_type="gspo"),
    "sequence level, 1024 rows, H = 896": Case(1024, 896, loss_type="gspo"),
}


def main(arguments: list[str]) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    found = {name: Budget.of(case.run(), case) for name, case in CASES.items()}
    if options.json:
        print(json.dumps({name: budget._asdict() for name, budget in found.items()}))
        return
    rows = ((name, *(f"{value:.4g}" for value in budget)) for name, budget in found.items())
    columns = " | ".join(("case", *Budget._fields))
    print(*table("Work of one call on a GPU", columns, rows), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
