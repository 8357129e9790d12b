"""The public functions: signatures, documents, one call each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grpo_fast.kernels.support import Support
from grpo_fast.kernels.teachers import DivergenceTerm
from grpo_fast.loss import call, checks
from grpo_fast.loss.arguments import BatchInputs, Options, RowOptions, support_fields
from grpo_fast.loss.autograd import needs_gradient
from grpo_fast.loss.call import LossOutput as LossOutput
from grpo_fast.loss.divergence import checked_term
from grpo_fast.loss.ranks import Agreement
from grpo_fast.loss.values import raise_pending
from grpo_fast.objective.config import LossConfig


@call.outside_of_graphs("group")
def linear_logps(
    hidden: Tensor,  # (B, L, H) or (T, H)
    lm_head_weight: Tensor,  # (V, H)
    target_ids: Tensor,  # (B, L) or (T,)
    *,
    bias: Tensor | None = None,  # (V,)
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    entropy_over: str = "support",
    hidden_rows: Tensor | None = None,  # the shape of target_ids
    support: Support | None = None,
    group: object = None,
    backend: str = "auto",
) -> Any:  # logps, or (logps, entropy)
    """Log-probabilities of the targets, and entropies, from hidden states, without whole logits.

    Equals, in exact arithmetic::

        z = logit_scale * (hidden @ lm_head_weight.T + bias)
        z = softcap * tanh(z / softcap)            # when softcap is set
        logp_all = log_softmax(z / temperature, -1)
        logps = logp_all.gather(-1, target_ids)    # entropy = -(logp_all.exp() * logp_all).sum(-1)

    Row t holds the prediction of `target_ids[t]`: the shift is the caller's. Differentiable in
    hidden, weight and bias (once; no double backward). Sums are fp32 or better. Where a gradient is
    wanted, as many logits as GRPO_FAST_WORKSPACE_MIB holds are kept until the backward pass.

    Args:
        hidden: fp32, bf16, fp16 (or fp64, on the torch backend).
        lm_head_weight, bias: of hidden's device, the weight in its dtype. A parameter that FSDP2
            shards (a DTensor over one mesh dimension) is gathered, on all ranks together, and its
            gradient averaged over them; inside the forward of the FSDP2 module it is whole anyway.
        target_ids: int64 or int32 in [0, V); -100 marks a row without a target: logp 0 and no
            gradient.
        temperature: a number > 0, or a float tensor of the shape of target_ids.
        entropy_over: with a support, entropies are over the ids in it ("support"), or over the
            whole "vocabulary", which costs the dense product. See `LossConfig.entropy_over`.
        hidden_rows: int64 or int32, the row of a (R, H) hidden that predicts each target; a row may
            predict several (the last one of a shared prompt does). None: row t, target t.
        support: see `Support`; not beside group, nor in a CUDA graph.
        group: ranks that share the head (tensor parallel), as a process group or a mesh of one
            dimension. Every rank has the same hidden and targets, and rows of the vocabulary of its
            own, in the order of the ranks: a plain weight of any number of rows, 0 included, or a
            DTensor with Shard(0) (`group=weight.device_mesh`); the bias likewise. Outputs and the
            gradient of hidden are whole on every rank. Forward and backward are calls of all ranks
            together; what one refuses, all refuse. Not in a graph of torch.compile, nor in a CUDA
            graph. None: the head is whole, or FSDP2's.
        backend: "auto", "torch", "cpu" (C++) or "triton"; an explicit one never falls back.

    Returns:
        logps, fp32 of the shape of target_ids; with `return_entropy` the pair (logps, entropy).

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    with Agreement(group) as ranks:
        raise_pending()
        tensors = call.head_tensors(hidden, lm_head_weight, bias, ranks)
        checks.hidden_layout(hidden, target_ids, hidden_rows)
        temperatures, number = checks.temperatures(target_ids, temperature)
        checks.logit_options(softcap, logit_scale, entropy_over, backend)
        checks.support(support, target_ids, is_shard=group is not None)
        support_ids, support_offsets = support_fields(support)
        options = RowOptions(
            hidden_rows=hidden_rows, target_ids=target_ids, temperatures=temperatures,
            temperature=number, softcap=None if softcap is None else float(softcap),
            logit_scale=float(logit_scale), return_entropy=return_entropy,
            entropy_over_vocabulary=return_entropy and entropy_over == "vocabulary",
            backend=backend, support_ids=support_ids, support_offsets=support_offsets,
            shard=ranks.shard(tensors[1]),
        )  # fmt: skip
        return call.logps(tensors, options, ranks)


def logits_logps(
    logits: Tensor,  # (B, L, V) or (T, V)
    target_ids: Tensor,  # (B, L) or (T,)
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    entropy_over: str = "support",
    support: Support | None = None,
    backend: str = "auto",
) -> Any:  # logps, or (logps, entropy)
    """`linear_logps` from raw logits, differentiable in them (once); arguments, errors: there."""
    raise_pending()
    checks.logits(logits, target_ids)
    temperatures, number = checks.temperatures(target_ids, temperature)
    checks.logit_options(softcap, logit_scale, entropy_over, backend)
    checks.support(support, target_ids)
    support_ids, support_offsets = support_fields(support)
    options = RowOptions(
        hidden_rows=None, target_ids=target_ids, temperatures=temperatures, temperature=number,
        softcap=None if softcap is None else float(softcap), logit_scale=float(logit_scale),
        return_entropy=return_entropy,
        entropy_over_vocabulary=return_entropy and entropy_over == "vocabulary", backend=backend,
        support_ids=support_ids, support_offsets=support_offsets,
    )  # fmt: skip
    return call.logps((_logit_rows(logits),), options)


def grpo_loss(
    logps: Tensor,  # (B, L) or (T,)
    advantages: Tensor,  # (B,) or the shape of logps
    config: LossConfig,
    *,
    completion_mask: Tensor | None = None,  # the shape of logps
    cu_seqlens: Tensor | None = None,  # (B+1,) for the packed layout
    old_logps: Tensor | None = None,  # the shape of logps
    ref_logps: Tensor | None = None,  # the shape of logps
    sampling_logps: Tensor | None = None,  # the shape of logps
    entropy: Tensor | None = None,  # the shape of logps
    num_items_in_batch: float | Tensor | None = None,
    num_completions_in_batch: float | Tensor | None = None,
) -> LossOutput:
    """The objective from per-token logps; differentiable in logps and entropy.

    The formulas are those of `linear_grpo_loss`; `config.temperature`, `softcap` and `logit_scale`
    belong to the logps. `entropy_coef != 0` and `top_entropy_quantile < 1` need an `entropy`.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    raise_pending()
    checks.given_logps(logps, entropy, config)
    tensors = logps.reshape(-1), None if entropy is None else entropy.reshape(-1)
    inputs = BatchInputs(
        logps, advantages, completion_mask, cu_seqlens, old_logps, ref_logps, sampling_logps,
        num_items_in_batch, num_completions_in_batch,
    )  # fmt: skip
    return call.loss("given_logps", tensors, Options([True, True]), config, inputs)


@call.outside_of_graphs("group", "divergence")
def linear_grpo_loss(
    hidden: Tensor,  # (B, L, H) or (T, H)
    lm_head_weight: Tensor,  # (V, H)
    target_ids: Tensor,  # (B, L) or (T,)
    advantages: Tensor,  # (B,) or the shape of target_ids
    config: LossConfig,
    *,
    bias: Tensor | None = None,  # (V,)
    completion_mask: Tensor | None = None,  # the shape of target_ids
    cu_seqlens: Tensor | None = None,  # (B+1,) for the packed layout
    old_logps: Tensor | None = None,  # the shape of target_ids
    ref_logps: Tensor | None = None,  # the shape of target_ids
    sampling_logps: Tensor | None = None,  # the shape of target_ids
    num_items_in_batch: float | Tensor | None = None,
    num_completions_in_batch: float | Tensor | None = None,
    hidden_rows: Tensor | None = None,  # the shape of target_ids
    support: Support | None = None,
    grad_filter: float | None = None,
    divergence: DivergenceTerm | None = None,
    group: object = None,
    backend: str = "auto",
    validate: str = "auto",
) -> LossOutput:
    """The loss and its gradients in one pass from hidden states; no (N, V) tensor exists.

    Equals, with `logps, entropy = linear_logps(hidden, lm_head_weight, target_ids, ...)`::

        loss = grpo_loss(logps, advantages, config, entropy=entropy, ...).loss

    that is Σ_t w_t·(ℓ_t·masks·sampling_ratio + beta·KL_t) - entropy_coef·Σ_t H_t/N, with ℓ by
    `config.loss_type`, KL by `config.kl_estimator` and w by `config.aggregation`
    (objective/README.md). Gradients are formed in the forward pass, for those of hidden, weight
    and bias that require one; rows whose coefficient is zero are left out of the GEMMs. In a CUDA
    graph nothing is left out, and values are not checked (kernels/gpu/capture.py).

    Args:
        hidden: padded (B, L, H) with target_ids (B, L), or packed (T, H) with target_ids (T,) and
            cu_seqlens. Row t holds the prediction of target_ids[t]; the shift is the caller's.
        lm_head_weight, bias, group: also as FSDP2 shards them, or one rank's rows of the
            vocabulary, with the group of these ranks; see `linear_logps`.
        target_ids: int64 or int32; anything (for example -100) where masked.
        advantages: one per completion, or one per token (where T = B: per completion).
        completion_mask: bool or 0/1; a masked slot is inert, whatever it holds. None: all count.
        cu_seqlens: int32 or int64 offsets of the completions in the packed layout, from 0 to T.
        old_logps: of the policy that generated the data; None: on-policy (ratio exactly 1).
        ref_logps: required when config.beta != 0.
        sampling_logps: of the sampler, for `config.corrections`.
        num_items_in_batch, num_completions_in_batch: active tokens and completions of the whole
            optimizer step, all ranks; with `aggregation="prompt_mean"` items are (B,) by prompt.
        hidden_rows, backend: as in `linear_logps`.
        divergence: adds coef·Σ_t w_t·D_t of a teacher, by 8·N·V·H flops in all. No grad_filter.
        support: the ids among which a truncating sampler drew each target: all is over these alone
            (`Support`). Not beside group or grad_filter, nor in a CUDA graph.
        grad_filter: opt-in, in (0, 1): vocabulary columns may be left out of the gradient GEMMs as
            long as they hold at most this share of Σ|d-logits| of a chunk (its bounds and metrics:
            kernels/head/grad_filter.py). Loss and logps stay exact; the gradient's bits depend on
            the batching. Not beside group.
        validate: "auto", or "full" to check device values at once (a sync on a GPU).

    Returns:
        LossOutput; `loss` is 0 with zero gradients when no token is active.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    with Agreement(group) as ranks:
        raise_pending()
        tensors = call.head_tensors(hidden, lm_head_weight, bias, ranks)
        checks.hidden_layout(hidden, target_ids, hidden_rows)
        checks.options(backend, validate, grad_filter, is_shard=(is_shard := group is not None))
        checks.support(support, target_ids, is_shard=is_shard, grad_filter=grad_filter)
        term = checked_term(divergence, tensors[1], target_ids, ranks, support, grad_filter)
        wanted = needs_gradient(*tensors)
        shard = ranks.shard(tensors[1])
        own = backend, validate, hidden_rows, grad_filter, *support_fields(support)
        options = Options(wanted, *own, shard, divergence=term)
        inputs = BatchInputs(
            target_ids, advantages, completion_mask, cu_seqlens, old_logps, ref_logps,
            sampling_logps, num_items_in_batch, num_completions_in_batch,
        )  # fmt: skip
        return call.loss("linear", tensors, options, config, inputs, ranks=ranks)


@call.outside_of_graphs("inplace")
def logits_grpo_loss(
    logits: Tensor,  # (B, L, V) or (T, V)
    target_ids: Tensor,  # (B, L) or (T,)
    advantages: Tensor,  # (B,) or the shape of target_ids
    config: LossConfig,
    *,
    completion_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampling_logps: Tensor | None = None,
    num_items_in_batch: float | Tensor | None = None,
    num_completions_in_batch: float | Tensor | None = None,
    support: Support | None = None,
    backend: str = "auto",
    validate: str = "auto",
    inplace: bool = False,
) -> LossOutput:
    """`linear_grpo_loss` from raw logits (before scale, softcap and temperature); arguments: there.

    With `inplace=True` the gradient is written over the logits, which must then not be read again
    (and allow one backward); otherwise they are untouched.
    """
    raise_pending()
    checks.logits(logits, target_ids)
    checks.options(backend, validate)
    checks.support(support, target_ids)
    tensors = (_logit_rows(logits),)
    if inplace:
        checks.inplace(logits, *tensors)
    own = backend, validate, None, None, *support_fields(support)
    options = Options(needs_gradient(logits), *own, inplace=inplace)
    inputs = BatchInputs(
        target_ids, advantages, completion_mask, cu_seqlens, old_logps, ref_logps, sampling_logps,
        num_items_in_batch, num_completions_in_batch,
    )  # fmt: skip
    return call.loss("logits", tensors, options, config, inputs)


def _logit_rows(logits: Tensor) -> Tensor:
    """(N, V) rows that lie contiguous, as the kernels read them; a copy where a view does not."""
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()
