"""List of packages for setuptools. All other settings are in pyproject.toml.

The C++ sources are in csrc/ at the top of the repository. The wheel and the sdist contain them as
grpo_fast/csrc. The wheel is pure Python, because the kernels are compiled on first use if the
machine has a compiler.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["grpo_fast", "grpo_fast.*"]), "grpo_fast.csrc"],
    package_dir={"grpo_fast.csrc": "csrc"},
)
