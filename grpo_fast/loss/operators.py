"""Custom operators for the losses and logps.

torch.compile(fullgraph=True) puts each operator into its graph as one node. Operator schemas
support only tensors, numbers, strings and lists, so this module packs the config and the tensors of
a call into a flat list of arguments.

Eager calls do not use the operators, because the dispatcher of torch costs 0.2 ms per call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_fast.kernels import NAMESPACE
from grpo_fast.kernels.head.half_range import needs_scaling
from grpo_fast.kernels.types import Context
from grpo_fast.loss.arguments import BatchInputs, Options, RowOptions, RowTensors
from grpo_fast.loss.autograd import (
    NO_DOUBLE_BACKWARD,
    Gradients,
    LogpsPass,
    LossValues,
    scaled_gradients,
    with_units,
)
from grpo_fast.loss.batch import TokenBatch
from grpo_fast.loss.passes import LossResult, linear_loss, logits_loss, logps_loss
from grpo_fast.loss.schema import (
    BATCH,
    NUM_OPTIONS,
    OPTIONS,
    ROWS,
    Argument,
    Row,
    from_graph,
    graph_fields,
)
from grpo_fast.objective.aggregation import Total
from grpo_fast.objective.config import LossConfig
from grpo_fast.objective.metrics import metric_names

HEAD = "Tensor hidden, Tensor weight, Tensor? bias"
LOGITS = "Tensor logits"
STATS = "Tensor logps, Tensor entropy, Tensor lse"
# Number of outputs of a loss operator before the gradients: loss, logps, entropies, metrics of
# grad_filter, other metrics, and the `units` of `LossResult`.
NUM_OUTPUTS = 6


LOSSES: dict[str, Callable[..., LossResult]] = {
    "linear": linear_loss, "logits": logits_loss, "given_logps": logps_loss,
}  # fmt: skip
library = torch.library.Library(NAMESPACE, "DEF")
operators = getattr(torch.ops, NAMESPACE)


def compiled_loss(
    name: str, tensors: RowTensors, options: Options, config: LossConfig, inputs: BatchInputs
) -> tuple[LossValues, Callable[..., dict[str, Tensor]]]:
    """Call the operator of a loss.

    Returns:
        The outputs of the operator, and a function that computes the metrics.
    """
    row = _pack_arguments(config, inputs)
    known = graph_fields(options)
    outputs = getattr(operators, f"{name}_loss")(*tensors, *known, *row)
    loss, logps, entropy, filtered, metrics = outputs[:5]
    has_entropy = _has_entropy(name, tensors, config)
    entropy = entropy if has_entropy else None
    filtered = None if options.grad_filter is None else filtered
    names = metric_names(config, inputs.sampling_logps is not None, has_entropy)
    named = dict(zip(names, metrics.detach().unbind(), strict=True))
    return (loss, logps, entropy, filtered, None), lambda *_: named


def compiled_logps(tensors: RowTensors, options: RowOptions) -> tuple[Tensor, Tensor]:
    """Call the operator for logps from hidden states or from logits.

    Returns:
        The logps (N,), and the entropies (N,), or (0,) if they are not requested.
    """
    name = "linear_logps" if len(tensors) == 3 else "logits_logps"
    logps, entropy, _ = getattr(operators, name)(*tensors, *graph_fields(options))
    return logps, entropy


def _pack_arguments(config: LossConfig, inputs: BatchInputs) -> Row:
    """Return config and inputs as a flat list of values that an operator schema can describe."""

    def tensor(x: Total | None) -> Tensor | None:
        if x is None or isinstance(x, Tensor):
            return x
        return torch.full((), float(x), dtype=torch.float64, device=inputs.like.device)

    inputs = inputs._replace(like=inputs.like.detach())
    temperature = config.temperature if isinstance(config.temperature, Tensor) else None
    return [*(tensor(x) for x in inputs), temperature, config.key]


def _unpack_arguments(row: Row) -> tuple[LossConfig, BatchInputs]:
    """Return the config and the inputs from a list that `_pack_arguments` created."""
    *inputs, temperature, key = row
    config = LossConfig.from_key(key)
    config = config if temperature is None else config.replace(temperature=temperature)
    return config, BatchInputs(*inputs)


def _has_entropy(name: str, tensors: RowTensors, config: LossConfig) -> bool:
    return config.needs_entropy if name != "given_logps" else tensors[1] is not None


def _empty(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _gradient(x: Tensor, is_wanted: bool) -> Tensor:
    """Return an uninitialised tensor with the shape of x, or an empty one if it is not needed."""
    if not is_wanted:
        return x.new_empty(0)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _register(
    name: str,
    schema: str,
    run: Callable[..., Tensor | tuple[Tensor, ...]],
    fake: Callable[..., Tensor | tuple[Tensor, ...]],
    backward: Callable[[Context, Row, Sequence[Tensor | None]], Sequence[Tensor | None]]
    | None = None,
) -> None:
    """Register a custom operator with its fake implementation and its backward function.

    Args:
        name: name of the operator in the namespace of the package.
        schema: arguments and outputs of the operator.
        run: the implementation.
        fake: returns outputs with the right shapes and without data, for tracing.
        backward: `backward(ctx, inputs, grads)` returns the gradients of the leading inputs, which
            are the differentiable ones. None if the operator is not differentiable.
    """
    library.define(f"{name}{schema}")
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    if backward is None:
        return

    def remember(ctx: Context, inputs: Row, output: Sequence[Tensor]) -> None:
        ctx.set_materialize_grads(False)
        # save_for_backward accepts only tensors, so store the other inputs in `others`. In this
        # list, None marks the position of a tensor. Other inputs are put into tuples, because such
        # an input may itself be None.
        ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
        ctx.output = [x.detach() for x in output]

    def recall(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if other is None else other[0] for other in ctx.others]
        gradients = backward(ctx, inputs, grads)
        return *gradients, *[None] * (len(inputs) - len(gradients))

    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", recall, setup_context=remember, lib=library
    )


def _fake_loss(name: str, tensors: RowTensors, options: Options, row: Row) -> tuple[Tensor, ...]:
    """Return uninitialised outputs of a loss operator.

    Their shapes do not depend on the values of the arguments.
    """
    x = tensors[0]
    config, given = _unpack_arguments(row)
    rows = given.like.numel()
    wanted = options.wanted
    has_entropy = _has_entropy(name, tensors, config)
    units = 0
    if name == "given_logps":
        # `logps_loss` computes both gradients in fp32, whatever the dtypes of the inputs are.
        wanted = [True, has_entropy and config.entropy_coef != 0]
        tensors = tuple(x.float() for _ in wanted)
    elif any(wanted) and needs_scaling(x.dtype):
        units = len(tensors)
    metrics = metric_names(config, given.sampling_logps is not None, has_entropy)
    entropies = rows if has_entropy else 0
    shares = 2 if options.grad_filter is not None else 0
    sizes = rows, entropies, shares, len(metrics), units
    likes = (tensors[0] if t is None else t for t in tensors)
    gradients = (_gradient(t, is_wanted) for t, is_wanted in zip(likes, wanted, strict=False))
    return (_empty(x), *(_empty(x, n) for n in sizes), *gradients)


def _register_loss(name: str, tensors: str) -> None:
    count = tensors.count("Tensor")
    end = count + NUM_OPTIONS

    def split(inputs: Row) -> tuple[RowTensors, Options, Row]:
        return inputs[:count], from_graph(Options, inputs[count:end]), inputs[end:]

    def run(*inputs: Argument) -> tuple[Tensor, ...]:
        tensors, options, row = split(inputs)
        batch = TokenBatch.build(tensors, options, *_unpack_arguments(row))
        result = LOSSES[name](*tensors, batch=batch, options=options)
        metrics = torch.stack(list(batch.metrics(result.logps, result.entropy).values()))
        # Return an empty tensor in place of a missing output. An operator must return a tensor for
        # every output, and no two outputs may share memory.
        nothing = result.loss.new_empty(0)
        optional = result.entropy, result.filtered, metrics, result.units
        extras = [nothing.clone() if x is None else x for x in optional]
        return (result.loss, result.logps, *extras, *result.gradients)

    def fake(*inputs: Argument) -> tuple[Tensor, ...]:
        return _fake_loss(name, *split(inputs))

    def backward(ctx: Context, inputs: Row, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        def gradients_of(output: Sequence[Tensor]) -> Gradients:
            return with_units(tuple(inputs[:count]), tuple(output[NUM_OUTPUTS:]), output[5])

        def recompute() -> Gradients:
            return gradients_of(getattr(operators, f"{name}_loss")(*inputs))

        # Use the gradients of the forward operator at most once, because `scaled_gradients`
        # multiplies them in place. A second backward computes them again.
        output = ctx.output
        ctx.output = None
        ctx.gradients = None if output is None else gradients_of(output)
        return scaled_gradients(ctx, grads[0], ctx.needs_input_grad[:count], recompute)

    outputs = ", ".join(["Tensor"] * (NUM_OUTPUTS + count))
    schema = f"({tensors}, {OPTIONS}, {BATCH}) -> ({outputs})"
    _register(f"{name}_loss", schema, run, fake, backward)


def _register_logps(name: str, tensors: str) -> None:
    count = tensors.count("Tensor")

    def run(*inputs: Argument) -> tuple[Tensor, ...]:
        # Pass keep=False, because an operator cannot pass cached logits from forward to backward.
        options = from_graph(RowOptions, inputs[count:])
        return LogpsPass(inputs[:count], options).outputs(keep=False)[0]

    def fake(*inputs: Argument) -> tuple[Tensor, ...]:
        options = from_graph(RowOptions, inputs[count:])
        rows = options.target_ids.numel()
        sizes = rows, rows if options.return_entropy else 0, rows
        return tuple(_empty(inputs[0], n) for n in sizes)

    def as_output(gradients: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return gradients[0] if count == 1 else tuple(gradients)  # torch unwraps a single output

    def run_grad(*inputs: Argument) -> Tensor | tuple[Tensor, ...]:
        *rest, d_logps, d_entropy, wanted = inputs
        outputs = rest[-3:]
        options = from_graph(RowOptions, rest[count:-3])
        has_entropy = d_entropy is not None
        work = LogpsPass(rest[:count], options, entropy_gradient=has_entropy, wanted=wanted)
        return as_output(work.gradients(work.saved_stats(*outputs), d_logps, d_entropy, wanted))

    def fake_grad(*inputs: Argument) -> Tensor | tuple[Tensor, ...]:
        likes = (inputs[0] if x is None else x for x in inputs[:count])
        return as_output(tuple(map(_gradient, likes, inputs[-1])))

    def backward(ctx: Context, inputs: Row, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        needs = ctx.needs_input_grad[:count]
        if grads[0] is None and grads[1] is None:
            return [None] * count
        # Compute the gradients by an operator, too, so that they are one node of the backward
        # graph.
        operator = getattr(operators, f"{name}_logps_grad")
        gradients = operator(*inputs, *ctx.output, grads[0], grads[1], list(needs))
        gradients = (gradients,) if count == 1 else gradients
        return [x if need else None for x, need in zip(gradients, needs, strict=True)]

    _register(f"{name}_logps", f"({tensors}, {ROWS}) -> ({STATS})", run, fake, backward)
    upstream = "Tensor? d_logps, Tensor? d_entropy, bool[] wanted"
    gradients = ", ".join(["Tensor"] * count)
    schema = f"({tensors}, {ROWS}, {STATS}, {upstream}) -> ({gradients})"
    _register(f"{name}_logps_grad", schema, run_grad, fake_grad)


_register_loss("linear", HEAD)
_register_loss("logits", LOGITS)
_register_loss("given_logps", "Tensor logps, Tensor? entropy")
_register_logps("linear", HEAD)
_register_logps("logits", LOGITS)
