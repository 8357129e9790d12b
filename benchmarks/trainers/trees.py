"""Trees of samples against plain packing: a trunk's forward + backward, and its memory.

    python -m benchmarks.trainers.trees [--quick] [--json PATH]

A group of 16 completions of one long prompt; an agent that branches in two at each of four turns;
combs, conversations that branch once at every turn. Every sample is trained on its last turn. Both
layouts compute the same, which is verified (outputs, all gradients) before anything is timed. On a
CPU the time is the process's own, so that other work on the machine does not count.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import measure
from benchmarks.kernels.exact import TOLERANCE, relative_l2
from benchmarks.trainers.attention import CPU_MODELS, GPU_MODELS, Heads, model_step
from benchmarks.trainers.options import Defaults, new_parser, parsed, save
from grpo_fast.attention import dispatch, pack_tree, register
from grpo_fast.attention.dispatch import Kind

DEFAULTS = Defaults(threads=1, budget=(30.0, 0.2), rounds=(3, 3))
LAYERS = 1
Turns = list[range]  # the turns of a sample, as runs of token ids


def turns(first: int, *sizes: int) -> list[range]:
    """Runs of ids that nobody else has, one for each size."""
    ends = [first + sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def group(prompt: int, completion: int, count: int) -> list[Turns]:
    first, *rest = turns(0, prompt, *[completion] * count)
    return [[first, turn] for turn in rest]


def binary(levels: int, tokens: int) -> list[Turns]:
    """An agent that branches in two at every turn."""
    root, *free = turns(0, *[tokens] * 2 ** (levels + 1))
    paths, unused = [[root]], iter(free)
    for _ in range(levels):
        paths = [[*path, next(unused)] for path in paths for _ in range(2)]
    return paths


def combs(leaves: tuple[int, ...], prompt: int, tokens: int) -> list[Turns]:
    """Conversations that branch once at each turn."""
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


CASES = {
    "8k prompt, 16 x 512": lambda: group(8192, 512, 16),
    "binary agent, 4 turns": lambda: binary(4, 512),
    "combs of 20 and 21 turns": lambda: combs((20, 21), 1250, 256),
}
QUICK = {
    "64 prompt, 4 x 8": lambda: group(64, 8, 4),
    "binary agent, 3 turns": lambda: binary(3, 8),
    "comb of 6 turns": lambda: combs((6,), 20, 5),
}


def main() -> None:
    """Time every case, print a table, write the JSON."""
    options = parsed(new_parser(__doc__), DEFAULTS)
    if options.device == "cpu":
        measure.clock = "process"
    options.dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    rows = []
    for name, paths in (QUICK if options.quick else CASES).items():
        for model in CPU_MODELS if options.device == "cpu" else GPU_MODELS:
            rows.append(time_case(name, paths(), model, options))
    settings = {name: getattr(options, name) for name in ("budget", "rounds", "threads")}
    settings |= {"dtype": str(options.dtype), "clock": measure.clock, "layers": LAYERS}
    what = "a trunk over trees of samples, against plain packing, forward + backward"
    save(options, {**measure.header(what, options.device), "settings": settings, "cases": rows})


def time_case(name: str, paths: list[Turns], model: Heads, options: Any) -> dict[str, Any]:
    """Verify, time and weigh one case in both layouts."""
    from transformers import Qwen2Config, Qwen2Model

    samples = []
    for path in paths:
        ids = torch.cat([torch.arange(turn.start, turn.stop) for turn in path])
        samples.append((ids, torch.arange(len(ids)) >= len(ids) - len(path[-1])))
    tree = pack_tree(samples, device=options.device)
    flat = pack_tree(samples, apart=range(len(samples)), device=options.device)
    config = Qwen2Config(
        vocab_size=max(int(ids.max()) for ids, _ in samples) + 1,
        hidden_size=model.heads * model.head_dim, intermediate_size=model.intermediate,
        num_hidden_layers=LAYERS, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads, max_position_embeddings=flat.layout.longest_context,
    )  # fmt: skip
    torch.manual_seed(0)
    trunk = Qwen2Model(config).to(options.device, options.dtype)
    trunk.set_attn_implementation(register())
    grad = torch.randn(len(tree.predicting), config.hidden_size).to(options.device, options.dtype)
    steps = {key: model_step(trunk, pack, grad) for key, pack in (("flat", flat), ("tree", tree))}
    pairs = zip(steps["tree"](), steps["flat"](), strict=True)
    error = max(relative_l2(x, y) for x, y in pairs if y.abs().max() > 0)
    tokens = {"flat": flat.layout.total, "tree": tree.layout.total}
    row: dict[str, Any] = {
        "case": name, "model": model.name, "samples": len(samples), "tokens": tokens,
        "levels": len(tree.layout.views), "difference": error,
        "tokens_ratio": tokens["flat"] / tokens["tree"],
        "kernel": dispatch.choose(Kind(options.device, options.dtype, model.head_dim)).name,
    }  # fmt: skip
    if not error <= TOLERANCE[options.dtype]:
        print(f"{name} WRONG: the layouts differ by {error:.2g}; not timed", flush=True)
        return row | {"wrong": True}
    times = measure.interleaved(steps, options.device, options.budget, options.rounds)
    row["times"] = {key: measure.spread(seconds) for key, seconds in times.items()}
    row["memory"] = {key: measure.peak_memory(step, options.device) for key, step in steps.items()}
    used = {key: memory["workspace_mib"] for key, memory in row["memory"].items()}
    ms = {key: spread["median_ms"] for key, spread in row["times"].items()}
    row["ratio"] = ms["flat"] / ms["tree"]
    row["memory_ratio"] = used["flat"] / used["tree"]
    print(
        f"{name:<26} {model.name:<14} {row['kernel']:<10} flat {ms['flat']:9.1f} ms  tree "
        f"{ms['tree']:9.1f} ms  ratio {row['ratio']:5.2f} (tokens {row['tokens_ratio']:.2f})  "
        f"memory {row['memory_ratio']:.2f}  difference {error:.1g}", flush=True,
    )  # fmt: skip
    return row


if __name__ == "__main__":
    main()
