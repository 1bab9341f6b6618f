"""A Hub of one model in a thread: as much of its HTTP as `snapshot_download` speaks."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What the server holds, and what it was asked for.

    Args:
        name: The id of the one model.
        folder: Its files.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.error: tuple[int, str] | None = None  # status and X-Error-Code of every answer
        self.hung_up: str | None = None  # a file in whose middle the line goes dead
        self.url = ""
        self.downloaded: list[str] = []
        self.tokens: set[str | None] = set()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        if self.error:
            status, code = self.error
            return status, {"X-Error-Code": code, "X-Error-Message": "no"}, b""
        api = f"/api/models/{self.name}/"
        if path.startswith(f"/{self.name}/resolve/{COMMIT}/"):
            return self._file(path.removeprefix(f"/{self.name}/resolve/{COMMIT}/"))
        if path in (f"{api}revision/main", f"{api}revision/{COMMIT}"):
            return 200, {}, json.dumps(self._model()).encode()
        if path == f"{api}tree/{COMMIT}":
            return 200, {}, json.dumps(self._tree()).encode()
        code = "RevisionNotFound" if path.startswith(f"{api}revision/") else "RepoNotFound"
        return 404, {"X-Error-Code": code}, b""

    def _model(self) -> dict:
        files = [{"rfilename": path.name} for path in sorted(self.folder.iterdir())]
        return {"id": self.name, "modelId": self.name, "sha": COMMIT, "siblings": files, "tags": []}

    def _tree(self) -> list[dict]:
        files = sorted(self.folder.iterdir())
        return [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": etag(f)} for f in files]

    def _file(self, name: str) -> tuple[int, dict[str, str], bytes]:
        if not (self.folder / name).is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        headers = {"ETag": f'"{etag(self.folder / name)}"', "X-Repo-Commit": COMMIT}
        return 200, headers, (self.folder / name).read_bytes()


def etag(file: Path) -> str:
    """What names a file's content."""
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """The hub at `hub.url` on this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.tokens.add(self.headers.get("Authorization"))
            status, headers, body = hub.answer(path)
            if self.command == "GET" and "/resolve/" in path:
                hub.downloaded.append(path.rpartition("/")[2])
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET" and path.rpartition("/")[2] == hub.hung_up:
                self.wfile.write(body[: len(body) // 2])
                self.close_connection = True
            elif self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815  # the name http.server calls

        def log_message(self, *arguments: object) -> None:
            pass

    with listening(Handler) as hub.url:
        yield hub


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
