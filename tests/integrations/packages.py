"""Import of the loss modules of verl and OpenRLHF, without packages that only their training needs.

`make trainers` installs verl and OpenRLHF into a separate folder, without their dependencies. They
require different versions of torch and transformers, and OpenRLHF's wheel has a top-level package
`tests` that would hide ours. The environment variable GRPO_FAST_TRAINERS names the folder. It is
not needed if verl and OpenRLHF are installed in the environment.
"""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def load_verl(name: str) -> Any:
    """Import a module of verl. If ray is not installed, a stub replaces it during the import."""
    require("verl", "tensordict", "omegaconf", "codetiming", "transformers")
    with stubbed("ray"):
        return importlib.import_module(name)


def load_openrlhf_loss() -> Any:
    """Import `openrlhf.models.loss` without `openrlhf.models`, which needs DeepSpeed."""
    require("openrlhf")
    if "openrlhf.models" not in sys.modules:
        package = types.ModuleType("openrlhf.models")
        root = importlib.util.find_spec("openrlhf").submodule_search_locations[0]
        package.__path__ = [os.path.join(root, "models")]
        sys.modules["openrlhf.models"] = package
    with stubbed("deepspeed"):
        return importlib.import_module("openrlhf.models.loss")


@contextmanager
def skipping() -> Iterator[None]:
    """Skip the test module if a trainer that is imported in the `with` block is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if "make trainers" not in str(error):
            raise
        pytest.skip(str(error), allow_module_level=True)


def require(*packages: str) -> None:
    """Check that packages can be imported.

    If GRPO_FAST_TRAINERS names a folder, the folder is added to the search path first.

    Raises:
        ModuleNotFoundError: one of the packages is not installed.
    """
    folder = os.environ.get("GRPO_FAST_TRAINERS")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    for package in packages:
        spec = importlib.util.find_spec(package)
        # A folder of the same name in the search path, such as tests/kernels, has no origin.
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"{package} is not installed (make trainers)", name=package)


class Anything:
    """Stand-in for every class of a stubbed module. It accepts any arguments and subscripts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


@contextmanager
def stubbed(name: str) -> Iterator[None]:
    """Provide a stub of a module in a `with` block, unless the module is installed.

    Every attribute of the stub is the class `Anything`.
    """
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        yield
        return

    def attribute(wanted: str) -> type:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return Anything

    module = types.ModuleType(name)
    module.__dict__["__getattr__"] = attribute
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
