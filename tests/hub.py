"""Script that copies the loss functions and their kernels into a folder for the Kernels Hub.

Run it as `python -m tests.hub FOLDER` or `make hub`. The Hub's package `kernels` imports the copy
under a different module name than `grpo_fast`. The copy therefore uses relative imports. The
trainer, the attention kernels and the integrations are not copied.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

import grpo_fast

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("__init__.py", "errors.py", "objective", "kernels", "loss")
BACKENDS = ("cpu", "cuda")
IMPORT = re.compile(r"^(\s*from )grpo_fast(?:\.([\w.]+))?(?= import )", re.MULTILINE)


def build(folder: Path) -> None:
    """Write a copy of the loss functions for each backend to `folder`/build.

    An existing build folder is deleted first.
    """
    shutil.rmtree(folder / "build", ignore_errors=True)
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        # 1. Copy the sources.
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "csrc", variant / "csrc")
        for part in PARTS:
            source = ROOT / "grpo_fast" / part
            if source.is_dir():
                shutil.copytree(source, variant / part, ignore=ignored)
            else:
                shutil.copy(source, variant / part)

        # 2. Make the imports relative. A file in the top folder needs one dot, and each subfolder
        # adds one dot.
        for path in variant.rglob("*.py"):
            dots = "." * len(path.relative_to(variant).parts)
            path.write_text(IMPORT.sub(rf"\g<1>{dots}\g<2>", path.read_text()))

        # 3. Write the metadata of this backend's copy. The package `kernels` uses `id` as the
        # module's name in `sys.modules`.
        name = f"_grpo_fast_{backend}_{grpo_fast.__version__.replace('.', '_')}"
        metadata = {"id": name, "name": "grpo-fast", "version": 1, "license": "Apache-2.0",
                    "python-depends": [], "backend": {"type": backend}}  # fmt: skip
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    build(parser.parse_args().folder)
