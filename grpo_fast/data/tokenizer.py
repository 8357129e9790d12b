"""Tokenizers built on the spot, for models that start from random weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

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

    Args:
        texts: training texts, for example questions and gold solutions.
        vocab_size: tokens in all, at least 258 (256 bytes, pad, eos).

    Returns:
        PreTrainedTokenizerFast with `<|pad|>` = 0, `<|eos|>` = 1, padding on the left, a plain chat
        template. Deterministic: the same texts in the same order give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < BYTE_ALPHABET + 2:
        expected = f"at least {BYTE_ALPHABET + 2} (256 bytes, pad, eos)"
        raise ValueError(f"vocab_size: expected {expected}, came {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
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

    Returns:
        PreTrainedTokenizerFast with `<|pad|>` = 0, `<|eos|>` = 1 and symbols[i] = 2 + i, padding on
        the left.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    bad = [s for s in symbols if not s or re.search(r"\s", s) or s in (PAD_TOKEN, EOS_TOKEN)]
    if bad or not symbols or len(set(symbols)) != len(symbols):
        expected = "different non-empty words without blanks"
        raise ValueError(f"symbols: expected {expected}, came {list(symbols)!r}")
    vocabulary = {word: index for index, word in enumerate([PAD_TOKEN, EOS_TOKEN, *symbols])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(tokenizer)


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """A function that counts the tokens of a text, special ones apart."""
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _wrap(tokenizer: object) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = PLAIN_CHAT_TEMPLATE
    return wrapped
