"""Finding and calling a reward function, here or in a process of its own.

Only the standard library: `isolated.py` runs this very file as its child, which must start in no time and must not load
torch unless the user's function does.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

RewardFunction = Callable[..., Any]


def import_function(path: str) -> RewardFunction:
    """The function at "package.module:function". Raises ValueError when there is none."""
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ValueError(f"rewards: expected 'package.module:function', got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the module, which may raise anything
        raise ValueError(f"rewards: could not import {module_name!r} of {path!r}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"rewards: expected a function {attribute!r} in {module_name}, found {function!r}")
    return function


def call(function: RewardFunction, **arguments: Any) -> list[Any]:
    """What the function returns, awaited if it is a coroutine, as a list."""
    result = function(**arguments)
    if inspect.isawaitable(result):
        awaitable = result

        async def wait() -> Any:
            return await awaitable

        # In a thread of its own, since the caller (a notebook) may already run an event loop in this one.
        with ThreadPoolExecutor(max_workers=1) as pool:
            result = pool.submit(asyncio.run, wait()).result()
    return result.tolist() if hasattr(result, "tolist") else list(result)


def serve(path: str) -> None:
    """The child's loop: one JSON line in, one out. What the function prints goes to stderr, not among the answers."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        function = import_function(path)
    except ValueError as error:
        send({"error": str(error)})
        return
    send({"ready": True})
    for line in sys.stdin:
        try:
            values = call(function, **json.loads(line))
            send({"rewards": [value if isinstance(value, (int, float)) else None for value in values]})
        except Exception as error:  # a user's function may raise anything
            send({"error": f"{type(error).__name__}: {error}"[:500]})


if __name__ == "__main__":
    serve(sys.argv[1])
