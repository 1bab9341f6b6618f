"""HTTP servers in a thread, each with a function from requests to answers."""

from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote


class Request(BaseHTTPRequestHandler):
    """`command`, `headers`, `path` as sent; the connection closes after `cut` bytes of the answer."""

    protocol_version = "HTTP/1.1"
    # Or every answer waits 40 ms for the client's acknowledgement
    disable_nagle_algorithm = True
    cut: int | None = None

    @property
    def place(self):
        """The path without its query, decoded."""
        return unquote(self.path.partition("?")[0])

    @property
    def length(self):
        """The number of bytes of the request body."""
        return int(self.headers.get("Content-Length") or 0)

    def body(self, most=None):
        """Read the request body, or its first bytes."""
        return self.rfile.read(self.length if most is None else most)

    def log_message(self, *arguments):
        pass


@contextmanager
def serving(answer):
    """Serve a function at an address within the block.

    It returns the status, the headers and the body; where it returns None, the connection closes.
    """

    class Handler(Request):
        def serve(self):
            self.cut = None
            if (answered := answer(self)) is None:
                self.close_connection = True
                return
            status, headers, body = answered
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            with suppress(ConnectionError):  # the client has closed the connection
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body[: self.cut])
            self.close_connection |= self.cut is not None

        do_GET = do_HEAD = do_POST = do_PUT = serve  # noqa: N815  # the names http.server calls

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
