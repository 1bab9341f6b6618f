"""A Hub of one dataset in a thread: as much of its HTTP as streaming with `datasets` speaks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import listening
from hub_server import COMMIT, File, good, refusal
from listening import Answer, Request


def asked_elsewhere(code: str, *words: str, home: Path, url: str, offline: bool = False) -> list[Any]:
    """The JSON lines that an interpreter of its own prints: `datasets` reads the Hub's address once."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    own = {"HF_ENDPOINT": url, "HF_HOME": str(home / "home"), "HF_HUB_DISABLE_XET": "1"}
    own |= {"HF_HUB_OFFLINE": str(int(offline)), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    line = [sys.executable, "-W", "error", "-c", code, *words]
    done = subprocess.run(line, env=kept | own, cwd=home, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


class DatasetHub:
    """What the server holds, and what it handed out.

    Args:
        name: The id of the one dataset.
        folder: Its files.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.dead: str | None = None  # a file that is listed, but answered by status 500
        self.url = ""
        self.asked: list[str] = []  # every path
        self.read: list[str] = []  # the files whose bytes were asked for

    def answer(self, request: Request) -> Answer:
        """The answer to a request; of a file perhaps a part."""
        path = request.place
        self.asked.append(path)
        status, headers, body = self._answer(path, parse_qs(request.body().decode()).get("paths", []))
        if request.command == "GET" and "/resolve/" in path and status == 200:
            self.read.append(path.partition("/resolve/")[2].partition("/")[2])
        if (asked := request.headers.get("Range")) and status == 200:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            end = min(int(last or len(body)), len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{end}/{len(body)}"
            status, body = 206, body[int(first) : end + 1]
        return status, headers, body

    def _answer(self, path: str, wanted: list[str]) -> Answer:
        """To a path; `wanted` are the files of a paths-info."""
        api = f"/api/datasets/{self.name}"
        for revision in ("main", COMMIT):
            if path.startswith(files := f"/datasets/{self.name}/resolve/{revision}/"):
                return self._file(path.removeprefix(files))
            if path == f"{api}/paths-info/{revision}":
                return good([self._entry(self.folder / name) for name in wanted if name])
            if path == f"{api}/revision/{revision}":
                return self._info()
            if path == (tree := f"{api}/tree/{revision}") or path.startswith(f"{tree}/"):
                below = self.folder / path.removeprefix(tree).strip("/")
                entries = [self._entry(path) for path in sorted(below.rglob("*"))]
                return good(entries) if below.is_dir() else refusal(404, "EntryNotFound")
        return self._info() if path == api else refusal(404, "RepoNotFound")

    def _info(self) -> Answer:
        files = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        siblings = [{"rfilename": str(path.relative_to(self.folder))} for path in files]
        return good({"id": self.name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})

    def _entry(self, path: Path) -> dict[str, Any]:
        place = str(path.relative_to(self.folder))
        if path.is_dir():
            return {"path": place, "type": "directory", "oid": "0" * 40, "size": 0}
        return File(path.read_bytes()).described(place)

    def _file(self, name: str) -> Answer:
        if not (self.folder / name).is_file():
            return refusal(404, "EntryNotFound")
        if name == self.dead:
            return refusal(500)
        file = File((self.folder / name).read_bytes())
        return 200, {"ETag": f'"{file.etag}"', "X-Repo-Commit": COMMIT}, file.content


@contextmanager
def serving(hub: DatasetHub) -> Iterator[DatasetHub]:
    """The hub at `hub.url` on this machine."""
    with listening.serving(hub.answer) as hub.url:
        yield hub
