"""Script that hashes the results of the public functions on a fixed set of cases.

Run the script before and after a change of the code that must not change any result. The hashes
depend on the kind of CPU and the torch version, so use the same machine for both runs.

    python -m tests.same_bits --store FILE     in a checkout of the commit before the change
    python -m tests.same_bits --against FILE   after the change; lists differences, status 1
    --engine host|triton|runs   torch and C++; Triton (needs TRITON_INTERPRET=1); whole runs

Each case calls a public function and its backward pass. Its hash covers the loss, the logps, the
entropy, the metrics and the gradients. With `--engine runs`, each case is a short training run of a
recipe. Its hash covers the final weights and every logged metric except timings.
"""

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPO_FAST_GEMM", "own")  # use our matrix products on every CPU
os.environ["GRPO_FAST_WORKSPACE_MIB"] = "1"  # split the large cases into several chunks

import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.triton_tools import interpreter  # noqa: F401  (its repairs)

import grpo_fast
from tests.loss_cases import LOSS_LEVELS, Case, default_mask, make_case, options_for, run, spans
from tests.oracles import WORDS, off_policy

ENGINES = {"host": ("torch", "cpu"), "triton": ("triton",), "runs": ()}
GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"
FEW = ["steps=5", "log.completions_every=0", "log.progress=false"]
KL = ["loss.beta=0.1", "reference.kind=synced", "reference.sync_every=2"]
RUNS: dict[str, list[str]] = {
    "sort": ["sort"],
    "sort mu": ["sort", "inner_iterations=2", "minibatches=2", "shuffle=completions", *KL],
    "ppo-sort": ["ppo-sort"],
    "gsm8k-tiny": ["gsm8k-tiny", f"data={GSM8K}", "eval.n=8", "rollout.max_new_tokens=24",
                   "warm_start.steps=10"],
    "corrected": ["sort", "rollout.correct_sampling=true", "rollout.top_p=0.8"],
    "lora": ["sort", "model.lora={r: 2}", "loss.beta=0.1", "reference.kind=frozen"],
    "ddp": ["sort", "distributed=ddp"],
    "fsdp2": ["sort", "distributed=fsdp2"],
}  # fmt: skip
Cases = Iterator[tuple[str, Callable[[], dict[str, Tensor | None]]]]


def outcome(function: str, case: Case, **how: Any) -> dict[str, Tensor | None]:
    """Call `loss_cases.run`, and return its results as a dictionary of tensors."""
    result = run(function, case, **how)
    named = {"loss": result.loss, "logps": result.logps, "entropy": result.entropy}
    return {**named, **{f"metrics/{k}": v for k, v in result.metrics.items()}, **result.grads}


def hashed(tensors: dict[str, Tensor | None]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        x = tensors[name]
        digest.update(name.encode())
        if x is not None:
            x = torch.where(x == 0, 0.0, x.detach().float())  # ignore the sign of zeros
            digest.update(x.contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def with_kl(loss_type: str) -> dict[str, float]:
    return {} if loss_type in ("kimi", "dro") else {"beta": 0.1}


def small_cases(
    backend: str,
    losses: Sequence[tuple[str, str]] = LOSS_LEVELS,
    layouts: Sequence[str] = ("padded", "packed"),
) -> Cases:
    """Yield cases with every loss, in every layout, for every loss function of the backend.

    Each element of `losses` is a pair (loss type, importance sampling level).
    """
    functions = ["linear", "logits", *(["logps"] if backend == "torch" else [])]
    for loss_type, level in losses:
        options = options_for(loss_type, level, compute_entropy=True, **with_kl(loss_type))
        case = make_case(3, sampling=True, **options)
        for layout, function in itertools.product(layouts, functions):
            name = f"{backend} {function} {layout} {loss_type} {level}"
            yield name, partial(outcome, function, case, layout=layout, backend=backend)


def large_case(dtype: torch.dtype, **options: Any) -> Case:
    """Return a case with about 250 active rows.

    Its vocabulary is so large that the package uses its fused kernels.
    """
    return make_case(
        5, H=24, V=2500, mask=default_mask().repeat(13, 1), dtype=dtype, sampling=True, **options
    )


def large_cases(
    backend: str, losses: tuple[tuple[str, str], ...], dtypes: tuple[torch.dtype, ...]
) -> Cases:
    for dtype in dtypes:
        for loss_type, level in losses:
            case = large_case(dtype, **options_for(loss_type, level, **with_kl(loss_type)))
            name = f"{backend} large {str(dtype)[6:]} {loss_type} {level}"
            yield name, partial(outcome, "linear", case, backend=backend)


def option_cases(backend: str) -> Cases:
    """Yield cases whose options select code paths that `small_cases` does not reach."""
    variants: dict[str, dict[str, Any]] = {
        "entropy bonus": {"entropy_coef": 0.05},
        "softcap": {"softcap": 5.0, "logit_scale": 0.7, "temperature": 0.8},
        "filters": {
            "corrections": [*WORDS["token_truncate"], off_policy(0.2)],
            "top_entropy_quantile": 0.7,
        },
        "sequence mask": {"corrections": WORDS["sequence_mask"]},
        "token mask": {"corrections": WORDS["token_mask"]},
        "no reference": {},
    }  # fmt: skip

    def later(function: str, case: Case, **how: Any) -> Callable[[], dict[str, Tensor | None]]:
        return partial(outcome, function, case, backend=backend, **how)

    for label, options in variants.items():
        case = make_case(4, sampling=True, **options_for("grpo", **options))
        for function in ("linear", "logits"):
            yield f"{backend} {function} {label}", later(function, case)
    case = make_case(4, **options_for("dapo"))
    yield f"{backend} on policy", later("linear", case.but(old=None))
    yield f"{backend} upstream", later("linear", case, upstream=0.3)
    narrow = make_case(4, dtype=torch.bfloat16, **options_for("dapo"))
    yield f"{backend} bfloat16", later("linear", narrow)
    yield f"{backend} filtered", later("linear", case, grad_filter=0.05)
    rows = torch.arange(sum(spans(case.mask))) // 2  # each hidden state has two targets
    yield f"{backend} hidden rows", later("linear", case, layout="packed", hidden_rows=rows)
    for dtype in (torch.float32, torch.bfloat16):
        name, options = f"{backend} logps {str(dtype)[6:]}", options_for("grpo")
        yield f"{name} small", partial(logps, make_case(6, dtype=dtype, **options), backend)
        if backend != "triton":
            yield f"{name} large", partial(logps, large_case(dtype, **options), backend)


def logps(case: Case, backend: str) -> dict[str, Tensor | None]:
    """Call `linear_logps` with gradients, and `linear_logps` and `logits_logps` without gradients.

    Returns:
        The results of the three calls and the gradients of the first call.
    """
    hidden, weight = (x.clone().requires_grad_() for x in (case.hidden, case.weight))
    ids = torch.where(case.mask, case.ids, -100)
    lp, h = grpo_fast.linear_logps(
        hidden, weight, ids, return_entropy=True, temperature=0.9, backend=backend
    )
    (lp.sum() + 0.1 * h.sum()).backward()
    with torch.no_grad():
        alone = grpo_fast.linear_logps(hidden, weight, ids, softcap=8.0, backend=backend)
        given = grpo_fast.logits_logps(case.logits, ids, backend=backend)
    return {
        "lp": lp, "h": h, "hidden": hidden.grad, "weight": weight.grad, "alone": alone,
        "given": given,
    }  # fmt: skip


def cases(engine: str) -> Cases:
    some = (("dapo", "token"), ("gspo", "sequence"), ("gmpo", "token"))
    for backend in ENGINES[engine]:
        if engine == "host":
            yield from small_cases(backend)
            yield from large_cases(backend, LOSS_LEVELS, (torch.float32,))
            yield from large_cases(backend, some, (torch.bfloat16, torch.float16))
        else:
            yield from small_cases(backend, some, ["packed"])
        yield from option_cases(backend)


def run_cases() -> Cases:
    for name, words in RUNS.items():
        if f"data={GSM8K}" in words and not GSM8K.is_dir():
            print(f"{name}: left out, no {GSM8K}")
        else:
            yield name, partial(trained, words)


def trained(words: list[str]) -> dict[str, Tensor | None]:
    """Train in a subprocess, and return the metrics of each step and the final weights.

    `words` are the recipe and the overrides of the command `grpo-fast train`.
    """
    from safetensors.torch import load_file

    from tests.train.runs import untimed

    alone = [sys.executable, "-W", "ignore", "-m", "grpo_fast"]
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "grpo_fast"]
    is_alone = not any(word.startswith("distributed=") for word in words)
    with tempfile.TemporaryDirectory() as folder:
        line = alone if is_alone else [*alone[:4], *launch]
        done = subprocess.run(
            [*line, "train", words[0], *FEW, *words[1:], f"output_dir={folder}/run"],
            capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        found: dict[str, Tensor | None] = {}
        for number, row in enumerate(untimed(Path(folder) / "run")):
            numbers = {key: value for key, value in row.items() if value is not None}
            found |= {f"{number}/{key}": torch.tensor(value) for key, value in numbers.items()}
        for file in sorted((Path(folder) / "run" / "model").glob("*.safetensors")):
            found |= load_file(file)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=tuple(ENGINES), default="host")
    files = parser.add_mutually_exclusive_group(required=True)
    files.add_argument("--store", type=Path)
    files.add_argument("--against", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    listed = run_cases() if options.engine == "runs" else cases(options.engine)
    found = {name: hashed(call()) for name, call in listed}
    if options.store is not None:
        options.store.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"stored {len(found)} cases")
        return 0
    expected = json.loads(options.against.read_text(encoding="utf-8"))
    changed = sorted(x for x in found.keys() | expected if found.get(x) != expected.get(x))
    unchanged = f"{len(found) - len(changed)} of {len(found)} cases have the stored bits"
    print(unchanged, *changed, sep="\n")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
