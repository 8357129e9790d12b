"""Script that simulates machines on which C++ kernels may be missing, and runs the package there.

Usage: `python -m tests.kernels.loader_cases FOLDER LIBRARY`. Each case simulates one machine, on
which it computes a loss or trains a model. It runs with an empty cache, in a process that is forked
after torch was imported. LIBRARY is the compiled rows.cpp. To save time, most simulated compilers
are scripts that copy LIBRARY. Each case writes the files out, err and statuses to FOLDER/<case>.
"""

from __future__ import annotations

import os
import pwd
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import grpo_fast
from grpo_fast.kernels import route
from grpo_fast.kernels.cpu import loader as csrc_loader
from grpo_fast.train import loop
from grpo_fast.train.config.recipes import load_recipe

CACHE = "GRPO_FAST_CACHE"
AT_ONCE = {"three_builds": 3}
Prepare, Work = Callable[[Path], None], Callable[[], None]
CASES: dict[str, tuple[Prepare, Work]] = {}


def case(work: Work) -> Callable[[Prepare], Prepare]:
    def add(prepare: Prepare) -> Prepare:
        CASES[prepare.__name__] = prepare, work
        return prepare

    return add


def one_loss() -> None:
    """Compute a loss and its gradient twice, and print the name of the backend."""
    hidden, ids = torch.ones(3, 4, requires_grad=True), torch.tensor([1, 2, 3])
    lengths = torch.tensor([0, 3], dtype=torch.int32)
    for _ in range(2):
        output = grpo_fast.linear_grpo_loss(
            hidden, torch.ones(7, 4), ids, torch.ones(1), grpo_fast.LossConfig(), cu_seqlens=lengths
        )
        output.loss.backward()
    sys.stdout.write(route.rows_route("auto", torch.empty(0)).backend + "\n")


def with_variables(variables: dict[str, str], folder: Path) -> None:
    os.environ.update({name: x.replace("{}", str(folder)) for name, x in variables.items()})


def a_run() -> None:
    folder = Path(os.environ[CACHE]).parent / "run"
    sizes = ["model.config.hidden_size=32", "model.config.intermediate_size=64", "data.n_test=16"]
    few = ["rollout.prompts_per_step=4", "rollout.group_size=4", "log.save_model=false", "steps=1"]
    loop.train(load_recipe("sort", [*sizes, *few, f"output_dir={folder}"]))


def four_threads() -> None:
    threads = [threading.Thread(target=csrc_loader.unavailable) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one_loss()


def script(folder: Path, text: str) -> str:
    path = folder / f"compiler-{os.getpid()}"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path.replace(folder / "compiler"))  # atomic, because a process may run the old one


def copying(folder: Path, before: str = "true") -> None:
    find_output = 'while [ "$1" != -o ]; do shift; done'
    write = f'echo built >> {folder}/builds; cp {sys.argv[2]} "$2"'
    compiler = " ".join(csrc_loader.compiler() or ["false"])
    # The fake compiler is a shell script. If it must compile rows.cpp, it copies a finished library
    # instead. For every other source, it calls the real compiler, because a training run also
    # compiles the attention library.
    others = f'case "$*" in */rows.cpp*) ;; *) exec {compiler} "$@";; esac'
    os.environ["CXX"] = script(folder, f"{before}; {others}; {find_output}; {write}")
    os.environ["GRPO_FAST_GEMM"] = "vendor"  # a loss must not build the gemm library


# Cases that only set environment variables. In a value, {} is replaced with the case's folder.
for _name, _variables in {
    "no_compiler": {"PATH": "{}"},
    "idle_compiler": {"CXX": "true"},
    "garbage_cpu": {"GRPO_FAST_CPU": "sse9\x1b[2J\n" * 1000},
    "switched_off": {"GRPO_FAST_DISABLE_CSRC": "1"},
    "open_quote": {"CXX": "g++ -DNAME='x"},
    "shell_words": {"CXX": "g++; touch {}/planted; $(touch {}/planted) #"},
}.items():
    CASES[_name] = partial(with_variables, _variables), one_loss


@case(one_loss)
def failing_compiler(folder: Path) -> None:
    line = r"In file\nrows.cpp:1: error: \033[2Jplanted"
    shout = rf"(printf '{line}'; head -c 200000 /dev/zero | tr '\0' x) >&2"
    os.environ["CXX"] = script(folder, f"{shout}; exit 3")


@case(one_loss)
def nobody(folder: Path) -> None:
    def missing(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    del os.environ[CACHE], os.environ["HOME"]
    pwd.getpwuid = missing  # type: ignore[assignment]


def give_away(path: Path) -> None:
    """Change the owner of `path` to a different user.

    Only root can change the owner of a file. Without root, replace `os.geteuid`, so that all files
    appear to belong to a different user.
    """
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        os.geteuid = lambda: 12345


@case(one_loss)
def another_users_folder(folder: Path) -> None:
    copying(folder)
    (folder / "cache").mkdir()
    give_away(folder / "cache")


@case(one_loss)
def another_users_library(folder: Path) -> None:
    copying(folder)
    give_away(compiled())


@case(one_loss)
def not_a_folder(folder: Path) -> None:
    (folder / "file").write_text("")
    os.environ[CACHE] = str(folder / "file" / "below")


def compiled() -> Path:
    """Compile a library into the cache, as an earlier process would do, and return its path."""
    path, reason = csrc_loader.compile_library("rows")
    assert path is not None, reason
    return path


@case(one_loss)
def truncated(folder: Path) -> None:
    copying(folder)
    path = compiled()
    os.truncate(path, path.stat().st_size // 2)


@case(one_loss)
def one_bit_changed(folder: Path) -> None:
    copying(folder)
    path = compiled()
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)


@case(one_loss)
def three_builds(folder: Path) -> None:
    copying(folder, before="sleep 1")


@case(one_loss)
def shipped(folder: Path) -> None:
    built = folder / "csrc" / "built" / "generic"
    built.mkdir(parents=True)
    shutil.copy(sys.argv[2], built / "rows.so")
    csrc_loader._PACKAGE = folder
    with_variables({"PATH": "{}", "GRPO_FAST_GEMM": "vendor"}, folder)


@case(four_threads)
def threads(folder: Path) -> None:
    copying(folder, before="sleep 0.5")


CASES["a_slow_run"] = CASES["garbage_cpu"][0], a_run


@case(a_run)
def a_fast_run(folder: Path) -> None:
    copying(folder)


def child(folder: Path, prepare: Prepare, work: Work) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    status = 1
    try:
        os.environ[CACHE] = str(folder / "cache")
        prepare(folder)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    for name, (prepare, work) in CASES.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir()
        children = []
        for _ in range(AT_ONCE.get(name, 1)):
            children.append(os.fork())
            if children[-1] == 0:
                child(folder, prepare, work)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        (folder / "statuses").write_text(" ".join(map(str, statuses)))


if __name__ == "__main__":
    main()
