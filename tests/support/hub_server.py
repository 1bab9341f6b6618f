"""A Hub in a thread, with the HTTP requests of downloads, `from_pretrained`, pushes and `datasets`.

Its repositories are in memory, with one commit for each push; names of dataset repositories begin with
`datasets/`. LFS is Git LFS over HTTP, as the Hub supports it for clients without Xet.
"""

import base64
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote

import listening

COMMIT = "0123456789abcdef0123456789abcdef01234567"
USER = "local"  # the owner of the token, who may push only to repositories of this name
LFS = (".safetensors", ".bin", ".gguf")  # as in .gitattributes


@dataclass(frozen=True)
class File:
    """A file in a commit."""

    content: bytes
    lfs: bool = False

    @property
    def oid(self):
        """The git object id; for an LFS file its sha256."""
        if self.lfs:
            return hashlib.sha256(self.content).hexdigest()
        header = b"blob %d\0" % len(self.content)
        return hashlib.sha1(header + self.content).hexdigest()

    def described(self, path):
        """The file's entry in a tree and in the description of a model."""
        size, names = len(self.content), {"path": path, "rfilename": path}
        ids = {"oid": self.oid, "blobId": self.oid, "size": size}
        lfs = {"size": size, "pointerSize": 134, "oid": self.oid, "sha256": self.oid}
        return {"type": "file"} | names | ids | ({"lfs": lfs} if self.lfs else {})


@dataclass
class Model:
    """A repository: commits by name, each with all files by path."""

    private: bool = False
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    # LFS objects by sha256, committed or not
    objects: dict[str, bytes] = field(default_factory=dict)

    def add(self, files, branch="main", commit=None):
        """Add a commit to a branch, and return its name."""
        name = commit or f"{len(self.commits):040x}"
        self.commits[name] = files
        self.branches[branch] = name
        return name


@dataclass
class Fault:
    """A fault for requests of a method, empty for any, whose path contains a part.

    Args:
        how: A status to answer with; `cut`: the connection closes half-way through the request; `lost`: the
            request is executed, but the connection closes before the answer; `torn`: within the answer; any
            other text is an answer with status 200. Or a function that is called just before the request is
            served.
        first: The first matching request that fails, counted from 1.
        times: The number of requests that fail; None for all from then on.
    """

    method: str
    part: str
    how: int | str | Callable[[], object]
    code: str = ""
    message: str = ""
    first: int = 1
    times: int | None = None
    seen: int = 0

    def hits(self, method, path):
        if self.method not in ("", method) or self.part not in path:
            return False
        self.seen += 1
        last = math.inf if self.times is None else self.first + self.times - 1
        return self.first <= self.seen <= last


class Hub:
    """The repositories of the server, and a record of its requests.

    Args:
        name: The id of an initial model, at `COMMIT`; None for no model.
        folder: The folder with its files.
        token: The accepted token; None for any.
    """

    def __init__(
        self,
        name=None,
        folder=None,
        *,
        token=None,
    ):
        self.models = {}
        self.token = token
        self.faults = []
        self.url = ""
        self.downloaded = []
        self.tokens = set()
        self.requests = []  # method and path of every request
        self.arrived = []  # sha256 of every LFS file that arrived completely
        self.lock = RLock()
        if name is not None and folder is not None:
            files = {
                path.relative_to(folder).as_posix(): File(path.read_bytes())
                for path in folder.rglob("*")
                if path.is_file()
            }
            self.models[name] = Model()
            self.models[name].add(files, commit=COMMIT)

    def fail(self, method, part, how, **more):
        """Add a fault, which lasts until `faults` is cleared; see `Fault`."""
        self.faults.append(Fault(method, part, how, **more))

    def count(self, method, part=""):
        """Count the requests of a method whose path contains a part."""
        return sum(one == method and part in path for one, path in self.requests)

    def create(self, name, files=None, *, private=False):
        """Create a repository."""
        self.models[name] = model = Model(private)
        held = files or {}
        model.add({one: File(held[one], one.endswith(LFS)) for one in held})
        return model

    def change(self, name, branch="main", /, **files):
        """Add a commit of another user with files of these names."""
        model = self.models[name]
        changed = {path: File(content) for path, content in files.items()}
        return model.add(model.commits[model.branches[branch]] | changed, branch)

    def head(self, name, branch="main"):
        """Return the newest commit of a branch."""
        return self.models[name].branches[branch]

    def files(self, name, revision="main"):
        """Return the files of a revision."""
        held = self.models[name].commits[self._commit_of(name, revision)]
        return {path: file.content for path, file in held.items()}

    # Answers

    def answer(self, request):
        """Answer a request, with the faults that match it."""
        path, token = request.place, request.headers.get("Authorization")
        with self.lock:
            self.tokens.add(token)
            self.requests.append((request.command, path))
            hits = [one for one in self.faults if one.hits(request.command, path)]
        fault = hits[0] if hits else None
        how = fault.how if fault else None
        if how == "cut":
            request.body(request.length // 2)
            return None
        body = request.body()
        if fault and isinstance(how, int):
            # A header could not contain a second line
            content = json.dumps({"error": fault.message})
            return how, {"X-Error-Code": fault.code}, content.encode()
        if isinstance(how, str) and how not in ("lost", "torn"):
            return 200, {"Content-Type": "application/json"}, how.encode()
        with self.lock:
            if callable(how):
                how()
            answered = self._answer(
                request.command, request.path.partition("?")[0], token, body
            )
        if request.command == "GET" and "/resolve/" in path:
            self.downloaded.append(path.partition("/resolve/")[2].partition("/")[2])
            answered = part(answered, request.headers.get("Range"))
        if how == "torn":
            request.cut = len(answered[2]) // 2
        return None if how == "lost" else answered

    def _answer(self, method, path, token, body):
        if path.startswith("/lfs/") and method not in ("GET", "HEAD"):
            return self._lfs_file(method, path, body)
        if self.token is not None and token not in (None, f"Bearer {self.token}"):
            return refusal(401, "", "Invalid credentials in Authorization header")
        if method in ("GET", "HEAD"):
            return self._read(path, token)
        if found := re.fullmatch(r"/api/(datasets/[^/]+/[^/]+)/paths-info/(.+)", path):
            held = self.models[found[1]].commits[self._commit_of(found[1], found[2])]
            wanted = parse_qs(body.decode()).get("paths", [])
            return good([one for one in entries(held) if one["path"] in wanted])
        if not token:
            return refusal(401, "", "Invalid username or password.")
        return self._write(path, body)

    def _read(self, path, token):
        if path == "/api/whoami-v2":
            user = {"type": "user", "name": USER, "orgs": []}
            return good(user) if token else refusal(401)
        place = r"((?:datasets/)?[^/]+/[^/]+)"
        of_api = re.fullmatch(
            rf"/api/(?:models/)?{place}(?:/(revision|tree)(?:/(.+))?)?", path
        )
        found = of_api or re.fullmatch(rf"/{place}/(resolve)/(.+)", path)
        if found is None:
            return refusal(404)
        name, kind, rest = found.groups()
        model = self.models.get(name)
        if model is None or (model.private and token is None):
            status = 404 if token else 401
            return refusal(status, "RepoNotFound", "Repository not found")
        revision, below = map(unquote, (rest or "main").partition("/")[::2])
        commit = self._commit_of(name, revision)
        if commit not in model.commits:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = model.commits[commit]
        siblings = [one for one in entries(files) if one["path"].startswith(below)]
        if kind == "tree" and (siblings or not below):
            return good(siblings)
        if kind == "tree" or (kind == "resolve" and below not in files):
            return refusal(404, "EntryNotFound", "Entry not found")
        if kind == "resolve":
            file = files[below]
            sizes = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(file.content))}
            return 200, {"ETag": f'"{file.oid}"'} | sizes, file.content
        described = {"id": name.removeprefix("datasets/"), "sha": commit, "tags": []}
        described |= {"private": model.private}
        described["siblings"] = [one for one in siblings if one["type"] == "file"]
        return good(described)

    def _commit_of(self, name, revision):
        return self.models[name].branches.get(revision, revision)

    def _write(self, path, body):
        if path == "/api/validate-yaml":
            return good({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if found := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._batch(found[1], json.loads(body)["objects"])
        place = r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/(.+)"
        if not (found := re.fullmatch(place, path)):
            return refusal(404)
        name, kind, branch = found[1], found[2], unquote(found[3])
        if name not in self.models:
            return refusal(404, "RepoNotFound", "Repository not found")
        if name.split("/")[0] != USER:
            return refusal(403, "", "You don't have the rights to write to this model")
        model = self.models[name]
        if kind == "branch":
            if branch in model.branches:
                return refusal(409, "", "Reference already exists")
            model.branches[branch] = model.branches["main"]
            return good({})
        if branch not in model.branches:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        if kind == "preupload":
            held = model.commits[model.branches[branch]]
            files = json.loads(body)["files"]
            modes = [mode(file["path"], file["size"], held) for file in files]
            return good({"files": modes})
        lines = [json.loads(line) for line in body.splitlines()]
        return self._commit(name, model, branch, lines)

    def _create(self, wanted):
        owner = wanted.get("organization") or USER
        if owner != USER:
            return refusal(403, "", f'No rights under the namespace "{owner}"')
        name = f"{owner}/{wanted['name']}"
        answer = good({"url": f"{self.url}/{name}", "name": name})
        if name in self.models:
            return 409, *answer[1:]
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.create(name, private=bool(private))
        return answer

    def _batch(self, name, objects):
        for one in objects:
            if one["oid"] not in self.models[name].objects:
                address = f"{self.url}/lfs/{name}/{one['oid']}?X-Amz-Signature=0123"
                verify = f"{self.url}/lfs/verify/{name}"
                one["actions"] = {
                    "upload": {"href": address},
                    "verify": {"href": verify},
                }
        return good({"transfer": "basic", "objects": objects})

    def _lfs_file(self, method, path, body):
        if method == "POST":
            held = self.models[path.removeprefix("/lfs/verify/")].objects
            return good({}) if json.loads(body)["oid"] in held else refusal(404)
        name, _, oid = path.removeprefix("/lfs/").rpartition("/")
        if hashlib.sha256(body).hexdigest() != oid:
            return refusal(400, "", "XAmzContentSHA256Mismatch")
        self.models[name].objects[oid] = body
        self.arrived.append(oid)
        return 200, {}, b""

    def _commit(self, name, model, branch, lines):
        header, *operations = [(line["key"], line["value"]) for line in lines]
        head = model.branches[branch]
        if header[1].get("parentCommit", head) != head:
            return refusal(412, "", "A commit has happened since. Please refresh.")
        files = dict(model.commits[head])
        for kind, stated in operations:
            path = stated["path"]
            if kind == "file":
                files[path] = File(base64.b64decode(stated["content"]))
            elif kind == "lfsFile" and stated["oid"] in model.objects:
                files[path] = File(model.objects[stated["oid"]], lfs=True)
            elif kind == "deletedFile" and path in files:
                del files[path]
            else:
                return refusal(422, "", f"cannot carry out {kind} of {path}")
        commit = model.add(files, branch)
        address = f"{self.url}/{name}/commit/{commit}"
        return good({"commitUrl": address, "commitOid": commit})


def good(content):
    return 200, {"Content-Type": "application/json"}, json.dumps(content).encode()


def refusal(status, code="", message=""):
    return status, {"X-Error-Code": code, "X-Error-Message": message}, b""


def entries(files):
    """The entries of a tree: its folders and files."""
    folders = {str(folder) for path in files for folder in Path(path).parents} - {"."}
    kind = {"type": "directory", "oid": "0" * 40, "size": 0}
    found = [kind | {"path": path} for path in sorted(folders)]
    return found + [files[path].described(path) for path in sorted(files)]


def part(answered, byte_range):
    """The answer with only the requested bytes of a file."""
    status, headers, body = answered
    if not byte_range or status != 200:
        return answered
    first, _, last = byte_range.removeprefix("bytes=").partition("-")
    end = min(int(last or len(body)), len(body) - 1)
    place = {"Content-Range": f"bytes {first}-{end}/{len(body)}"}
    return 206, headers | place, body[int(first) : end + 1]


def mode(path, size, held):
    """The Hub's answer before an upload: the upload mode, and the id of an existing file of that name."""
    lfs = path.endswith(LFS) or size > 10 << 20
    # Names, not patterns
    ignored = held.get(".gitignore", File(b"")).content.decode().split()
    stated = {"path": path, "uploadMode": "lfs" if lfs else "regular"}
    stated |= {"shouldIgnore": path in ignored}
    return stated | ({"oid": held[path].oid} if path in held else {})


def environment(hub, home, token="hf_any"):
    """Environment variables with which another process uses this Hub, with a separate cache."""
    kept = {key: os.environ[key] for key in os.environ if not key.startswith("HF_")}
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    own |= {"HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    return kept | own | ({} if token is None else {"HF_TOKEN": token})


def run_elsewhere(code, *words, hub, home, **variables):
    """The JSON lines printed by a new interpreter, since `datasets` reads the Hub's address only once."""
    own = environment(hub, home / "home", None)
    own["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *words],
        env=own | variables,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


def speak_to(hub, monkeypatch, token="hf_any"):
    """Make this process use this Hub, and retry without waiting, until the test ends."""
    for name, value in {
        "ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        "HF_TOKEN_PATH": os.devnull,
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    for module in ("utils._http", "file_download"):
        at_once = SimpleNamespace(sleep=lambda seconds: None)
        monkeypatch.setattr(f"huggingface_hub.{module}.time", at_once)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)


@contextmanager
def serving(hub):
    """Serve the Hub at `hub.url` on this machine within the block."""
    with listening.serving(hub.answer) as hub.url:
        yield hub
