"""HTTP servers in a thread of this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Handler(BaseHTTPRequestHandler):
    """Requests of one connection; a subclass has a method for each kind."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer waits 40 ms for the client's acknowledgement

    def body(self) -> bytes:
        """Read what was sent."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def send(self, status: int, headers: dict[str, str], body: bytes, most: int | None = None) -> None:
        """Answer; of the body no more than so many bytes, after which the line goes dead."""
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:most])
        self.close_connection |= most is not None

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address on this machine at which a thread answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
