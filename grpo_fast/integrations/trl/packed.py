"""Packed forward pass of a transformers model that still accepts padded batches.

`take_packed_rows` replaces the attention function of the model. If a call has the keyword
`packed_layout`, the new function computes packed rows. Otherwise, it calls the original attention.
Gradient checkpointing recomputes a layer with the same keywords, so it uses the same attention.

The packed forward runs inside the forward of the model and of its LM head, so their hooks fire.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from grpo_fast import linear_grpo_loss, linear_logps
from grpo_fast.attention import (
    Pair,
    draw_groups,
    pack_groups,
    register,
    small_windows,
    split_recurrent_layers,
    window_as_mask,
    worst_gap,
)
from grpo_fast.integrations.fast_head import reshard, run_inside
from grpo_fast.integrations.trl.head import FusedHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Reasons why TRL computes a micro-batch.
NO_PROMPT = "a completion of this micro-batch has no prompt to predict its first token"
HOLES = "a mask of this micro-batch leaves out a token between others, or is padded differently"
# True during a packed call. The function that builds the attention mask reads this variable,
# because transformers does not pass the keyword `packed_layout` to that function.
_packing: ContextVar[bool] = ContextVar("grpo_fast_packing", default=False)
PREFIX = "grpo_packed_or_"
PER_TOKEN = ("advantages", "old_logps", "ref_logps")  # arguments of the loss, in the padded layout


def take_packed_rows(model: PreTrainedModel) -> None:
    """Prepare a model for `packed_forward`: change its attention, forward and LM head.

    Raises:
        ValueError: The attention of this model cannot be replaced.
    """
    before = model.config._attn_implementation
    if not before.startswith(PREFIX):
        model.set_attn_implementation(_register_over(before))
    if not model.config._attn_implementation.startswith(PREFIX):
        kind = model.config.model_type
        raise ValueError(f"model_type {kind}: its attention is not on transformers' interface")
    split_recurrent_layers(model.base_model)
    fused = model.forward.__func__
    run_inside(model)
    # Copy the attribute `trl_fused` to the new forward. `use_fast_head` finds TRL's closure in it.
    model.forward.__func__.trl_fused = getattr(fused, "trl_fused", fused)
    run_inside(model.get_output_embeddings())


def _register_over(original: str) -> str:
    """Register an attention for packed rows with transformers, and return its name.

    If a call has no keyword `packed_layout`, the function calls the attention `original`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    packed_attention = ALL_ATTENTION_FUNCTIONS[register()]

    def attention(module: nn.Module, *args: Tensor | None, **options: object) -> object:
        if options.get("packed_layout") is not None:
            return packed_attention(module, *args, **options)
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)(module, *args, **options)

    def mask(*args: object, **options: Any) -> object:
        theirs = ALL_MASK_ATTENTION_FUNCTIONS[original]
        return (window_as_mask if _packing.get() else theirs)(*args, **options)

    # Encode the original name in hexadecimal digits. transformers treats a name in a special way if
    # it contains "flash", "sdpa", "flex_attention" or "|".
    name = PREFIX + original.encode().hex()
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


class Pack(NamedTuple):
    """One packed row with the real tokens of a padded batch of B completions.

    The padded batch has P columns of prompts with padding on the left, and K columns of completions
    with padding on the right. R is the number of scored tokens, which the loss counts.
    """

    # Keyword arguments for the base model: input_ids (1, T), position_ids, use_cache and
    # packed_layout.
    inputs: dict[str, object]
    predicting: Tensor  # (R,) index of the hidden state that predicts each scored token
    target_ids: Tensor  # (R,) ids of the scored tokens
    cu_seqlens: Tensor  # (B+1,) int32: offsets of the completions in the scored tokens
    order: Tensor  # (B,) int64: row in the padded batch of each packed completion
    slots: Tensor  # (R,) int64: index of each scored token in the flattened (B, K) completions
    shape: tuple[int, int]  # (B, K)

    def padded(self, x: Tensor) -> Tensor:
        """Scatter values of the scored tokens from shape (R,) to (B, K), with 0 elsewhere."""
        return x.new_zeros(self.shape).flatten().index_copy(0, self.slots, x).view(self.shape)

    def packed(self, x: Tensor | None) -> Tensor | None:
        """Gather per-token values of shape (B, K) into shape (R,), in the order of the packed row.

        Values of shape (B,), one per completion, are only reordered.
        """
        if x is None:
            return None
        return x[self.order] if x.dim() == 1 else x.reshape(-1)[self.slots]


def pack_padded(
    input_ids: Tensor,  # (B, P+K)
    attention_mask: Tensor,  # (B, P+K)
    scored: Tensor,  # (B, K)
) -> Pack | str:
    """Pack the real tokens of a padded batch into one row, with each distinct prompt once.

    Args:
        input_ids: Token ids, shape (B, P+K).
        attention_mask: 1 at real tokens, shape (B, P+K).
        scored: 1 at the completion tokens that the loss counts, shape (B, K).

    Returns:
        The packed row, or the reason why TRL must compute the batch: a completion has no prompt, so
        that no token predicts its first token, or the tokens of a row are not contiguous. TRL keeps
        a masked token in the context of later tokens, and a packed row would not.
    """
    # 1. Group the completions with scored tokens by their prompt. Do this on the CPU, because every
    # lookup of a prompt in a GPU tensor would synchronize.
    rows, length = scored.shape
    device = input_ids.device
    ids = input_ids.cpu()
    real = attention_mask.bool().cpu()
    counted = scored.bool().cpu() & real[:, -length:]
    prompts, completions = real[:, :-length], real[:, -length:]
    if (prompts[:, 1:] < prompts[:, :-1]).any() or (completions[:, 1:] > completions[:, :-1]).any():
        return HOLES
    groups: dict[bytes, tuple[Tensor, list[int]]] = {}
    for row in counted.any(1).nonzero()[:, 0].tolist():
        prompt = ids[row, :-length][real[row, :-length]]
        groups.setdefault(prompt.numpy().tobytes(), (prompt, []))[1].append(row)
    if b"" in groups:
        return NO_PROMPT
    # 2. Pack the groups. If no token is scored, pack one token, so that this rank still runs a
    # forward and a backward pass. Otherwise, the other ranks would wait for this rank forever.
    token = ids[0, :1]
    texts = [ids[row, -length:][completions[row]] for row in range(rows)]
    lists = [(prompt, [texts[row] for row in members]) for prompt, members in groups.values()]
    packed = pack_groups(lists or [(token, [token])], device=device)
    used = [row for _, members in groups.values() for row in members]
    order = torch.tensor(used + sorted(set(range(rows)) - set(used)))
    # 3. Find the scored tokens in the packed row. Completions without scored tokens are not in the
    # row. These completions come last in `order`, and have length 0 in `cu_seqlens`.
    slots = torch.arange(rows * length).view(rows, length)[order][completions[order]]
    slots = slots[: packed.target_ids.shape[0]]
    scored_rows = counted.flatten()[slots].nonzero()[:, 0]
    counts = torch.nn.functional.pad(counted[order].sum(1).cumsum(0), (1, 0)).int()
    at = scored_rows.to(device)
    return Pack(
        packed.model_inputs, packed.predicting[at], packed.target_ids[at], counts.to(device),
        order.to(device), slots[scored_rows].to(device), (rows, length),
    )  # fmt: skip


def packed_forward(
    lm: PreTrainedModel,
    *,
    pack: Pack,
    head: FusedHead,
    entropy: bool = False,
    loss: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Run the model on a packed row.

    Args:
        lm: The model, inside its own forward.
        pack: The packed row.
        head: Logit transform of the LM head.
        entropy: Whether to return the entropies as well.
        loss: Arguments of `linear_grpo_loss` with per-token values of shape (B, K). If None, the
            loss is not computed.

    Returns:
        A dictionary with "logps" (R,), with "entropy" (R,) if requested, and with "loss" (0-d) if
        `loss` is given.
    """

    def of_head(layer: nn.Linear, hidden: Tensor) -> dict[str, Tensor]:
        hidden, weight, bias = head.operands(layer, hidden)
        rows: dict[str, Any] = {"hidden_rows": pack.predicting, "bias": bias}
        # Disable autocast. `operands` has already cast the tensors to the dtype of the head, and
        # autocast would cast fp32 tensors to 16 bits.
        with torch.autocast(hidden.device.type, enabled=False):
            if loss is None:
                found = linear_logps(
                    hidden, weight, pack.target_ids, return_entropy=entropy, **head.rule, **rows
                )
                names = ("logps", "entropy") if entropy else ("logps",)
                return dict(zip(names, found if entropy else (found,), strict=True))
            by_token = {name: pack.packed(loss[name]) for name in PER_TOKEN}
            out = linear_grpo_loss(
                hidden, weight, pack.target_ids, cu_seqlens=pack.cu_seqlens, **rows,
                **{**loss, **by_token},
            )  # fmt: skip
        return {"loss": out.loss, "logps": out.logps, "entropy": out.entropy}

    token = _packing.set(True)
    try:
        trunk = lm.base_model(**pack.inputs)
    finally:
        _packing.reset(token)
    return lm.get_output_embeddings()(trunk.last_hidden_state[0], run=of_head)


# ---------------------------------------------------------------------- Comparison with single rows
SCORED = 5  # number of columns of completion tokens, which are the last columns

# Type of a function (input_ids (B, L), attention_mask (B, L)) → logps (B, SCORED).
Scores = Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def largest_gap(lm: PreTrainedModel, ours: Scores, single: Scores) -> float:
    """Return the largest difference between logps of a padded batch and of single rows, in nats.

    The batch has two rows with the same prompt, padded on the left. The second row has a shorter
    completion and is also padded on the right. If the weights are fp32, the comparison is
    repeated with random weights (see `worst_gap`), because the model's weights may hide an error.
    For example, a new LoRA adapter has no effect.

    Args:
        lm: The transformers model.
        ours: The function that computes the batch.
        single: TRL's forward, which computes each row alone, without padding.
    """
    weight = lm.get_output_embeddings().weight
    ((prompt, completions),) = draw_groups(1, weight.shape[0])
    ids = torch.tensor([prompt + completion for completion in completions])
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, -2:] = False
    ids, real = (pad(x, (2, 0)).to(weight.device) for x in (ids, real))
    is_scored = real[:, -SCORED:]

    def batch() -> Tensor:
        with small_windows(lm):
            return ours(ids, real.long())[is_scored].float()

    def alone() -> Tensor:
        found = []
        with small_windows(lm):
            for row, is_real, scored in zip(ids, real, is_scored, strict=True):
                own = row[is_real][None]
                found.append(single(own, torch.ones_like(own))[0, -int(scored.sum()) :].float())
        return torch.cat(found)

    is_training = lm.training
    lm.eval()
    try:
        return worst_gap(lm, lambda _: Pair(batch, alone, (), 0.0, in_nats=True))
    finally:
        lm.train(is_training)
        reshard(lm)
