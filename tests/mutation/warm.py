"""A process that has imported torch and forks for every call of pytest: a bug costs no imports.

`__main__.py` starts it inside a copy of the repository, with the copy's environment, as a script:
the tests must be the copy's, so nothing of this package may be imported before the fork.
Each line of its input is a JSON list [log file, pytest's arguments]; each line of its output the
exit status of that call.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import sys

# Slow to import, and never mutated.
PRELOADED = (
    "pytest hypothesis torch torch._dynamo numpy pydantic yaml typer rich.console networkx pandas "
    "pyarrow.parquet peft safetensors.torch transformers transformers.generation "
    "transformers.models.llama.modeling_llama"
).split()


def run(log: str, arguments: list[str]) -> int:
    """pytest's exit status; minus the number of the signal that ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.setsid()  # so that a call that takes too long is ended with all that it started
    handle = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    with open(f"{log}.pid", "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    import pytest

    status = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(status)


def main() -> None:
    sys.path[:] = [os.getcwd(), os.path.join(os.getcwd(), "tests"),
                   *(p for p in sys.path if p != os.path.dirname(__file__))]  # fmt: skip
    plugins = [plugin.module for plugin in importlib.metadata.entry_points(group="pytest11")]
    for name in [*PRELOADED, *plugins]:
        try:
            importlib.import_module(name)
        except ImportError:
            pass
    gc.freeze()  # pytest collects garbage five times as it ends: not all of torch each time
    print("ready", flush=True)
    for line in sys.stdin:
        log, arguments = json.loads(line)
        print(run(log, arguments), flush=True)


if __name__ == "__main__":
    main()
