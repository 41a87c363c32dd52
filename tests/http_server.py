"""Small HTTP servers for tests."""

from __future__ import annotations

import contextlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler, ABC):
    """A handler that asks `respond` whatever the method, logs nothing, and bears with a client that is gone."""

    @abstractmethod
    def respond(self) -> None:
        """Answer the request."""

    def do_GET(self) -> None:
        """Answer the request."""
        self.respond()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815  the names that http.server calls

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def document(self) -> Any:
        """Return the JSON in the body of the request, None without a body."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return json.loads(body) if body else None

    def reply(self, status: int, data: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        """Answer, with the length of the data unless the headers say another."""
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)


@contextlib.contextmanager
def listening(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """Serve on the loopback until the end of the block; yields HOST:PORT."""
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
