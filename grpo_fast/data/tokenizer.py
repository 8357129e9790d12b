"""Tokenizers for models that start from random weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from grpo_fast.errors import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD_TOKEN = "<|pad|>"
EOS_TOKEN = "<|eos|>"

# Chat template without roles, which writes each message on a separate line. It allows recipes for
# chat models to run with the tokenizers of this module.
PLAIN_CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def build_bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can encode any text and splits numbers into digits.

    Training is deterministic. The ids of `<|pad|>` and `<|eos|>` are 0 and 1, padding is on the
    left, and the chat template has no roles.

    Args:
        texts: the training texts.
        vocab_size: number of tokens, including 256 bytes, pad and EOS. It must be at least 258.

    Raises:
        ValueError: `vocab_size` is too small.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    require(vocab_size >= 258, "vocab_size", "at least 258 (256 bytes, pad, eos)", vocab_size)
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    # Sort the alphabet, because its order determines the token ids. The unsorted order would differ
    # between processes.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def build_symbol_tokenizer(symbols: Sequence[str]) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per symbol. Texts are symbols separated by whitespace.

    The ids of `<|pad|>` and `<|eos|>` are 0 and 1, and the id of symbols[i] is 2 + i. Padding is on
    the left. Encoding an unknown symbol raises an error.

    Args:
        symbols: distinct words without whitespace.

    Raises:
        ValueError: there is no symbol, or a symbol is `<|pad|>` or `<|eos|>`, or occurs twice.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [PAD_TOKEN, EOS_TOKEN, *symbols]
    fits = symbols and len({*words}) == len(words)
    require(fits, "symbols", f"different words other than {PAD_TOKEN} and {EOS_TOKEN}", symbols)
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrap(tokenizer)


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer has a chat template other than PLAIN_CHAT_TEMPLATE."""
    return getattr(tokenizer, "chat_template", None) not in (None, PLAIN_CHAT_TEMPLATE)


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
