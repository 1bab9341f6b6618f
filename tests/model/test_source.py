"""MODEL: a folder, or a Hub id served here on this machine; what goes wrong is said without the token."""

import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pytest
from checkpoint_folders import write_checkpoint
from hub_server import COMMIT, Hub, serving, speak_to

from ropepatch import RopepatchError, diagnose, load
from ropepatch.model.source import DOWNLOADED, find_source, is_carried

NAME = "a-lab/tiny-llama"
TOKEN = "hf_secret0123456789"
# The command line with one more command that only finds a model: torch, which takes two seconds, stays out.
FIND = """
from ropepatch.cli import app, main
from ropepatch.model.source import find_source

@app.command
def find(model: str, *, revision: str | None = None):
    find_source(model, revision, weights=False)

main()
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("template") / "tiny-llama", max_shard_size="30KB")


@pytest.fixture
def hub(template):
    with serving(Hub(NAME, template)) as hub:
        yield hub


class CommandLine:
    """`ropepatch` in a process of its own: the Hub's address is read at import."""

    def __init__(self, hub: Hub, folder: Path) -> None:
        self.folder = folder / "here"
        self.folder.mkdir()
        self.cache = folder / "cache"
        self.environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(self.cache),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",  # CI sets it; this Hub is on this machine
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1",
        }

    def __call__(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        program = ["-c", FIND] if words[0] == "find" else ["-m", "ropepatch"]
        return subprocess.run(
            [sys.executable, "-W", "error", *program, *words],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.environment | environment,
            check=False,
        )

    def refused(self, done: subprocess.CompletedProcess[str]) -> tuple[str, str]:
        """The message and the hint of a command that has ended as a user error should."""
        lines = done.stderr.splitlines()
        (error,) = [line for line in lines if line.startswith("error: ")]
        (hint,) = [line for line in lines if line.startswith("hint: ")]
        assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (2, "", False)
        assert TOKEN not in done.stderr
        assert [*self.folder.iterdir()] == []
        return error.removeprefix("error: "), hint.removeprefix("hint: ")


@pytest.fixture
def ropepatch(hub, tmp_path) -> CommandLine:
    return CommandLine(hub, tmp_path)


@pytest.fixture
def run_at(hub, ropepatch, run_here, monkeypatch):
    """The same in this process, with the same Hub and cache, for commands that would import torch."""
    speak_to(hub, monkeypatch, TOKEN)
    files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(ropepatch.cache / "hub"))
    return partial(run_here, cwd=ropepatch.folder)


def test_plan_downloads_config_json_alone(hub, ropepatch):
    done = ropepatch("plan", NAME, "--to", "256")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{NAME} at {COMMIT} (llama): 64 -> 256 tokens")
    assert hub.downloaded == ["config.json"]
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.stdout + done.stderr


def test_extend_downloads_the_checkpoint_and_records_its_commit(ropepatch, template, run_at):
    done = run_at("extend", NAME, "--to", "256", "--json")
    assert done.returncode == 0, done.stderr
    (out,) = ropepatch.folder.iterdir()
    assert out.name == "tiny-llama-yarn-256"
    record = json.loads((out / "ropepatch.json").read_text())
    assert record == json.loads(done.stdout)
    assert (record["model"], record["revision"]) == (NAME, COMMIT)
    assert record["verified"]["logits"] == "equal"
    weights = sorted(path.name for path in template.glob("*.safetensors*"))
    assert len(weights) > 2
    assert [name for name in weights if (out / name).read_bytes() != (template / name).read_bytes()] == []
    assert TOKEN not in done.stdout + done.stderr
    assert not any(TOKEN in path.read_text() for path in out.glob("*.json"))


@pytest.mark.slow
def test_a_checkpoint_downloaded_before_is_extended_offline_by_hard_links(hub, ropepatch, run_at):
    assert run_at("extend", NAME, "--to", "256", "--out", "first").returncode == 0
    hub.fail("", "", 503)
    done = ropepatch("extend", NAME, "--to", "256", "--out", "second", "--link-weights", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    shard = next((ropepatch.folder / "second").glob("*.safetensors"))
    assert shard.stat().st_nlink == 2
    assert any(blob.samefile(shard) for blob in ropepatch.cache.rglob("blobs/*"))


def test_a_commit_can_be_named(hub, run_at):
    assert find_source(NAME, COMMIT, weights=False).revision == COMMIT
    assert hub.downloaded == ["config.json"]


def test_a_target_that_exists_is_noticed_before_the_weights_are_downloaded(hub, ropepatch, run_at):
    (ropepatch.folder / "out").mkdir()
    done = run_at("extend", NAME, "--to", "256", "--out", "out")
    assert (done.returncode, "already exists" in done.stderr) == (2, True)
    assert hub.downloaded == ["config.json"]


ANSWERED = f"no folder {NAME} here, and the Hub answered"
UNANSWERED = f"no folder {NAME} here, and the Hub did not answer for it"
SWITCHED_OFF = f"no folder {NAME} here, and the Hub is switched off (HF_HUB_OFFLINE)"


def answering(status: int, code: str = ""):
    return lambda hub, cache: hub.fail("", "", status, code=code)


@pytest.mark.parametrize(
    ("prepare", "asked", "problem", "advice"),
    [
        (answering(401, "GatedRepo"), [NAME], f"{NAME} is gated", "hf auth login"),
        (answering(401), [NAME], f"no folder {NAME} here", "hf auth login"),
        (answering(403), [NAME], f"{ANSWERED} 403 for it", "HF_TOKEN"),
        (answering(503), [NAME], f"{ANSWERED} 503 for it", "try again later"),
        (None, [NAME, "no-such-branch"], f"{NAME} has no revision no-such-branch", "--revision"),
        (None, [NAME, COMMIT[:-1] + "0"], f"{NAME} has no revision {COMMIT[:-1]}0", "--revision"),
        (None, ["a/b"], "no folder a/b here and no such model on the Hub", "spelling"),
        (lambda hub, cache: hub.fail("GET", "/config.json", "torn"), [NAME], UNANSWERED, "network"),
        (lambda hub, cache: cache.write_text("no folder"), [NAME], f"cannot download {NAME}: ", "HF_HOME"),
    ],
)
def test_what_goes_wrong_at_the_hub_is_said_with_what_to_do(
    hub, ropepatch, run_at, prepare, asked, problem, advice
):
    if prepare:
        prepare(hub, ropepatch.cache)
    with pytest.raises(RopepatchError) as caught:
        find_source(*asked, weights=False)
    assert str(caught.value).startswith(problem)
    assert advice in caught.value.hint
    assert TOKEN not in f"{caught.value}{caught.value.hint}"


@pytest.mark.parametrize(
    ("environment", "problem", "advice"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, UNANSWERED, "network"),
        ({"HF_HUB_OFFLINE": "1"}, SWITCHED_OFF, "downloaded before"),
    ],
)
def test_a_hub_that_the_environment_shuts_off_is_said_to_be(ropepatch, environment, problem, advice):
    message, hint = ropepatch.refused(ropepatch("find", NAME, **environment))
    assert message.startswith(problem)
    assert advice in hint


@pytest.mark.parametrize(
    ("typed", "meant"), [("tinny", "tiny"), ("tiny-lama", "tiny-llama"), ("./tinyllama", "tiny-llama")]
)
def test_a_name_that_is_nearly_tiny_or_a_folder_here_is_asked_after(typed, meant, template, monkeypatch):
    monkeypatch.chdir(template.parent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RopepatchError) as caught:
        find_source(typed, weights=False)
    assert str(caught.value).startswith(f"no folder {typed}")
    assert caught.value.hint.startswith(f"did you mean {meant}? ")


def test_a_folder_is_taken_before_the_hub_is_asked(template, monkeypatch):
    monkeypatch.chdir(template.parent)
    source = find_source("tiny-llama", weights=True)
    assert (source.name, source.folder, source.revision) == ("tiny-llama", Path("tiny-llama"), None)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(name, template, monkeypatch):
    monkeypatch.chdir(template)
    for find in (partial(find_source, weights=False), diagnose, load):
        with pytest.raises(RopepatchError, match=f"^MODEL must not be empty, got {name!r}") as caught:
            find(name)
        assert "folder" in caught.value.hint
    assert find_source(".", weights=False).folder == Path()


def test_a_path_never_becomes_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.setattr("ropepatch.model.source._from_hub", lambda *arguments: pytest.fail("asked the Hub"))
    monkeypatch.chdir(tmp_path)
    for name in (Path("a/b"), "./a", "/a/b", "a/b/c", "../a", "~/a b", "a b", "a/", "~nobody-of-that-name/a"):
        with pytest.raises(RopepatchError) as caught:
            find_source(name, weights=False)
        assert caught.value.hint


@pytest.mark.parametrize(
    "name", ["LICENSE", "LICENCE.txt", "Licence", "license-2.0", "NOTICE", "USE_POLICY.md"]
)
def test_a_licence_is_carried_and_downloaded_from_the_hub(name):
    assert is_carried(name)
    assert not is_carried(f"{name}.bin")
    assert any(fnmatchcase(name, pattern) for pattern in DOWNLOADED)
