"""Tokenizers built on the spot, for models that start from random weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_fast.errors import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN = "<|pad|>"
EOS_TOKEN = "<|eos|>"
BYTE_ALPHABET = 256

# A plain stand-in for a chat template, the contents one below the other: recipes written for a chat
# model then also run with a tokenizer that knows no roles.
PLAIN_CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def build_bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`: any text round-trips, each digit is a token.

    Returns one with `<|pad|>` = 0, `<|eos|>` = 1, padding on the left, a plain chat template: the
    same for the same texts. `vocab_size`, of at least 258, counts the 256 bytes, pad and eos.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    least = BYTE_ALPHABET + 2
    require(vocab_size >= least, "vocab_size", f"at least {least} (bytes, pad, eos)", vocab_size)
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    # The alphabet comes in another order in every process: sorted, so that the ids are the same.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def build_symbol_tokenizer(symbols: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per symbol, symbols separated by blanks; any other symbol is an error.

    Returns one with `<|pad|>` = 0, `<|eos|>` = 1 and symbols[i] = 2 + i, padding on the left.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    bad = [s for s in symbols if not s or re.search(r"\s", s) or s in (PAD_TOKEN, EOS_TOKEN)]
    fits = symbols and not bad and len(set(symbols)) == len(symbols)
    require(fits, "symbols", "different non-empty words without blanks", list(symbols))
    vocabulary = {word: index for index, word in enumerate([PAD_TOKEN, EOS_TOKEN, *symbols])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(tokenizer)


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a chat template, other than the stand-in of this module."""
    return getattr(tokenizer, "chat_template", None) not in (None, PLAIN_CHAT_TEMPLATE)


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _wrap(tokenizer: object) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=PLAIN_CHAT_TEMPLATE,
    )
