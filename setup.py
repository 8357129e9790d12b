"""List of packages and wheel tag for setuptools. All other settings are in pyproject.toml.

The C++ sources are in csrc/ at the top of the repository. The wheel and the sdist contain them as
grpo_fast/csrc. The kernels are compiled on first use if the machine has a compiler. If csrc/built
contains compiled libraries, which tests/packages.sh writes, the wheel contains them and fits one
platform and every Python. Otherwise the wheel is pure Python.
"""

from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel

HAS_LIBRARIES = (Path(__file__).resolve().parent / "csrc" / "built").is_dir()


class Package(Distribution):
    """Distribution with platform-dependent files if compiled libraries exist."""

    def has_ext_modules(self) -> bool:
        return HAS_LIBRARIES


class Wheel(bdist_wheel):
    """Wheel for every Python: the libraries use torch's stable ABI and no Python symbols."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=Package,
    cmdclass={"bdist_wheel": Wheel},
    packages=[*find_packages(include=["grpo_fast", "grpo_fast.*"]), "grpo_fast.csrc"],
    package_dir={"grpo_fast.csrc": "csrc"},
)
