"""Builder of the Kernels Hub folder: `python -m tests.hub FOLDER`, or `make hub`.

The package `kernels` imports a kernel under a different module name. The copy therefore uses
relative imports. It contains the loss functions and their kernels, without the trainer, attention
and integrations.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import grpo_fast

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("__init__.py", "errors.py", "objective", "kernels", "loss")
BACKENDS = ("cpu", "cuda")
IMPORT = re.compile(r"^(\s*from )grpo_fast(?:\.([\w.]+))?(?= import )", re.MULTILINE)


def build(folder: Path) -> None:
    """Write one variant per backend to FOLDER/build. An existing build is replaced."""
    shutil.rmtree(folder / "build", ignore_errors=True)
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        # 1. Copy the sources.
        variant.mkdir(parents=True)
        shutil.copytree(ROOT / "csrc", variant / "csrc")
        for part in PARTS:
            source = ROOT / "grpo_fast" / part
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, variant / part, ignore=ignored)
            else:
                shutil.copy(source, variant / part)

        # 2. Make the imports relative. One dot is the file's own folder.
        for path in variant.rglob("*.py"):
            dots = "." * len(path.relative_to(variant).parts)
            path.write_text(IMPORT.sub(rf"\g<1>{dots}\g<2>", path.read_text()))

        # 3. Describe the variant. `id` becomes the module's name in sys.modules.
        metadata = {
            "id": f"_grpo_fast_{backend}_{grpo_fast.__version__.replace('.', '_')}",
            "name": "grpo-fast",
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
