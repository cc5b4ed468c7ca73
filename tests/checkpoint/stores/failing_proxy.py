"""A proxy before a server that answers with an error, slowly, or not at all."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

Fault = Literal["401", "403", "500", "503", "slow", "closed"] | None


@contextmanager
def failing(url: str, fault: Callable[[], Fault]) -> Iterator[str]:
    """The address of a proxy that asks `fault` about every request."""
    target = urlsplit(url).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            chunked = "Transfer-Encoding" in self.headers
            body = self._chunks() if chunked else self.rfile.read(length)
            what = fault()
            if what == "slow":
                time.sleep(0.5)
            elif what == "closed":
                self.close_connection = True
                return
            elif what is not None:
                self.send_response(int(what))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            with closing(http.client.HTTPConnection(target)) as connection:
                self._forward(connection, body)

        def _forward(self, connection: http.client.HTTPConnection, body: bytes) -> None:
            dropped = ("transfer-encoding", "content-length")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
            connection.request(self.command, self.path, body, headers)
            reply = connection.getresponse()
            content = reply.read()
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            size = reply.getheader("Content-Length") if self.command == "HEAD" else len(content)
            self.send_header("Content-Length", str(size or 0))
            self.end_headers()
            self.wfile.write(content)

        def _chunks(self) -> bytes:
            found = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """A client that goes away is no error here."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
