"""MODEL: a folder, or a Hub id on a local test server; error messages never contain the token."""

import json
import shutil
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pytest
from checkpoint_folders import files_of
from hub_server import COMMIT, Hub, serving, speak_to
from transformers import AutoModelForCausalLM

import ropepatch
from ropepatch import RopepatchError, diagnose, load
from ropepatch.model.checkpoint import DOWNLOADED, Checkpoint, is_carried

NAME = "a-lab/tiny-llama"
TOKEN = "hf_secret0123456789"


@pytest.fixture
def hub(shards):
    with serving(Hub(NAME, shards)) as hub:
        yield hub


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def run(hub, cache, tmp_path, run_here, monkeypatch):
    """The command line with this Hub and an empty cache, in the folder `here`."""
    speak_to(hub, monkeypatch, TOKEN)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "hub"))
    (tmp_path / "here").mkdir()
    return partial(run_here, cwd=tmp_path / "here")


def switched_off(hub, cache, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_plan_downloads_only_config_json(hub, run):
    done = run("plan", NAME, "--to", "256")
    assert done.stdout.startswith(f"{NAME} at {COMMIT} (llama): 64 -> 256 tokens"), (
        done.stderr
    )
    assert hub.downloaded == ["config.json"]
    assert hub.tokens - {None} == {
        f"Bearer {TOKEN}"
    }  # the client itself also makes requests
    assert TOKEN not in done.stdout + done.stderr


def test_extend_downloads_the_checkpoint_and_records_its_commit(
    shards, cache, tmp_path, run
):
    done = run("extend", NAME, "--to", "256", "--json", "--link-weights")
    assert done.returncode == 0, done.stderr
    (out,) = (tmp_path / "here").iterdir()
    assert out.name == "tiny-llama-yarn-256"
    record = json.loads((out / "ropepatch.json").read_text())
    assert record == json.loads(done.stdout)
    assert (record["model"], record["revision"]) == (NAME, COMMIT)
    assert record["verified"]["logits"] == "equal"
    weights = sorted(path.name for path in shards.glob("*.safetensors*"))
    assert len(weights) > 2
    assert [
        name
        for name in weights
        if (out / name).read_bytes() != (shards / name).read_bytes()
    ] == []
    assert any(blob.samefile(out / weights[0]) for blob in cache.rglob("blobs/*"))
    assert TOKEN not in done.stdout + done.stderr
    assert not any(TOKEN in path.read_text() for path in out.glob("*.json"))


def test_unused_weight_files_of_a_hub_model_are_not_downloaded(hub, shards, run):
    small = {
        "ropepatch.json",
        "additional_chat_templates/tools.jinja",
        "1_Pooling/config.json",
    }
    used = {path.name for path in shards.iterdir()} | small
    others = [
        "consolidated.safetensors",
        "params.json",
        "model.fp16.safetensors",
        "consolidated-00001.json",
    ]
    others += [
        "original/model.safetensors",
        "checkpoint-500/model.safetensors",
        "some/deep/state.json",
    ]
    hub.change(
        NAME,
        "main",
        **dict.fromkeys((*others, *small), b"{}"),
    )
    folder = Checkpoint.find(NAME, weights=True).folder
    assert files_of(folder).keys() == used


def test_the_record_is_the_same_however_a_model_was_loaded(hub, run, tmp_path):
    stock = AutoModelForCausalLM.from_pretrained
    extend = partial(ropepatch.extend, reading=False, say=lambda line: None)
    plans = [
        ropepatch.plan(model, to=256)
        for model in (NAME, load(NAME, device="cpu")[0], stock(NAME))
    ]
    records = [
        extend(plan, tmp_path / str(number)).record for number, plan in enumerate(plans)
    ]
    assert [(record["model"], record["revision"]) for record in records] == [
        (NAME, COMMIT)
    ] * 3
    assert records[0] == records[1] == records[2]


def test_an_existing_output_folder_is_reported_before_weights_are_downloaded(
    hub, tmp_path, run
):
    (tmp_path / "here" / "out").mkdir()
    done = run("extend", NAME, "--to", "256", "--out", "out")
    assert (done.returncode, "already exists" in done.stderr) == (2, True)
    assert hub.downloaded == ["config.json"]


FAILED = f"no folder {NAME} here, and no download: "


def answering(status, code=""):
    return lambda hub, *_: hub.fail("", "", status, code=code)


def unreachable(hub, cache, monkeypatch):
    address = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", address
    )


def odd(content):
    return lambda hub, *_: hub.fail("GET", "/api/", json.dumps(content))


@pytest.mark.parametrize(
    ("prepare", "arguments", "problem", "advice"),
    [
        *(
            (
                odd(content),
                [NAME],
                FAILED,
                "HF_ENDPOINT",
            )
            for content in (
                {"id": NAME, "sha": None},
                {"id": NAME, "sha": COMMIT, "siblings": [3]},
            )
        ),
        (answering(401, "GatedRepo"), [NAME], f"{NAME} is gated", "hf auth login"),
        (answering(401), [NAME], f"no folder {NAME} here", "hf auth login"),
        (answering(403), [NAME], f"{FAILED}403 Forbidden", "hf auth login"),
        (answering(503), [NAME], FAILED, "network"),
        (
            None,
            [NAME, "no-such-branch"],
            f"{NAME} has no revision no-such-branch",
            "`revision`",
        ),
        (None, ["a/b"], "no folder a/b here and no such model on the Hub", "spelling"),
        (
            lambda hub, *_: hub.fail("GET", "/config.json", "torn"),
            [NAME],
            FAILED,
            "network",
        ),
        (
            lambda _, cache, __: cache.write_text("no folder"),
            [NAME],
            FAILED,
            "HF_HOME",
        ),
        (unreachable, [NAME], FAILED, "network"),
        (switched_off, [NAME], FAILED, "downloaded before"),
    ],
)
def test_errors_of_the_hub_have_a_hint(
    hub, cache, run, monkeypatch, prepare, arguments, problem, advice
):
    if prepare:
        prepare(hub, cache, monkeypatch)
    with pytest.raises(RopepatchError) as caught:
        Checkpoint.find(*arguments)
    assert str(caught.value).startswith(problem)
    assert advice in caught.value.hint
    assert TOKEN not in f"{caught.value}{caught.value.hint}"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("tinny", "tiny"), ("tiny-lama", "tiny-llama"), ("./tinyllama", "tiny-llama")],
)
def test_a_misspelled_model_suggests_tiny_or_a_local_folder(
    typed, meant, shards, monkeypatch
):
    monkeypatch.chdir(shards.parent)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RopepatchError) as caught:
        Checkpoint.find(typed)
    assert str(caught.value).startswith(f"no folder {typed}")
    assert caught.value.hint.startswith(f"did you mean {meant}? ")


def test_a_local_folder_takes_precedence_over_the_hub(shards, monkeypatch):
    monkeypatch.chdir(shards.parent)
    source = Checkpoint.find("tiny-llama", weights=True)
    assert (source.name, source.folder, source.revision) == (
        "tiny-llama",
        Path("tiny-llama"),
        None,
    )


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(name, shards, monkeypatch):
    monkeypatch.chdir(shards)
    for find in (Checkpoint.find, diagnose, load):
        with pytest.raises(
            RopepatchError, match=f"^MODEL must be a folder or a Hub id, got {name!r}"
        ) as caught:
            find(name)
        assert "folder" in caught.value.hint
    assert Checkpoint.find(".").folder == Path()


def test_a_path_never_becomes_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "ropepatch.model.checkpoint._download",
        lambda *arguments: pytest.fail("asked the Hub"),
    )
    monkeypatch.chdir(tmp_path)
    for name in (
        Path("a/b"),
        "./a",
        "/a/b",
        "a/b/c",
        "../a",
        "~/a b",
        "a b",
        "a/",
        "~nobody-of-that-name/a",
    ):
        with pytest.raises(RopepatchError) as caught:
            Checkpoint.find(name)
        assert caught.value.hint


@pytest.mark.parametrize(
    "name",
    ["LICENSE", "LICENCE.txt", "Licence", "license-2.0", "NOTICE", "USE_POLICY.md"],
)
def test_a_licence_is_downloaded_and_copied(name):
    assert is_carried(name)
    assert not is_carried(f"{name}.bin")
    assert any(fnmatchcase(name, pattern) for pattern in DOWNLOADED)


def test_a_folder_may_have_the_name_of_a_gguf_file(shards, tmp_path):
    folder = shutil.copytree(shards, tmp_path / "x.gguf")
    assert ropepatch.plan(folder, to=256).target == 256


def test_an_adapter_on_the_hub_is_known_without_its_weights(hub, run):
    hub.create(
        "a/adapter",
        {"adapter_config.json": json.dumps({"base_model_name_or_path": NAME}).encode()},
    )
    with pytest.raises(RopepatchError, match="a/adapter holds a PEFT adapter"):
        ropepatch.plan("a/adapter", to=256)
    codes = [finding.code for finding in diagnose("a/adapter", measure=False).findings]
    assert "adapter-without-record" in codes
