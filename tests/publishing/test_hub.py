"""A push to a local Hub: uploaded files, rejected folders, and recovery from failures.

The transfer is LFS over HTTP: the real Hub's Xet was not run.
"""

import itertools
import json
import logging
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from checkpoint_folders import RECORDS, edit_json, files_of, write_checkpoint
from checkpoint_folders import contents as everything
from hub_server import Hub, serving, speak_to
from safetensors.numpy import save_file

import ropepatch
from ropepatch import RopepatchError
from ropepatch.files import check_secrets
from ropepatch.model.checkpoint import CODE, READING
from ropepatch.model.weights import checksums, fingerprint, read_headers
from ropepatch.publishing.card.writing import MARKER
from ropepatch.publishing.contents import judge
from ropepatch.publishing.hub import push

NAME = "local/tiny-2k"
TOKEN = "hf_" + "0a" * 17
WRITE_CARD = "ropepatch.publishing.hub.write_card"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
INDEX = "model.safetensors.index.json"
CHANGES = {
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "linear", "factor": 8.0},
}
CHECK = {"base": 1.0, "now": 1.01, "increase": 0.01, "most": 0.02, "passed": True}
TRAINING = RECORDS["trained"]["training"] | {"short_context": CHECK}
RECORD = RECORDS["trained"] | {"config_changes": CHANGES, "training": TRAINING}
OURS = f"{MARKER}\n![keys](evaluation/retrieval.png)"  # a card that ropepatch wrote


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    """A checkpoint as `extend` leaves it, with weights in three files of 80 kB."""
    folder = tmp_path / "tiny-2k"
    folder.mkdir()
    for number, shard in enumerate(SHARDS):
        save_file(
            {f"tensor{number}": np.full(20_000, number, np.float32)}, folder / shard
        )
    names = {f"tensor{number}": shard for number, shard in enumerate(SHARDS)}
    written = {
        INDEX: {"metadata": {}, "weight_map": names},
        "config.json": {"model_type": "llama"} | CHANGES,
        "ropepatch.json": RECORD,
        "tokenizer.json": {"version": "1.0"},
        "merges.txt": "a b",
        "README.md": "# mine",
        "evaluation.html": "<html>",
        "evaluation/retrieval.json": {"found": 1.0},
        "evaluation/retrieval.png": "drawn",
        "training/recipe.yaml": "to: 2k",
        ".eval_results/mmlu_pro.yaml": "[]",
    }
    for name, content in written.items():
        write(folder / name, content)
    prove(folder)
    return folder


def prove(folder):
    """Let the record say that the weights are the verified ones."""
    weights = read_headers(folder)
    edit_json(
        folder / "ropepatch.json",
        weights=fingerprint(weights),
        checksums=checksums(weights),
    )


@pytest.fixture
def hub(monkeypatch):
    with serving(Hub(token=TOKEN)) as hub:
        speak_to(hub, monkeypatch, TOKEN)
        yield hub


def refused(folder, repo=NAME, **options):
    """The error and its hint, each one line and without the token."""
    with pytest.raises(RopepatchError) as caught:
        push(folder, repo, **options)
    said = f"{caught.value} | {caught.value.hint}"
    assert "\n" not in said
    assert TOKEN not in said
    return said


# Uploaded files


def test_a_push_uploads_the_folder_and_its_repeat_nothing(hub, folder):
    done = push(folder, NAME)
    assert hub.files(NAME) == files_of(folder)
    assert (done.repo, done.url, done.branch) == (NAME, f"{hub.url}/{NAME}", "main")
    assert (done.commit, done.dry_run) == (hub.head(NAME), False)
    assert done.files == {path: len(data) for path, data in files_of(folder).items()}
    assert (done.deleted, done.left_out) == ((), ())
    assert len(hub.arrived) == 3
    again = push(folder, NAME)
    assert (again.commit, again.notes) == (done.commit, ())
    assert hub.head(NAME) == done.commit
    assert len(hub.arrived) == 3


def test_files_of_an_earlier_push_are_deleted_but_others_stay(hub, folder):
    push(folder, NAME)
    kept = {
        "notes.md": b"mine",
        "tiny.gguf": b"mine",
        "onnx/model.onnx": b"mine",
    }
    hub.change(NAME, **kept)
    gone = {
        *SHARDS,
        INDEX,
        "training/recipe.yaml",
        "evaluation/retrieval.json",
        "evaluation/retrieval.png",
        ".eval_results/mmlu_pro.yaml",
    }
    for name in gone:
        (folder / name).unlink()
    save_file({"tensor": np.zeros(9, np.float32)}, folder / "model.safetensors")
    prove(folder)
    commits = len(hub.models[NAME].commits)
    assert set(push(folder, NAME).deleted) == gone
    assert hub.files(NAME) == files_of(folder) | kept
    assert len(hub.models[NAME].commits) == commits + 1
    (folder / "evaluation.html").unlink()  # a push that only deletes is a commit too
    done = push(folder, NAME)
    assert (done.deleted, done.commit) == (("evaluation.html",), hub.head(NAME))
    assert hub.files(NAME) == files_of(folder) | kept


def test_weights_of_others_are_replaced_by_force_alone(hub, folder):
    own = {"evaluation/mine.json": b"{}", "evaluation.html": b"mine"}
    gone = {"model.safetensors": b"old", "adapter_config.json": b"{}"}
    same = {SHARDS[1]: (folder / SHARDS[1]).read_bytes()}
    held = own | gone | same | {SHARDS[0]: b"old"}
    hub.create(NAME, held)
    (folder / "evaluation.html").unlink()
    for dry_run in (True, False):
        said = refused(folder, dry_run=dry_run)
        others = ", ".join(sorted({*gone, *SHARDS[:2]}))
        assert said.startswith(f"{NAME} contains other weights: {others} | ")
        assert "--force" in said
    assert hub.files(NAME) == held
    done = push(folder, NAME, force=True)
    assert hub.files(NAME) == files_of(folder) | own
    assert set(done.deleted) == set(gone)


def test_a_new_branch_replaces_what_main_keeps(hub, folder):
    theirs = {"model.safetensors": b"old", "README.md": b"# theirs"}
    hub.create(NAME, theirs)
    hub.fail("POST", "/commit/", 500)
    refused(folder, revision="longer")
    hub.faults.clear()
    push(folder, NAME, revision="longer")
    assert hub.files(NAME) == theirs
    assert hub.files(NAME, "longer") == files_of(folder)
    hub.create("local/other", theirs)
    hub.models["local/other"].branches["longer"] = hub.head("local/other")
    hub.change("local/other", "longer", **{"model.safetensors": b"longer"})
    assert "local/other contains other weights" in refused(
        folder, "local/other", revision="longer"
    )


def test_only_a_card_of_ropepatch_is_replaced_on_the_hub(hub, folder, monkeypatch):
    asked = []

    def write_card(place, repo, revision):
        asked.append((repo, revision))
        write(place / "README.md", f"{OURS} {len(asked)}")

    monkeypatch.setattr(WRITE_CARD, write_card)
    (folder / "README.md").unlink()
    push(folder, "tiny-2k")
    done = push(folder, NAME, revision="main")
    assert done.notes == ()
    assert hub.files(NAME)["README.md"] == f"{OURS} 2".encode()
    push(folder, NAME, revision="longer")
    assert asked == [(NAME, None), (NAME, None), (NAME, "longer")]
    theirs = b"# mine, written on the Hub"
    hub.change(NAME, **{"README.md": theirs})
    write(folder / "merges.txt", "b c")
    for options in ({"dry_run": True}, {}):
        done = push(folder, NAME, **options)
        assert "README.md" not in done.files
        (note,) = done.notes
        assert note.startswith("README.md on the Hub is not from ropepatch and is kept")
    assert hub.files(NAME) == files_of(folder) | {"README.md": theirs}
    assert len(asked) == 3
    write(folder / "README.md", "# my own, which replaces it")
    push(folder, NAME)
    assert hub.files(NAME) == files_of(folder)


def test_an_invalid_card_reaches_no_hub(hub, folder):
    write(folder / "README.md", "---\nlicense: [mit\n---\n")
    hub.fail("POST", "/api/validate-yaml", 400)
    assert "Invalid metadata in README.md." in refused(folder)
    (folder / "README.md").unlink()
    assert "retrieval.json" in refused(folder)  # which no card can be written from
    assert hub.count("PUT") == 0


def test_a_public_repository_is_not_taken_for_private(hub, folder):
    hub.create(NAME)
    for dry_run in (False, True):
        assert f"{NAME} exists and is public" in refused(
            folder, private=True, dry_run=dry_run
        )
    assert hub.files(NAME) == {}
    push(folder, "local/own", private=True)
    assert hub.models["local/own"].private
    push(folder, "local/own", private=True)


# Files that are not uploaded


def test_nothing_but_a_checkpoint_leaves_the_folder(hub, folder):
    stays = [
        "pytorch_model.bin",
        "modeling_tiny.py",
        "optimizer.pt",
        ".env",
        "x.json.partial",
        "model-00004-of-00003.safetensors",
        "LICENSE.bin",
        "trainer_state.json",
        ".git/config",
        "additional_chat_templates/tool.py",
        "extra.safetensors",
        "evaluation/cache.pkl",
        "run/state.json",
        "credentials.json",
        "config.local.json",
        "LICENSE_KEY.txt",
        "notice_to_self_passwords.md",
        "tokenizer.secret.json",
        "model.gguf",
        "evaluation/x.json/deep",
    ]
    sent = files_of(folder)
    for name in stays:
        write(folder / name, "{}")
    own = ["LICENSE-2.0.txt", "NOTICE.md", "additional_chat_templates/tool.jinja"]
    for name in own:
        write(folder / name, "own")
    done = push(folder, NAME)
    assert hub.files(NAME) == sent | dict.fromkeys(own, b"own")
    named = {name for name in stays if not name.startswith(".") and "/" not in name}
    assert set(done.left_out) == {*named, "run"}


@pytest.mark.parametrize("name", ["merges.txt", SHARDS[0]])
def test_a_link_that_leads_out_of_the_folder_is_refused(hub, folder, name):
    outside = folder.parent / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    assert "leads out of the checkpoint" in refused(folder)
    assert hub.requests == []


LINE = "b3BlbnNzaC1rZXktdjEAAAA\n"
KEY = (
    "-----BEGIN OPENSSH PRIVATE"
    + f" KEY-----\n{LINE * 9}-----END OPENSSH PRIVATE KEY-----"
)
SECRETS = {  # what is said of it, by what it is
    "the token of an organisation": ("api_of_an_organisation", "a Hub access token"),
    "a token": ("hf_" + "Zz9" * 11 + "A", "a Hub access token"),
    "a key": (KEY, "a private key"),
    "a key of 12 kB": (KEY.replace(LINE, LINE * 60), "a private key"),
    "a key in JSON": (json.dumps(KEY), "a private key"),
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_token_or_key_is_refused_in_any_encoding(hub, folder, kind, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "api_of_an_organisation")
    secret, said = SECRETS[kind]
    for code in ("utf-8", "utf-16-be", "utf-32"):
        (folder / "LICENSE").write_bytes(f"Copyright.\nmine: {secret}\n".encode(code))
        assert f"LICENSE contains {said}" in refused(folder)
        assert f"LICENSE contains {said}" in refused(folder, force=True)
    assert hub.requests == []


def test_what_only_looks_like_a_key_is_no_secret(tmp_path):
    names = [
        "hf_hub_download_and_more_of_its_kind_",
        "hf_" + "a" * 33,
        "-----BEGIN PRIVATE KEY-----",
    ]
    public = f"-----BEGIN PUBLIC KEY-----\n{LINE * 9}-----END PUBLIC KEY-----"
    for name, text in (("tokenizer.json", json.dumps(names)), ("NOTICE", public)):
        (tmp_path / name).write_text(text)
        assert check_secrets({name: tmp_path / name}) == ()


def test_included_files_are_sent_and_searched_for_secrets(hub, folder, monkeypatch):
    (folder / "examples/deep").mkdir(parents=True)
    others = ["notes.md", "examples/a.txt", "examples/.env", "examples/deep/b.txt"]
    for name in (*others, "x.gguf"):
        write(folder / name, "mine")
    with pytest.raises(RopepatchError, match=r"`include=nothing\*` names no file in"):
        push(folder, NAME, include=["notes.md", "nothing*"])
    done = push(folder, NAME, include=["notes.md", "examples/*"])
    assert {"notes.md", "examples/a.txt", "examples/deep/b.txt"} <= done.files.keys()
    assert done.left_out == ("x.gguf",)
    assert "examples/.env" not in hub.files(NAME)
    monkeypatch.setattr("ropepatch.files.LARGEST", 300)
    write(folder / "notes.md", "x" * 301)
    (note, *_) = push(folder, NAME, include=["notes.md"]).notes
    assert "too large" in note
    assert "notes.md" in note
    write(folder / "examples/a.txt", SECRETS["a token"][0])
    assert "examples/a.txt contains" in refused(folder, include=["examples/*"])


def half(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


UNSOUND = {
    f"{SHARDS[1]} is truncated": lambda folder: half(folder / SHARDS[1]),
    "no config.json in": lambda folder: (folder / "config.json").unlink(),
    "no folder ": shutil.rmtree,
}


@pytest.mark.parametrize("reason", UNSOUND)
def test_an_unsound_checkpoint_is_refused_before_the_hub_is_asked(hub, folder, reason):
    UNSOUND[reason](folder)
    for force in (False, True):
        assert reason in refused(folder, force=force)
    assert hub.requests == []


# Conditions of a push


@pytest.fixture(scope="module")
def mapped(tmp_path_factory):
    """A checkpoint with a position remapping, as `extend` leaves it."""
    made = tmp_path_factory.mktemp("mapped")
    source = write_checkpoint(made / "source")
    return ropepatch.extend(source, made / "map", to=256, method="rerope").folder


@pytest.mark.parametrize(
    "name",
    ["tokenizer_config.json", "generation_config.json", "custom_generate/generate.py"],
)
def test_other_code_beside_a_remapping_is_refused(hub, mapped, tmp_path, name):
    foreign = Path(shutil.copytree(mapped, tmp_path / "map"))
    include = ["custom_generate/*"] if "generate.py" in name else []
    write(foreign / name, {"auto_map": {"AutoTokenizer": "other/repo--module.Class"}})
    assert f"{name} contains other code" in refused(foreign, include=include)
    assert hub.requests == []
    if include:  # it stays behind where nobody asks for it
        push(foreign, NAME)
        assert name not in hub.files(NAME)


def test_changed_code_of_a_remapping_is_refused(hub, mapped, tmp_path):
    foreign = Path(shutil.copytree(mapped, tmp_path / "map"))
    assert push(foreign, NAME, dry_run=True).card.startswith("---\n")
    assert not (foreign / "README.md").exists()
    assert push(foreign, NAME).notes == ()
    assert hub.files(NAME)["README.md"] == (foreign / "README.md").read_bytes()
    (foreign / CODE).write_text((foreign / CODE).read_text() + "# mine\n")
    assert "its code has changed since it was verified" in refused(foreign)


def check(**values):
    return {"training": TRAINING | {"short_context": CHECK | values}}


QUANTISED = "not compared: quantised weights"
UNCOMPARED = {
    "verified": RECORD["verified"]
    | {"logits": QUANTISED, "compared": False, "difference": None}
}
NARROW = {"max_position_embeddings": 256}
EDITED = "config.json has changed"
PROVEN = {  # by case: what the record says, what config.json says, what speaks against it, what is noted
    "sound": ({}, {}, "", ""),
    "not compared": (UNCOMPARED, {}, "", f"logits {QUANTISED}"),
    "not verified": ({"verified": None}, {}, "`verified` in ropepatch.json)", ""),
    "other weights": (
        {"checksums": {SHARDS[0]: "0" * 64}},
        {},
        f"({INDEX}, {SHARDS[0]}, ",
        "",
    ),
    "by samples": ({"weights": "0" * 64, "checksums": None}, {}, "weights have ch", ""),
    "unknown weights": (
        {"weights": None, "checksums": None},
        {},
        "weights have ch",
        "",
    ),
    "red": (check(passed=False, increase=0.071), {}, "rose by 7.1%, allowed 2.0%", ""),
    "doubtful": (check(increase=0.071), {}, "", ""),
    "config edited": ({"config_changes": CHANGES | {"x": 4096}}, {}, EDITED, ""),
    "text alone": ({}, {"text_config": CHANGES}, "", ""),
    "vision alone": ({}, NARROW | {"vision_config": CHANGES}, EDITED, ""),
    "other text": ({}, {"text_config": NARROW, "vision_config": CHANGES}, EDITED, ""),
    "other text, same top": ({}, {"text_config": NARROW} | CHANGES, EDITED, ""),
}


@pytest.mark.parametrize("name", PROVEN)
def test_what_is_not_proven_speaks_against_a_push(folder, name):
    record, config, reason, note = PROVEN[name]
    edit_json(folder / "ropepatch.json", **record)
    if config:
        write(folder / "config.json", {"model_type": "llava"} | config)
    judgement = judge(folder)
    assert reason in "; ".join(judgement.against)
    assert note in "; ".join(judgement.notes)
    assert bool(judgement.against + judgement.notes) == bool(reason or note)


def test_a_fingerprint_of_other_weights_speaks_against_a_push(folder):
    reading = {"version": 1, "weights": "others", "window": 1, "target": 2}
    reading |= {"vocabulary": 9, "ids": [3, 4], "positions": [1, 2], "alike": []}
    tops = {"right": [{"5": -0.1}, {"6": -0.1}]}
    write(folder / READING, reading | {"tops": tops, "rounded": [0.0, 0.0]})
    assert judge(folder).against == [f"{READING} belongs to other weights"]


@pytest.mark.parametrize(
    ("damage", "reason"), [(Path.unlink, "no ropepatch.json"), (half, "cannot read ")]
)
def test_without_a_sound_record_force_pushes_without_card(
    hub, folder, damage, reason, monkeypatch
):
    damage(folder / "ropepatch.json")
    assert reason in refused(folder)
    assert hub.requests == []
    (folder / "README.md").unlink()
    monkeypatch.setattr(WRITE_CARD, lambda *given: pytest.fail("it made none"))
    assert reason in push(folder, NAME, force=True).notes[0]
    assert hub.files(NAME) == files_of(folder)


def test_an_adapter_needs_no_verification_but_its_check(hub, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"lora_A": np.ones(9, np.float32)}, adapter / "adapter_model.safetensors")
    write(adapter / "adapter_config.json", {"r": 8})
    write(adapter / "ropepatch.json", RECORDS["adapter"] | {"training": TRAINING})
    base = {"base_model_name_or_path": "/home/me/secret/base"}
    write(adapter / "adapter_config.json", {"r": 8} | base)
    push(adapter, NAME)
    assert hub.files(NAME)["README.md"] == (adapter / "README.md").read_bytes()
    config = json.loads(hub.files(NAME)["adapter_config.json"])
    assert config["base_model_name_or_path"] == "base"
    edit_json(adapter / "ropepatch.json", **check(passed=False))
    assert "the short-context check failed" in refused(adapter)
    half(adapter / "adapter_model.safetensors")
    assert "truncated" in refused(adapter, force=True)


# Names and tokens


def test_what_is_no_name_of_a_repository_is_refused(hub, folder):
    for repo in ("", "a/b/c", "https://hf.co/a/b", "a/..", "a/b.git", "ö/a"):
        assert refused(folder, repo).startswith(f"cannot push to {repo}: ")
    assert hub.requests == []


def test_an_unknown_or_missing_token_is_noticed_first(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    for repo in (NAME, "tiny-2k"):
        said = refused(folder, repo)
        assert said.startswith("cannot push to ")
        assert "hf_another" not in said
    hub.requests.clear()
    monkeypatch.delenv("HF_TOKEN")
    assert refused(folder).startswith("no token for the Hub")
    assert hub.requests == []


# A dry run


def test_a_dry_run_sends_nothing_and_foretells_the_push(hub, folder):
    before = everything(folder)
    would = push(folder, NAME, dry_run=True)
    assert (would.dry_run, would.commit) == (True, None)
    assert sorted(would.files) == sorted(files_of(folder))
    assert everything(folder) == before
    assert {method for method, _ in hub.requests} == {"GET"}
    push(folder, NAME)
    (folder / "evaluation/retrieval.json").unlink()
    write(folder / "merges.txt", "b c")
    would = push(folder, NAME, dry_run=True, revision="longer")
    done = push(folder, NAME, revision="longer")
    assert (would.files, would.deleted) == (done.files, done.deleted)
    assert done.deleted == ("evaluation/retrieval.json",)


def test_a_dry_run_without_the_hub_says_so(hub, folder, monkeypatch):
    push(folder, NAME)
    with monkeypatch.context() as nobody:
        nobody.delenv("HF_TOKEN")
        assert push(folder, NAME, dry_run=True).commit == hub.head(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    would = push(folder, NAME, dry_run=True)
    assert would.files.keys() == files_of(folder).keys()
    (note,) = would.notes
    assert note.startswith("could not look at the Hub: ")
    assert "HF_HUB_OFFLINE" in note
    assert "HF_HUB_OFFLINE" in refused(folder)


# Failures


def test_a_refusal_is_one_line_with_the_hubs_words(hub, folder):
    for status in (401, 403, 404, 412, 500):
        hub.faults.clear()
        message = f"Not\nwith {TOKEN}"
        hub.fail("POST", "/api/repos/create", status, message=message)
        message, _, hint = refused(folder).partition(" | ")
        assert str(status) in message
        assert "Not with …" in message
        assert "run the same command again" in hint


def test_the_signature_of_an_address_is_not_logged(hub, folder, caplog):
    logger = logging.getLogger("huggingface_hub")  # does not propagate
    logger.addHandler(caplog.handler)
    hub.fail("PUT", "/lfs/", 503, times=1)
    push(folder, NAME)
    logger.removeHandler(caplog.handler)
    assert "503 thrown while requesting PUT" in caplog.text
    assert "Amz" not in caplog.text


@pytest.mark.parametrize(
    "how",
    ["lost", *(pytest.param(how, marks=pytest.mark.slow) for how in ("cut", "<html>"))],
)
def test_a_push_broken_at_any_request_is_resumed(hub, folder, how):
    """Before the Hub did what was asked, or after: nothing is done or sent twice."""
    for number in itertools.count(1):
        hub.models.clear()
        hub.arrived.clear()
        hub.fail("", "", how, first=number)
        try:
            push(folder, NAME, revision="longer")
            break
        except RopepatchError:
            pass
        hub.faults.clear()
        arrived = set(hub.arrived)
        hub.arrived.clear()
        push(folder, NAME, revision="longer")
        assert hub.files(NAME, "longer") == files_of(folder)
        assert not arrived & set(hub.arrived)
        assert len(hub.models[NAME].commits) == 2
    assert number > 9


def test_a_hub_that_cannot_be_reached_is_one_line(folder, monkeypatch):
    with serving(Hub()) as gone:
        pass
    speak_to(gone, monkeypatch)
    assert refused(folder).startswith(f"cannot push to {NAME}: ")


def test_a_branch_that_moved_meanwhile_is_not_overwritten(hub, folder):
    hub.create(NAME)

    def somebody_pushes():
        hub.change(NAME, **{"evaluation/theirs.json": b"{}"})

    hub.fail("POST", "/commit/", somebody_pushes, times=1)
    assert "A commit has happened since" in refused(folder)
    assert hub.files(NAME) == {"evaluation/theirs.json": b"{}"}
    hub.faults.clear()
    push(folder, NAME)
    branches = hub.models[NAME].branches
    hub.fail("POST", "/branch/", lambda: branches.update(longer=hub.head(NAME)))
    push(folder, NAME, revision="longer")  # which somebody else made
    assert hub.files(NAME, "longer") == files_of(folder)


def test_a_file_that_the_hub_swallows_is_noticed(hub, folder):
    hub.create(NAME, {".gitignore": b"merges.txt\n"})
    said = refused(folder)
    assert said.startswith(f"{NAME} lacks uploaded files: merges.txt | ")
    assert ".gitignore" in said


# What is printed


def test_the_command_passes_its_options_and_prints_a_table(hub, folder, run_here):
    push(folder, NAME)
    hub.change(NAME, **{"evaluation/old.json": b"{}"})
    command = partial(run_here, "push", folder)
    lines = [line.split() for line in command(NAME, "--dry-run").stdout.splitlines()]
    assert ["0.000", "MB", "merges.txt"] in lines
    assert ["deleted", "evaluation/old.json"] in lines
    count = f"{len(files_of(folder))} files, 0.2 MB, 1 deleted"
    last = f"{count} in a push to {hub.url}/{NAME}; nothing was sent"
    assert " ".join(lines[-1]) == last
    (folder / "ropepatch.json").unlink()
    assert command("local/force").returncode == 2
    told = json.loads(command("local/force", "--force", "--private", "--json").stdout)
    assert told["notes"] == [f"pushed by force: no ropepatch.json in {folder}"]
    assert hub.models["local/force"].private
    assert told["bytes"] == sum(told["files"].values())
