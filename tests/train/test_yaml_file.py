"""Reading YAML: plain data comes through, all else is a sentence that names the file or key."""

from __future__ import annotations

import os
import tracemalloc

import pytest

from grpo_fast.train.config.plain import MAX_VALUES, read_yaml, read_yaml_file
from grpo_fast.train.config.recipes import load_recipe
from tests.command_line import RECIPE, invoke, refused

# Nine lists, each of ten aliases of the one before it: a billion values in 400 bytes.
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


def test_plain_data():
    text = "a: &a {x: 1, y: [1.5, true, null]}\nb: *a\nc: {<<: *a, x: 2}\n? 3\n: 2020-01-31\n"
    data = read_yaml(text, "t")
    assert data["a"] == data["b"] == {"x": 1, "y": [1.5, True, None]}
    assert data["c"] == {"x": 2, "y": [1.5, True, None]} and str(data[3]) == "2020-01-31"
    assert read_yaml("", "t") is None and read_yaml("\ufeffa: ü→🙂", "t") == {"a": "ü→🙂"}
    many = f"&a [{', '.join('1' for _ in range(MAX_VALUES - 1))}]"
    assert len(read_yaml(many, "t")) == MAX_VALUES - 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3", "the key 'a' is there twice in"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1"),
        ("a: {b: 1, 'b': 2}", "the key 'b' is there twice"),
        ("[{x: 1}, {y: {z: 1, z: 1}}]", "the key 'z' is there twice"),
        (BOMB, f"more than {MAX_VALUES} values"),
        (f"? {BOMB.replace(chr(10), ' ')}\n: 1", ""),
        ("&a [*a]", "aliases"),
        ('x: "\\ud800"', "a lone surrogate is no character"),
        ("!!timestamp x", ""),
        ("!!bool x", ""),
        ("!!float ''", ""),
        ("2020-13-45", "month must be in 1..12"),
        ("1" * 5000, "4300 digits"),
        ("[" * 3000, "levels of lists"),
        ("!!python/object/apply:os.getpid []", "python/object"),
        ("a: \x00", "special characters"),
        ("a: 1\n---\nb: 2", "single document"),
    ],
)
def test_what_is_refused(text, reason):
    with pytest.raises(ValueError, match="^the name: expected plain YAML, got ") as error:
        read_yaml(text, "the name")
    assert reason in str(error.value) and len(str(error.value)) < 600


def test_an_alias_bomb_takes_no_memory():
    tracemalloc.start()
    with pytest.raises(ValueError, match="aliases"):
        read_yaml(BOMB, "t")
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    "word", ["optim={lr: 1, lr: 2}", f"model.config={BOMB}", 'output_dir="\\udfff"']
)
def test_the_same_rules_hold_for_settings(word):
    with pytest.raises(ValueError, match="expected plain YAML"):
        load_recipe("sort", [word])
    assert refused(invoke("eval", "no_model", f"task={BOMB}"), "task: expected plain YAML")


@pytest.mark.parametrize(
    "content", [b"\xff\xfea\x00", b"\x89PNG\r\n\x1a\n\x00", "ä: 1".encode("latin-1")]
)
def test_a_recipe_that_is_no_text(tmp_path, content):
    (tmp_path / "r.yaml").write_bytes(content)
    assert refused(invoke("train", str(tmp_path / "r.yaml")), "r.yaml", "UTF-8")


def test_a_recipe_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="^recipe r: expected a readable text file in UTF-8, got"):
        read_yaml_file(tmp_path, "recipe r")
    assert refused(invoke("train", str(tmp_path)), "recipe: expected one of")
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "r.yaml").chmod(0)
    if os.access(tmp_path / "r.yaml", os.R_OK):
        pytest.skip("needs a user whom permissions bind: root may read every file")
    assert refused(invoke("train", str(tmp_path / "r.yaml")), "r.yaml", "Permission denied")
