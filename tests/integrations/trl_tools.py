"""Tiny model that calls a calculator tool, and a TRL environment that provides the tool."""

from pathlib import Path
from typing import Any

import torch

QUESTION = [{"role": "user", "content": "3 times 4?"}]
CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": 4}}}


def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: The first one.
        b: The second one.

    Returns:
        Their product.
    """
    return a * b


class Calculator:
    """TRL environment with the tool `multiply`."""

    def reset(self, **_: Any) -> None:
        return None

    def multiply(self, a: int, b: int) -> int:
        return a * b


Calculator.multiply.__doc__ = multiply.__doc__  # TRL passes it to the model


def train_caller(path: Path) -> str:
    """Train a tiny model on one conversation with a tool call, and save it.

    Return `path` as a string.
    """
    import trl

    from grpo_fast.data.tokenizer import build_bpe_tokenizer
    from tests.tiny import tiny_model

    template = Path(trl.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja"
    chat = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    chat += [{"role": "tool", "name": "multiply", "content": "12"}]
    chat += [{"role": "assistant", "content": "It is 12."}]
    tokenizer = build_bpe_tokenizer(["x"], 260)
    tokenizer.chat_template = template.read_text()
    text = tokenizer.apply_chat_template(chat, tools=[multiply], tokenize=False)
    tokenizer = build_bpe_tokenizer([text] * 5, 500)
    tokenizer.chat_template = template.read_text()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    labels = ids.clone()
    labels[:, : len(tokenizer(text[: text.index("<|im_start|>assistant")])["input_ids"])] = -100
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": len(tokenizer)}
    model = tiny_model("llama", **sizes, **special)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(60):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.05, float(loss)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
