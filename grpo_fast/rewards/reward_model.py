"""Reward function that scores with a sequence classification model with one output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from grpo_fast.data import Prompt, reason
from grpo_fast.data.hub import check_files, read_fields
from grpo_fast.errors import require
from grpo_fast.rollout.own.model import positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardModel:
    """Reward function that scores each prompt and completion with a trained reward model.

    The score is NaN if the prompt and the completion together have more tokens than the model has
    positions.

    Args:
        path: folder or hub id of a model for `AutoModelForSequenceClassification`.
        batch_size: number of texts in a forward pass.
        device: torch device, or "auto" for the GPU if there is one, else the CPU.

    Raises:
        ValueError: there is no such model at the path, its weights are incomplete, or it does not
            have exactly one output.
    """

    reads_chats = True  # gets the prompts as messages if the policy's chat template is used

    def __init__(self, path: str, *, batch_size: int = 64, device: str = "auto") -> None:
        is_count = isinstance(batch_size, int) and batch_size >= 1
        require(is_count, "batch_size", "at least 1", repr(batch_size))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.batch_size = batch_size
        model, self.tokenizer = _load(path)
        self.model = model.to(device).eval().requires_grad_(False)
        pad = self.tokenizer.pad_token or self.tokenizer.eos_token
        require(pad is not None, "tokenizer", "a padding or end token", "one with neither")
        self.tokenizer.pad_token = pad
        # The model reads the score at the last non-padding token. If EOS is the padding token, this
        # is the token before EOS. transformers uses the same token when it trains a reward model.
        for config in (model.config, model.config.get_text_config()):
            config.pad_token_id = self.tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(self, *, prompts: Sequence[Prompt], completions: Sequence[str]) -> list[float]:
        ids = encode_pairs(self.tokenizer, prompts, completions)
        room = positions(self.model.config.get_text_config())
        fitting = [i for i in range(len(ids)) if len(ids[i]) <= room]
        fitting.sort(key=lambda i: len(ids[i]))
        scores = torch.full((len(ids),), torch.nan)
        for first in range(0, len(fitting), self.batch_size):
            chosen = fitting[first : first + self.batch_size]
            batch = self.tokenizer.pad(
                {"input_ids": [ids[i] for i in chosen]}, padding_side="right",
                return_attention_mask=True, return_tensors="pt",
            )  # fmt: skip
            logits = self.model(**batch.to(self.model.device)).logits
            scores[chosen] = logits[:, 0].float().cpu()
        return scores.tolist()


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], completions: Sequence[str]
) -> list[list[int]]:
    """Return the token ids of each prompt together with its completion.

    Each list of ids ends with a special token. If the prompt is a list of messages, the chat
    template adds the completion as the assistant's turn. If the prompt is a string, the prompt and
    the completion are tokenized separately, as in a rollout.

    A special token that a completion spells out, such as `<|im_end|>`, is replaced by a blank.
    Otherwise the completion could end its turn and praise itself in the user's next turn.
    """
    special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    encoded = []
    for prompt, completion in zip(prompts, completions, strict=True):
        for token in special:
            completion = completion.replace(token, " ")
        if isinstance(prompt, str):
            ids = tokenizer(prompt, completion)["input_ids"]
        else:
            messages = [*prompt, {"role": "assistant", "content": completion}]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = list(ids)
        is_ended = ids and ids[-1] in tokenizer.all_special_ids
        if tokenizer.eos_token_id is not None and not is_ended:
            ids.append(tokenizer.eos_token_id)
        encoded.append(ids)
    return encoded


def _load(path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        check_files(path)
        read_fields(path)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            path, output_loading_info=True, dtype=torch.float32, trust_remote_code=False
        )
    except Exception as error:  # file readers and architectures raise many classes
        expected = "a folder or hub id of a sequence classification model with its tokenizer"
        got = f"{path!r}: {reason(error)}"
        raise ValueError(f"rewards.path: expected {expected}, got {got}") from None
    missing = ", ".join(sorted(loaded["missing_keys"])[:1])
    # A causal LM has no score head. transformers fills a missing head with random weights.
    require(not missing, "rewards.path", f"all weights in {path}", f"none for {missing}")
    outputs = model.config.num_labels
    require(outputs == 1, "rewards.path", "a model with one output", f"{outputs} in {path}")
    return model, tokenizer
