"""`probe` on test servers: correct ones, each mistake, truncated prompts and invalid responses."""

import functools
import json
from types import SimpleNamespace

import listening
import pytest
from checkpoint_folders import edit_json
from completions_server import Manners, serving
from engines import Engine

import ropepatch
from ropepatch import RopepatchError
from ropepatch.model.checkpoint import READING, Checkpoint
from ropepatch.probing import asking, client
from ropepatch.probing import reading as readings
from ropepatch.probing.judging import CUT_OFF
from ropepatch.probing.reading import RIGHT, UNSCALED

engine_of = functools.cache(Engine)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(client, "PAUSE", 0.0)
    monkeypatch.delenv(client.KEY, raising=False)


@pytest.fixture(scope="module")
def probed(extended):
    def ask(manners=None, checkpoint=extended, engine=None, options=(), **made):
        engine = engine or engine_of(extended, **made)
        with serving(
            engine, Checkpoint(extended).tokenizer, manners or Manners()
        ) as url:
            return ropepatch.probe(url, checkpoint, timeout=60.0, **dict(options))

    return ask


@pytest.mark.parametrize(
    "manners",
    [
        Manners(),
        Manners(before=2),  # still loading
        Manners(style="chat"),
        Manners(uncounted=1),
        Manners(style="mlx", takes_ids=False, most=10),
        Manners(style="texts", most=5),
    ],
    ids=["ids", "loading", "chat", "no bos", "mlx", "few log probs"],
)
def test_probe_recognises_a_correct_server_in_every_response_format(probed, manners):
    found = probed(manners)
    assert found.is_right, str(found)
    assert sum(answer is not None for answer in found.answers) > 24


@pytest.mark.parametrize(
    ("beyond", "limit", "most"), [("told", 400, 400), ("last", 200, 256)]
)
def test_probe_reports_a_truncating_server_with_its_limit(probed, beyond, limit, most):
    judgement = probed(Manners(limit=limit, beyond=beyond)).judgement
    assert (judgement.verdict, judgement.limit) == (CUT_OFF, most)


def test_a_server_that_refuses_prompts_is_judged_to_its_limit(probed, extended):
    found = probed(Manners(limit=400, beyond="refuse"))
    answered = max(one for one in readings.read(extended).positions if one < 400)
    assert str(found.judgement).startswith(
        f"OK up to {answered} tokens; the server refuses the next prompt ("
    )


@pytest.mark.parametrize(
    ("status", "tries"), [(429, client.TRIES), (503, client.TRIES), (500, 6)]
)
def test_only_a_busy_server_is_asked_again_in_one_form(extended, status, tries):
    asked = []

    def refuse(request):
        if request.body():
            asked.append(request.path)
            return status, {}, b"status %d" % status
        return 404, {}, b"none"

    with listening.serving(refuse) as url, pytest.raises(RopepatchError) as error:
        ropepatch.probe(url, extended, timeout=5)
    assert f"status {status}" in str(error.value)
    assert len(asked) == tries


def test_the_model_name_of_the_server_is_the_default_checkpoint(probed, extended):
    assert probed(Manners(model=str(extended)), checkpoint=None).is_right
    with pytest.raises(RopepatchError) as error:
        probed(Manners(model="no/such-folder/here"), checkpoint=None)
    assert "CHECKPOINT" in error.value.hint


def test_the_api_key_is_an_environment_variable_hidden_in_errors(probed, monkeypatch):
    with pytest.raises(RopepatchError) as error:
        probed(Manners(key="s3cret"))
    assert client.KEY in error.value.hint
    monkeypatch.setenv(client.KEY, "s3cret")
    assert probed(Manners(key="s3cret")).is_right
    with pytest.raises(RopepatchError) as error:
        probed(Manners(key="s3cret", before=99, reply=(418, b"you sent s3cret")))
    assert "s3cret" not in str(error.value)


REPLIES = [
    *(b"<html>", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000),
    b'{"choices": [{"logprobs": null}]}',
    b'{"choices": [{"logprobs": {"top_logprobs": [{"a": "x"}]}}]}',
    b'{"choices": [{"logprobs": {"top_logprobs": [{"a": 3.0}]}}]}',
]


@pytest.mark.parametrize(
    "reply", [*((200, body) for body in REPLIES), (500, b"out of memory"), (404, b"no")]
)
def test_an_invalid_response_raises_a_one_line_error(probed, reply):
    with pytest.raises(RopepatchError) as error:
        probed(Manners(before=10**6, reply=reply))
    assert "\n" not in str(error.value)


def test_a_text_of_two_tokens_names_neither():
    tokenizer = SimpleNamespace(batch_decode=lambda ids: ["a", "b", "a"])
    asked = asking._Asking(None, SimpleNamespace(vocabulary=3), tokenizer, None)
    assert asked.texts == {"b": 1}


def test_positions_without_an_answer_do_not_change_the_verdict(extended, probed):
    """As llama.cpp does where it samples the end of the text."""
    positions = readings.read(extended).positions
    rows = [3, 30, len(positions) - 1]
    ends = frozenset(positions[row] for row in rows)
    assert {end % 2 for end in ends} == {0, 1}  # the test server omits it in two ways
    found = probed(Manners(style="chat", ends=ends), mistake=UNSCALED)
    assert found.judgement.verdict == UNSCALED
    assert [row for row, got in enumerate(found.answers) if got is None] == rows


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://x", "http://", "http://[::1", "http://a:b"),
        "http://me:secret@127.0.0.1:9",
    ],
)
def test_errors_of_invalid_or_unreachable_addresses_hide_the_password(extended, url):
    with pytest.raises(
        RopepatchError, match=r"server address|http://127.0.0.1:9: "
    ) as error:
        ropepatch.probe(url, extended)
    assert "secret" not in str(error.value)


def test_a_server_crash_raises_an_error_instead_of_a_verdict(extended, probed):
    engine, manners = Engine(extended), Manners()
    tops = engine.tops

    def until_it_crashes(*arguments):
        if len(manners.asked) > 30:
            manners.before, manners.reply = 10**6, (400, b"the generation thread died")
        return tops(*arguments)

    engine.tops = until_it_crashes
    with pytest.raises(RopepatchError, match="stopped answering"):
        probed(manners, engine=engine)


def test_probe_saves_a_missing_fingerprint_only_on_request(tmp_path, extended, probed):
    bare = ropepatch.extend("tiny", tmp_path / "bare", to="4x", reading=False).folder
    said = []
    assert probed(checkpoint=bare, options={"say": said.append}).is_right
    assert "computing it now" in said[0]
    assert not readings.exists(bare)
    with pytest.raises(RopepatchError, match="`save_reading` needs a checkpoint"):
        probed(checkpoint=None, options={"save_reading": True})
    assert probed(checkpoint=bare, options={"save_reading": True}).is_right
    assert readings.read(bare) == readings.read(extended)
    edit_json(bare / READING, weights="others")
    with pytest.raises(RopepatchError, match="belongs to other weights"):
        probed(checkpoint=bare)


def test_the_probe_command_prints_each_position_and_the_verdict(run_here, extended):
    tokenizer = Checkpoint(extended).tokenizer
    with serving(engine_of(extended, UNSCALED), tokenizer, Manners()) as url:
        done = run_here("probe", url, extended, "--quiet")
        as_json = json.loads(run_here("probe", url, extended, "--json").stdout)
    assert done.returncode == 1, done.stderr
    assert "WRONG: the server ignores" in done.stdout.splitlines()[-1]
    numbers = {line.split()[0] for line in done.stdout.splitlines() if line}
    assert {*map(str, readings.read(extended).positions)} <= numbers
    assert as_json["verdict"] == UNSCALED
    assert RIGHT in as_json["divergences"]
