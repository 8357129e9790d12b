"""Import hook for the dry run of a session. It hides packages that the GPU machine does not have.

A Python process that has the hook on its PYTHONPATH cannot import the modules in PACKAGES. It can
still import copies of them in a folder of PYTHONPATH, such as the wheels that session.sh unpacks.
"""

from __future__ import annotations

from pathlib import Path

# Modules that the GPU machine does not have. It has torch, triton, transformers, accelerate, peft,
# pytest, rich, typer, pyyaml, matplotlib, safetensors, tokenizers, numpy and pyarrow.
PACKAGES = (
    "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "datasets", "dill",
    "multiprocess", "trl", "liger_kernel", "cut_cross_entropy", "cutlass", "quack", "einops",
    "math_verify", "latex2sympy2_extended", "antlr4", "verl", "openrlhf", "vllm", "flash_attn",
    "bitsandbytes", "httpx2", "httpcore2",
)  # fmt: skip

SOURCE = '''"""Written by benchmarks/gpu/lacking.py."""
import os, sys
from importlib.machinery import PathFinder

PACKAGES = {packages!r}
CARRIED = [x for x in os.environ.get("PYTHONPATH", "").split(os.pathsep) if x]

class Lacking(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return PathFinder.find_spec(name, CARRIED if name in PACKAGES else path, target)

    @classmethod
    def find_distributions(cls, context):
        if context.name and context.name.replace("-", "_") in PACKAGES:
            context = type(context)(name=context.name, path=CARRIED)
        return PathFinder.find_distributions(context)

sys.meta_path[sys.meta_path.index(PathFinder)] = Lacking
'''


def write(folder: Path) -> None:
    """Write the hook to sitecustomize.py in a folder. Python imports this file when it starts."""
    (folder / "sitecustomize.py").write_text(SOURCE.format(packages=PACKAGES))
