"""An HTTP proxy before a vLLM server that changes what is asked and what is answered."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

GENERATE = "/inference/v1/generate"
Change = Callable[[dict[str, Any]], Any]


class Proxy:
    """On loopback; `asked` and `answered` change the JSON of completions in place."""

    def __init__(self, url: str, asked: Change | None = None, answered: Change | None = None):
        self.target, self.asked, self.answered = urlsplit(url), asked, answered
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def _pass_on(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        is_question = path == GENERATE
        if is_question and self.asked:
            question = json.loads(body)
            self.asked(question)
            body = json.dumps(question).encode()
        link = http.client.HTTPConnection(self.target.hostname, self.target.port, timeout=300)
        link.request(method, path, body, {"Content-Type": "application/json"})
        response = link.getresponse()
        status, answer = response.status, response.read()
        link.close()
        if is_question and self.answered and status == 200:
            found = json.loads(answer)
            self.answered(found)
            answer = json.dumps(found).encode()
        return status, answer

    def _handler(proxy) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                try:
                    status, answer = proxy._pass_on(self.command, self.path, body)
                except OSError:
                    status, answer = 503, b"{}"
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        return Handler
