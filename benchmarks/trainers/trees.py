"""Time and memory of a model without its head, on trees of samples and on plain packed rows.

    python -m benchmarks.trainers.trees [--quick] [--hybrid] [--json PATH]

A tree stores each common prefix of the samples once. Plain packing repeats it for each sample. The
cases are a group of 16 completions of one long prompt, an agent that branches in two at each of
four turns, and combs, which are conversations with a side branch at every turn. Every sample is
trained on its last turn. With --hybrid, models with recurrent layers are timed on a group of 8
completions of one prompt.

The outputs and all gradients of both layouts are compared before they are timed. On a CPU, all
lengths are divided by 4. With one thread, which is the default, the CPU time of the process is
measured, because other programs hardly affect it.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.kernels.exact import TOLERANCE, relative_l2
from benchmarks.options import parsed, save, timing_parser
from grpo_fast.attention import PackedTree, dispatch, pack_tree, prepare
from grpo_fast.attention.dispatch import Kind

BUDGET, ROUNDS = (8.0, 0.2), (3, 3)  # without --quick, with --quick
LAYERS = 1
Turns = list[range]  # token ids of each turn of a sample
Step = Callable[[], Any]  # returns the output and the gradients


class Heads(NamedTuple):
    """Sizes of a model.

    Attributes:
        name: name of the model.
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: size of a head.
        intermediate: size of the MLP.
        kind: model type of transformers.
        fields: further fields of its configuration.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    kind: str = "qwen2"
    fields: dict[str, Any] = {}


CPU_MODELS = [Heads("gsm8k-tiny", 6, 3, 32, 512)]
GPU_MODELS = [Heads("Qwen2.5-0.5B", 14, 2, 64, 4864), Heads("Qwen2.5-7B", 28, 4, 128, 18944)]
HYBRIDS = [
    Heads("qwen3_5", 4, 2, 32, 256, "qwen3_5_text", {
        "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    }),
    Heads("nemotron_h", 4, 2, 32, 256, "nemotron_h", {
        "num_hidden_layers": 4, "head_dim": 32, "ssm_state_size": 32, "mamba_num_heads": 8,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_head_dim": 32, "n_groups": 2, "chunk_size": 64,
    }),
]  # fmt: skip


def turns(first: int, *sizes: int) -> list[range]:
    """Return consecutive ranges of token ids with the given sizes. They begin at `first`."""
    ends = [first + sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def group(prompt: int, completion: int, count: int) -> list[Turns]:
    first, *rest = turns(0, prompt, *[completion] * count)
    return [[first, turn] for turn in rest]


def agent(branches: int, levels: int, divisor: int) -> list[Turns]:
    """Return all samples of an agent whose conversation splits into `branches` at each turn.

    A turn has 512 / `divisor` tokens.
    """
    root, *free = turns(0, *[512 // divisor] * sum(branches**level for level in range(levels + 1)))
    paths, unused = [[root]], iter(free)
    for _ in range(levels):
        paths = [[*path, next(unused)] for path in paths for _ in range(branches)]
    return paths


def combs(leaves: tuple[int, ...], prompt: int, tokens: int) -> list[Turns]:
    """Return the samples of conversations with side branches. Each sample ends with one of them."""
    paths: list[Turns] = []
    first = 0
    for count in leaves:
        trunk, *free = turns(first, prompt, *[tokens] * 2 * count)
        history = [trunk]
        for turn, leaf in zip(free[::2], free[1::2], strict=True):
            history = [*history, turn]
            paths.append([*history, leaf])
        first += prompt + 2 * tokens * count
    return paths


# Each case is a function that takes a divisor for all lengths and returns the samples.
CASES: dict[str, Callable[[int], list[Turns]]] = {
    "16 completions of a prompt": lambda n: group(8192 // n, 512 // n, 16),
    "binary agent, 4 turns": functools.partial(agent, 2, 4),
    "combs of 20 and 21 turns": lambda n: combs((20, 21), 1250 // n, 256 // n),
}
HYBRID_CASES = {"8 completions of a prompt": lambda n: group(4096 // n, 512 // n, 8)}


def main() -> None:
    """Time every case, and write the report."""
    parser = timing_parser(__doc__, threads=1)
    parser.add_argument("--hybrid", action="store_true", help="time models with recurrent layers")
    options = parsed(parser, BUDGET, ROUNDS)
    on_cpu = options.device == "cpu"
    options.divide = 64 if options.quick else 4 if on_cpu else 1
    options.dtype = torch.float32 if on_cpu else torch.bfloat16
    models = HYBRIDS if options.hybrid else CPU_MODELS if on_cpu else GPU_MODELS
    rows = []
    for name, paths in (HYBRID_CASES if options.hybrid else CASES).items():
        for model in models:
            rows.append(time_case(name, paths(options.divide), model, options))
    layers = [model.fields.get("num_hidden_layers", LAYERS) for model in models]
    settings = {"divide": options.divide, "layers": layers, "dtype": str(options.dtype)}
    title = "a trunk over trees of samples, against plain packing, forward + backward"
    save(options, title, settings, cases=rows)


def time_case(name: str, paths: list[Turns], model: Heads, options: Any) -> dict[str, Any]:
    """Verify a case, and measure its time and memory in both layouts. Return its row."""
    samples = []
    for path in paths:
        ids = torch.cat([torch.arange(turn.start, turn.stop) for turn in path])
        samples.append((ids, torch.arange(len(ids)) >= len(ids) - len(path[-1])))
    tree = pack_tree(samples, device=options.device)
    flat = pack_tree(samples, apart=range(len(samples)), device=options.device)
    vocabulary = max(int(ids.max()) for ids, _ in samples) + 1
    layouts = {"flat": flat, "tree": tree}
    steps, error = trunk_steps(layouts, model, vocabulary, flat.layout.longest_context, options)
    tokens = {"flat": flat.layout.total, "tree": tree.layout.total}
    row: dict[str, Any] = {
        "case": name, "model": model.name, "samples": len(samples), "tokens": tokens,
        "levels": len(tree.layout.calls), "difference": error,
        "tokens_ratio": tokens["flat"] / tokens["tree"],
        "kernel": dispatch.choose(Kind(options.device, options.dtype, model.head_dim)).name,
    }  # fmt: skip
    label = f"{name:<26} {model.name:<14} {row['kernel']:<10}"
    if not error <= TOLERANCE[options.dtype]:  # also refuses NaN
        print(f"{label} WRONG, not timed: difference {error:.1g}", flush=True)
        return row | {"wrong": True}
    row["times"] = measure.measured(steps, options)
    packed, shared = (row["times"][layout] for layout in layouts)
    row["ratio"] = packed["median_ms"] / shared["median_ms"]
    row["memory_ratio"] = packed["workspace_mib"] / max(shared["workspace_mib"], 2**-10)
    times = f"flat {packed['median_ms']:9.2f} ms  tree {shared['median_ms']:9.2f} ms"
    ratios = f"ratio {row['ratio']:5.2f} (tokens {row['tokens_ratio']:.2f})"
    print(f"{label} {times}  {ratios}  memory {row['memory_ratio']:.2f}  difference {error:.1g}",
          flush=True)  # fmt: skip
    return row


def trunk_steps(
    layouts: dict[str, Any], model: Heads, vocabulary: int, positions: int,
    options: argparse.Namespace,
) -> tuple[dict[str, Step], float]:  # fmt: skip
    """Build a random trunk. Return a step per layout, and the relative error between them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {
        "vocab_size": vocabulary, "max_position_embeddings": positions,
        "hidden_size": model.heads * model.head_dim, "intermediate_size": model.intermediate,
        "num_hidden_layers": LAYERS, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, **model.fields,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(model.kind, **fields)
    lm = AutoModelForCausalLM.from_config(config).to(options.device, options.dtype)
    prepare(lm)
    trunk = lm.base_model
    first, *_ = layouts.values()
    grad = torch.randn(len(first.predicting), config.hidden_size).to(options.device, options.dtype)
    steps = {name: model_step(trunk, pack, grad) for name, pack in layouts.items()}
    results, expected = steps["tree"](), steps["flat"]()
    # Rounding dominates a gradient that is much smaller than the largest one, such as that of the
    # decay of Gated DeltaNet. Compare it with 1/100 of the largest.
    sizes = [float(y.norm()) for y in expected]
    least = max(sizes) / 100
    pairs = zip(results, expected, sizes, strict=True)
    return steps, max(relative_l2(x, y) * min(size / least, 1) for x, y, size in pairs if size)


def model_step(trunk: Any, pack: PackedTree, grad: Tensor) -> Step:
    parameters = list(trunk.parameters())

    def step() -> tuple[Tensor, ...]:
        hidden = trunk(**pack.model_inputs).last_hidden_state[0].index_select(0, pack.predicting)
        return hidden.detach(), *torch.autograd.grad(hidden, parameters, grad)

    return step


if __name__ == "__main__":
    main()
