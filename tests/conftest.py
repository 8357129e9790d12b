"""Fixtures and hooks for all tests.

Each test runs in one thread and starts with a fixed seed.
"""

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch  # noqa: F401  (Its table of dtypes must exist before tests replace some.)
import torch
from torch import distributed

from grpo_fast.kernels import route
from tests.loss_cases import IS_INTERPRETER, Fused

if IS_INTERPRETER:
    from tests.kernels.triton_tools import interpreter  # noqa: F401  (its repairs)

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"  # test results must not depend on the network


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Make torch fill every new `torch.empty` tensor with NaN or with the largest integer.

    This includes tensors that C++ code allocates. If a kernel forgets to write an element, the
    element stays NaN and the test fails. torch fills the memory only if deterministic algorithms
    are on.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the plots of a training run, because drawing takes longer than a tiny run."""
    monkeypatch.setattr("grpo_fast.train.report.report.plot_runs", lambda *_: None)


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[SimpleNamespace]]:
    """Return a function `spied(owner, name)` that records all calls of the function `owner.name`.

    The calls still reach the original function. `spied` returns the list of recorded calls. Each
    recorded call has the attributes `args`, `options` and `result`.
    """

    def spy(owner: Any, name: str) -> list[SimpleNamespace]:
        calls, real = list[SimpleNamespace](), getattr(owner, name)

        def recorded(*args: Any, **options: Any) -> Any:
            calls.append(call := SimpleNamespace(args=args, options=options))
            call.result = real(*args, **options)
            return call.result

        monkeypatch.setattr(owner, name, recorded)
        return calls

    return spy


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """Start a process group of one process."""
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def fused_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the fused CPU kernels for tests whose `backend` is a `Fused` object.

    By default, the package uses these kernels only for large LM heads.
    """
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and isinstance(callspec.params.get("backend"), Fused):
        monkeypatch.setattr(route, "FROM_HIDDEN", 1)


# These test files take minutes in one process, so they start first. If they started last, the
# other workers would be idle while these files run.
SLOW_FILES = ("test_triton_compile.py", "test_triton_interpreter.py", "test_trl_parity.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "shuffle the files, and the tests inside a file"
    parser.addoption("--random-order", type=int, metavar="SEED", help=words)


def pytest_configure(config: pytest.Config) -> None:
    # Make pytest-xdist keep our order of the tests. By default, it starts the files with the most
    # tests first, and SLOW_FILES later.
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the global random generators, so that no test depends on earlier tests."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    random.seed(0)
    torch.manual_seed(0)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Release the cached memory of a GPU test, because several processes share the GPU."""
    if item.get_closest_marker("gpu") and torch.cuda.is_available():
        torch.cuda.empty_cache()


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.option.random_order
    return None if seed is None else f"random order: --random-order={seed} repeats it"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.option.random_order
    # Sort the tests by a hash of the seed and the test's name. Adding or removing a test then does
    # not change the order of the other tests.
    if seed is not None:
        items.sort(key=lambda item: (_rank(seed, item.path.name), _rank(seed, item.nodeid)))
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)


def _rank(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed}/{name}".encode()).hexdigest()
