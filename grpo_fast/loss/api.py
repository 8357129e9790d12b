"""The public loss and logps functions, except `linear_divergence`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grpo_fast.kernels.divergence import DivergenceTerm
from grpo_fast.kernels.types import Support
from grpo_fast.loss import checks, entry
from grpo_fast.loss.autograd import loss_from_logits, loss_from_logps
from grpo_fast.loss.call import Call
from grpo_fast.loss.checks import raise_pending
from grpo_fast.loss.divergence import checked_term
from grpo_fast.loss.entry import LossOutput as LossOutput
from grpo_fast.loss.ranks import Agreement
from grpo_fast.objective.config import LossConfig


@entry.public
def linear_logps(
    hidden: Tensor,  # (B, L, H) or (T, H)
    lm_head_weight: Tensor,  # (V, H)
    target_ids: Tensor,  # (B, L) or (T,)
    *,
    bias: Tensor | None = None,  # (V,)
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    hidden_rows: Tensor | None = None,  # the shape of target_ids
    support: Support | None = None,
    group: object = None,
    backend: str = "auto",
) -> Any:  # logps, or (logps, entropy)
    """Compute log-probabilities of target tokens from hidden states without storing all logits.

    In exact arithmetic, the results equal::

        z = logit_scale * (hidden @ lm_head_weight.T + bias)
        z = softcap * tanh(z / softcap)            # only with a softcap
        logp_all = log_softmax(z / temperature, -1)
        logps = logp_all.gather(-1, target_ids[..., None])[..., 0]
        entropy = -(logp_all.exp() * logp_all).sum(-1)

    Row t of `hidden` predicts `target_ids[t]`, so the caller must shift the targets. First-order
    gradients flow to hidden, lm_head_weight and bias; double backward raises an error. Sums are
    accumulated in fp32 or fp64. Logits are cached for the backward pass up to the memory limit that
    the environment variable GRPO_FAST_WORKSPACE_MIB sets. Other logits are computed again.

    Args:
        hidden: (B, L, H) padded or (T, H) packed, in fp32, bf16 or fp16 (fp64 with the torch
            backend). The hidden states.
        lm_head_weight: (V, H), in the dtype and on the device of `hidden`. The weight of the LM
            head. A parameter sharded by FSDP2 (a DTensor over one mesh dimension) is gathered by a
            collective call, and its gradient is averaged over the ranks.
        target_ids: (B, L) or (T,), int64 or int32. Token ids in [0, V). -100 marks a row without a
            target, which gets logp 0, entropy 0 and no gradient.
        bias: (V,), any float dtype, on the device of `hidden`. The bias of the LM head, sharded
            like the weight. None: no bias.
        temperature: the sampling temperature, a number > 0.
        softcap: bound of the absolute logits, a number > 0 (`final_logit_softcapping` of Gemma).
            None: no bound.
        logit_scale: factor by which the logits are multiplied, not 0.
        return_entropy: if True, also return the entropy of each row.
        hidden_rows: the shape of target_ids, int64 or int32. The row of `hidden` (R, H) that
            predicts each target. A row may predict several targets, as the last row of a shared
            prompt does. None: row t predicts target t.
        support: the ids from which a truncating sampler drew each target (see `Support`). Cannot be
            combined with `group`, and is not available in a CUDA graph. None: the full vocabulary.
        group: process group, or one-dimensional device mesh, of the tensor-parallel ranks that
            share the vocabulary. Every rank passes the same `hidden` and `target_ids`, and only its
            own rows of the weight and the bias. These rows are a plain tensor, which may be empty,
            or a DTensor with placement Shard(0). Every rank gets the complete outputs and the
            complete gradient of `hidden`. The call is collective: if one rank raises, all ranks
            raise. Not available in a CUDA graph. None: the ranks do not share
            a vocabulary. The weight may still be sharded by FSDP2.
        backend: "auto", "torch", "cpu" (C++) or "triton". If you name a backend, it is used or an
            error is raised; there is no fallback.

    Returns:
        logps, fp32, of the shape of target_ids. With return_entropy=True the pair (logps, entropy),
        both of this shape.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value. The message names the
            argument.

    Example:
        >>> import torch
        >>> from grpo_fast import linear_logps
        >>> hidden = torch.randn(6, 16, requires_grad=True)
        >>> lm_head_weight = torch.randn(100, 16, requires_grad=True)
        >>> target_ids = torch.randint(100, (6,))
        >>> logps = linear_logps(hidden, lm_head_weight, target_ids)
        >>> logps.shape
        torch.Size([6])
        >>> logps.sum().backward()
    """
    with Agreement(group) as ranks:
        raise_pending()
        tensors = entry.head_tensors(hidden, lm_head_weight, bias, ranks)
        checks.hidden_layout(hidden, target_ids, hidden_rows)
        call = Call(
            tensors=tensors, like=target_ids, temperature=temperature, softcap=softcap,
            logit_scale=logit_scale, return_entropy=return_entropy, backend=backend,
            support=support, hidden_rows=hidden_rows, shard=ranks.shard(tensors[1]),
        )  # fmt: skip
        return entry.logps(call, ranks)


@entry.public
def logits_logps(
    logits: Tensor,  # (B, L, V) or (T, V)
    target_ids: Tensor,  # (B, L) or (T,)
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_entropy: bool = False,
    support: Support | None = None,
    backend: str = "auto",
) -> Any:  # logps, or (logps, entropy)
    """Compute log-probabilities of target tokens from logits.

    The formula is the same as in `linear_logps`, with logits instead of `hidden @ lm_head_weight.T
    + bias`. First-order gradients flow to logits; double backward raises an error.

    Args:
        logits: (B, L, V) padded or (T, V) packed, any float dtype. Raw logits, before scale,
            softcap and temperature.
        target_ids: (B, L) or (T,), int64 or int32. Token ids in [0, V). -100 marks a row without a
            target, which gets logp 0, entropy 0 and no gradient.
        temperature: the sampling temperature, a number > 0.
        softcap: bound of the absolute logits, a number > 0. None: no bound.
        logit_scale: factor by which the logits are multiplied, not 0.
        return_entropy: if True, also return the entropy of each row.
        support: the ids from which a truncating sampler drew each target (see `Support`). None: the
            full vocabulary.
        backend: "auto", "torch", "cpu" (C++) or "triton". If you name a backend, it is used or an
            error is raised; there is no fallback.

    Returns:
        logps, fp32, of the shape of target_ids. With return_entropy=True the pair (logps, entropy),
        both of this shape.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value. The message names the
            argument.

    Example:
        >>> import torch
        >>> from grpo_fast import logits_logps
        >>> logits = torch.randn(2, 5, 100, requires_grad=True)
        >>> target_ids = torch.randint(100, (2, 5))
        >>> logps, entropy = logits_logps(logits, target_ids, return_entropy=True)
        >>> logps.shape
        torch.Size([2, 5])
    """
    raise_pending()
    checks.logits(logits, target_ids)
    call = Call(
        tensors=(_logit_rows(logits),), like=target_ids, temperature=temperature, softcap=softcap,
        logit_scale=logit_scale, return_entropy=return_entropy, backend=backend,
        support=support,
    )  # fmt: skip
    return entry.logps(call)


@entry.public
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
    """Compute the loss from per-token log-probabilities.

    The formula is the same as in `linear_grpo_loss`. First-order gradients flow to logps and
    entropy; double backward raises an error. `temperature`, `softcap` and `logit_scale` of the
    config have no effect, because logps already contain them.

    Args:
        logps: (B, L) padded or (T,) packed, any float dtype. Logps of the current policy.
        advantages: (B,), one per completion, or the shape of logps, one per token. If T = B, they
            are interpreted as one per completion.
        config: the options of the loss.
        completion_mask: the shape of logps, bool or 0/1. 1 marks a token of a completion. Masked
            tokens have no influence, even if they are NaN. None: all tokens count.
        cu_seqlens: (B+1,), int32 or int64. For the packed layout: the offsets of the completions,
            from 0 to T. None: the padded layout.
        old_logps: the shape of logps, float. Logps of the policy that generated the data, for the
            importance ratio. None: on-policy, with a ratio of exactly 1.
        ref_logps: the shape of logps, float. Logps of the reference model. Required when
            config.beta is not 0.
        sampling_logps: the shape of logps, float. Logps that the sampler reported, for
            `config.corrections`; NaN marks a token that the sampler did not score. None: no
            correction.
        entropy: the shape of logps, float. Required when `config.entropy_coef` is not 0 or
            `config.top_entropy_quantile` is below 1.
        num_items_in_batch: number of active tokens in the whole optimizer step, over all
            micro-batches and ranks. A number, or a tensor with one element. None: the tokens of
            this call.
        num_completions_in_batch: number of completions in the whole optimizer step, a number or a
            tensor with one element. None: the completions of this call.

    Returns:
        A `LossOutput` with the loss, the detached logps and entropies, and the metrics. If no token
        is active, the loss and its gradients are 0.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value. The message names the
            argument.

    Example:
        >>> import torch
        >>> from grpo_fast import LossConfig, grpo_loss
        >>> logps = torch.rand(2, 5).log().requires_grad_()
        >>> advantages = torch.tensor([1.0, -1.0])
        >>> out = grpo_loss(logps, advantages, LossConfig(loss_type="dapo"))
        >>> out.loss.backward()
        >>> logps.grad.shape
        torch.Size([2, 5])
    """
    raise_pending()
    entry.check_given_logps(logps, entropy, config)
    call = Call(
        tensors=(logps.reshape(-1), None if entropy is None else entropy.reshape(-1)), like=logps,
        config=config, advantages=advantages, completion_mask=completion_mask,
        cu_seqlens=cu_seqlens, old_logps=old_logps, ref_logps=ref_logps,
        sampling_logps=sampling_logps, num_items_in_batch=num_items_in_batch,
        num_completions_in_batch=num_completions_in_batch,
    )  # fmt: skip
    return entry.loss(loss_from_logps, call)


@entry.public
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
    """Compute the loss and its gradients from hidden states without storing all logits.

    With `logps, entropy = linear_logps(hidden, lm_head_weight, target_ids, ...)` the loss equals::

        loss = grpo_loss(logps, advantages, config, entropy=entropy, ...).loss

    The loss is Σ_t w_t·(sampling_ratio_t·ℓ_t + beta·KL_t) - entropy_coef·Σ_t H_t/N, where H_t is
    the entropy at token t and N is the number of tokens. sampling_ratio_t is the weight that
    `corrections` give to token t. The config selects the policy loss ℓ (`loss_type`), the KL
    (`kl_estimator`) and the token weights w (`aggregation`). The losses page has the formulas.

    Gradients of `hidden`, `lm_head_weight` and `bias` are computed in the forward pass, for the
    tensors that require grad. Rows whose gradient is zero are skipped in the matrix products of the
    gradient. In a CUDA graph, no row is skipped and the values of arguments are not checked. Double
    backward raises an error.

    Args:
        hidden: (B, L, H) padded or (T, H) packed, in fp32, bf16 or fp16 (fp64 with the torch
            backend). The hidden states. Row t predicts `target_ids[t]`, so the caller must shift
            the targets.
        lm_head_weight: (V, H), in the dtype and on the device of `hidden`. The weight of the LM
            head. A parameter sharded by FSDP2 (a DTensor over one mesh dimension) is gathered by a
            collective call, and its gradient is averaged over the ranks.
        target_ids: (B, L) or (T,), int64 or int32. Token ids, which must be in [0, V) at the active
            tokens. Masked tokens may have any id, for example -100.
        advantages: (B,), one per completion, or the shape of target_ids, one per token. If T = B,
            they are interpreted as one per completion.
        config: the options of the loss.
        bias: (V,), any float dtype, on the device of `hidden`. The bias of the LM head, sharded
            like the weight. None: no bias.
        completion_mask: the shape of target_ids, bool or 0/1. 1 marks a token of a completion.
            Masked tokens have no influence, even if they are NaN. None: all tokens count.
        cu_seqlens: (B+1,), int32 or int64. For the packed layout: the offsets of the completions,
            from 0 to T. None: the padded layout.
        old_logps: the shape of target_ids, float. Logps of the policy that generated the data, for
            the importance ratio. None: on-policy, with a ratio of exactly 1.
        ref_logps: the shape of target_ids, float. Logps of the reference model. Required when
            config.beta is not 0.
        sampling_logps: the shape of target_ids, float. Logps that the sampler reported, for
            `config.corrections`; NaN marks a token that the sampler did not score. None: no
            correction.
        num_items_in_batch: number of active tokens in the whole optimizer step, over all
            micro-batches and ranks. A number, or a tensor with one element. None: the tokens of
            this call.
        num_completions_in_batch: number of completions in the whole optimizer step, a number or a
            tensor with one element. None: the completions of this call.
        hidden_rows: the shape of target_ids, int64 or int32. The row of `hidden` (R, H) that
            predicts each target. A row may predict several targets, as the last row of a shared
            prompt does. None: row t predicts target t.
        support: the ids from which a truncating sampler drew each target (see `Support`). Cannot be
            combined with `group`, `grad_filter` or `divergence`, and is not available in a CUDA
            graph. None: the full vocabulary.
        grad_filter: a number in (0, 1), which makes the gradients approximate. In each chunk of
            rows, the vocabulary columns with the smallest gradients are excluded from the matrix
            products of the gradient. At most this share of Σ|d-logits| is excluded. Loss and logps
            stay exact, but the last bits of the gradient depend on how rows are batched. Cannot be
            combined with `group`, `support` or `divergence`. None: no filter.
        divergence: a `DivergenceTerm`, which adds coef·Σ_t w_t·D_t to the loss, where D_t is the
            divergence from a teacher. The call then costs 8·N·V·H flops. Cannot be combined with
            `grad_filter` or `support`. None: no divergence.
        group: process group, or one-dimensional device mesh, of the tensor-parallel ranks that
            share the vocabulary. Every rank passes the same `hidden` and `target_ids`, and only its
            own rows of the weight and the bias. These rows are a plain tensor, which may be empty,
            or a DTensor with placement Shard(0). Every rank gets the complete outputs and the
            complete gradient of `hidden`. The call is collective: if one rank raises, all ranks
            raise. Not available in a CUDA graph. None: the ranks do not share
            a vocabulary. The weight may still be sharded by FSDP2.
        backend: "auto", "torch", "cpu" (C++) or "triton". If you name a backend, it is used or an
            error is raised; there is no fallback.
        validate: "auto" checks values on the CPU at once, and reports invalid values on a GPU in a
            later call. "full" checks all values at once, which costs a GPU sync.

    Returns:
        A `LossOutput` with the loss, the detached logps and entropies, and the metrics. If no token
        is active, the loss and its gradients are 0.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value. The message names the
            argument.

    Example:
        >>> import torch
        >>> from grpo_fast import LossConfig, linear_grpo_loss
        >>> hidden = torch.randn(2, 5, 16, requires_grad=True)
        >>> lm_head_weight = torch.randn(100, 16, requires_grad=True)
        >>> target_ids = torch.randint(100, (2, 5))
        >>> advantages = torch.tensor([1.0, -1.0])
        >>> config = LossConfig(loss_type="dapo", epsilon_high=0.28)
        >>> out = linear_grpo_loss(hidden, lm_head_weight, target_ids, advantages, config)
        >>> out.loss.backward()
        >>> lm_head_weight.grad.shape
        torch.Size([100, 16])
    """
    with Agreement(group) as ranks:
        raise_pending()
        tensors = entry.head_tensors(hidden, lm_head_weight, bias, ranks)
        checks.hidden_layout(hidden, target_ids, hidden_rows)
        term = checked_term(divergence, tensors[1], target_ids, ranks)
        call = Call(
            tensors=tensors, like=target_ids, config=config, advantages=advantages,
            completion_mask=completion_mask, cu_seqlens=cu_seqlens, old_logps=old_logps,
            ref_logps=ref_logps, sampling_logps=sampling_logps,
            num_items_in_batch=num_items_in_batch,
            num_completions_in_batch=num_completions_in_batch, hidden_rows=hidden_rows,
            support=support, grad_filter=grad_filter, divergence=term, backend=backend,
            validate=validate, shard=ranks.shard(tensors[1]),
        )  # fmt: skip
        return entry.loss(loss_from_logits, call, ranks)


@entry.public
def logits_grpo_loss(
    logits: Tensor,  # (B, L, V) or (T, V)
    target_ids: Tensor,  # (B, L) or (T,)
    advantages: Tensor,  # (B,) or the shape of target_ids
    config: LossConfig,
    *,
    completion_mask: Tensor | None = None,  # the shape of target_ids
    cu_seqlens: Tensor | None = None,  # (B+1,) for the packed layout
    old_logps: Tensor | None = None,  # the shape of target_ids
    ref_logps: Tensor | None = None,  # the shape of target_ids
    sampling_logps: Tensor | None = None,  # the shape of target_ids
    num_items_in_batch: float | Tensor | None = None,
    num_completions_in_batch: float | Tensor | None = None,
    support: Support | None = None,
    backend: str = "auto",
    validate: str = "auto",
    inplace: bool = False,
) -> LossOutput:
    """Compute the loss and its gradient from logits.

    The formula is the same as in `linear_grpo_loss`, with logits instead of `hidden @
    lm_head_weight.T + bias`. The gradient of logits is computed in the forward pass. Double
    backward raises an error.

    Args:
        logits: (B, L, V) padded or (T, V) packed, any float dtype. Raw logits, before scale,
            softcap and temperature. Row t predicts `target_ids[t]`.
        target_ids: (B, L) or (T,), int64 or int32. Token ids, which must be in [0, V) at the active
            tokens. Masked tokens may have any id, for example -100.
        advantages: (B,), one per completion, or the shape of target_ids, one per token. If T = B,
            they are interpreted as one per completion.
        config: the options of the loss.
        completion_mask: the shape of target_ids, bool or 0/1. 1 marks a token of a completion.
            Masked tokens have no influence, even if they are NaN. None: all tokens count.
        cu_seqlens: (B+1,), int32 or int64. For the packed layout: the offsets of the completions,
            from 0 to T. None: the padded layout.
        old_logps: the shape of target_ids, float. Logps of the policy that generated the data, for
            the importance ratio. None: on-policy, with a ratio of exactly 1.
        ref_logps: the shape of target_ids, float. Logps of the reference model. Required when
            config.beta is not 0.
        sampling_logps: the shape of target_ids, float. Logps that the sampler reported, for
            `config.corrections`; NaN marks a token that the sampler did not score. None: no
            correction.
        num_items_in_batch: number of active tokens in the whole optimizer step, over all
            micro-batches and ranks. A number, or a tensor with one element. None: the tokens of
            this call.
        num_completions_in_batch: number of completions in the whole optimizer step, a number or a
            tensor with one element. None: the completions of this call.
        support: the ids from which a truncating sampler drew each target (see `Support`). Not
            available in a CUDA graph. None: the full vocabulary.
        backend: "auto", "torch", "cpu" (C++) or "triton". If you name a backend, it is used or an
            error is raised; there is no fallback.
        validate: "auto" checks values on the CPU at once, and reports invalid values on a GPU in a
            later call. "full" checks all values at once, which costs a GPU sync.
        inplace: if True, write the gradient over the logits. The logits must not be read again, and
            only one backward is possible.

    Returns:
        A `LossOutput` with the loss, the detached logps and entropies, and the metrics. If no token
        is active, the loss and its gradients are 0.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value. The message names the
            argument.

    Example:
        >>> import torch
        >>> from grpo_fast import LossConfig, logits_grpo_loss
        >>> logits = torch.randn(2, 5, 100, requires_grad=True)
        >>> target_ids = torch.randint(100, (2, 5))
        >>> advantages = torch.tensor([1.0, -1.0])
        >>> out = logits_grpo_loss(logits, target_ids, advantages, LossConfig())
        >>> out.loss.backward()
        >>> logits.grad.shape
        torch.Size([2, 5, 100])
    """
    raise_pending()
    checks.logits(logits, target_ids)
    flat = _logit_rows(logits)
    if inplace:
        checks.inplace(logits, flat)
    call = Call(
        tensors=(flat,), like=target_ids, config=config, advantages=advantages,
        completion_mask=completion_mask, cu_seqlens=cu_seqlens, old_logps=old_logps,
        ref_logps=ref_logps, sampling_logps=sampling_logps, num_items_in_batch=num_items_in_batch,
        num_completions_in_batch=num_completions_in_batch, support=support, inplace=inplace,
        backend=backend, validate=validate,
    )  # fmt: skip
    return entry.loss(loss_from_logits, call)


def _logit_rows(logits: Tensor) -> Tensor:
    """Return logits as a matrix (N, V) with contiguous rows, as the kernels expect.

    The logits are copied only if their rows are not contiguous.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()
