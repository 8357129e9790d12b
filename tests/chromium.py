"""Client for headless Chromium that renders pages and evaluates JavaScript in them.

The client uses the DevTools protocol over two pipes and needs no Python package.
"""

import contextlib
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WAIT = 240  # seconds to wait for an answer; Chromium may be slow on a loaded machine
COMMAND = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page in a Chromium process.

    Scripts of the loaded page are disabled, but `evaluate` can run JavaScript in the page.
    """

    def __init__(self, send: int, receive: int) -> None:
        self.send, self.receive = send, os.fdopen(receive, "rb", buffering=0)
        self.number, self.session, self.buffer = 0, None, b""
        self.events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        self.call("Page.enable")

    def message(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.receive], [], [], WAIT)
            read = self.receive.read(1 << 20) if ready else b""
            if not read:
                raise RuntimeError("Chromium has ended" if ready else "Chromium does not answer")
            self.buffer += read
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        call = {"id": self.number, "method": method, "params": params}
        if self.session:
            call["sessionId"] = self.session
        os.write(self.send, json.dumps(call).encode() + b"\0")
        while (answer := self.message()).get("id") != self.number:
            self.events.append(answer.get("method", ""))
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, page: Path, width: int, scheme: str) -> None:
        """Load an HTML file into the page, and wait until it is loaded.

        Args:
            page: The HTML file.
            width: Width of the window in CSS pixels.
            scheme: The color scheme, `light` or `dark`.
        """
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.events.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=True)
        self.call("Page.navigate", url=page.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self.events.append(self.message().get("method", ""))

    def evaluate(self, expression: str) -> Any:
        self.call("Emulation.setScriptExecutionDisabled", value=False)
        given = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in given:
            raise RuntimeError(str(given["exceptionDetails"]))
        return given["result"].get("value")


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium, yield its page, and end the process when the `with` block ends.

    Chromium stores its profile in `folder`.
    """
    (theirs, send), (receive, ours) = os.pipe(), os.pipe()

    def wire() -> None:  # in the child process: Chromium reads from fd 3 and writes to fd 4
        one, two = os.dup(theirs), os.dup(ours)
        os.dup2(one, 3), os.dup2(two, 4)

    command = [str(COMMAND), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               "--remote-debugging-pipe", "--disable-dev-shm-usage", "--no-first-run",
               "--disable-background-networking", f"--user-data-dir={folder}"]  # fmt: skip
    process = subprocess.Popen(
        command, preexec_fn=wire, pass_fds=(3, 4), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(theirs), os.close(ours)
    try:
        yield Browser(send, receive)
    finally:
        process.terminate()
        process.wait()
        os.close(send)
