"""Package list only; everything else is in pyproject.toml.

The C++ sources live in csrc/ at the top of the repository and travel inside the package as
grpo_fast/csrc, in the wheel as in the sdist. The wheel stays pure Python: the kernels are compiled
on first use, where a compiler is.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["grpo_fast", "grpo_fast.*"]), "grpo_fast.csrc"],
    package_dir={"grpo_fast.csrc": "csrc"},
)
