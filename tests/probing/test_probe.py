"""`probe` on test servers: correct ones, each mistake, truncated prompts and invalid responses."""

import functools
import json
from itertools import pairwise

import listening
import pytest
from checkpoint_folders import edit_json
from completions_server import Manners, serving
from engines import Engine

import ropepatch
from ropepatch import RopepatchError
from ropepatch.model.checkpoint import READING, Checkpoint
from ropepatch.probing import client
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
        Manners(style="mlx", takes_ids=False, most=10),
        Manners(style="texts", most=5),
    ],
    ids=["ids", "loading", "chat", "mlx", "few log probs"],
)
def test_probe_recognises_a_correct_server_in_every_response_format(probed, manners):
    found = probed(manners)
    assert found.is_right, str(found)
    assert sum(answer is not None for answer in found.answers) > 24


@pytest.mark.parametrize(
    ("beyond", "limit"), [("told", 400), ("last", 256), ("last", 200), ("first", 256)]
)
def test_probe_reports_a_truncating_server_with_its_limit(probed, beyond, limit):
    found = probed(Manners(limit=limit, beyond=beyond))
    assert (found.judgement.verdict, found.judgement.limit) == (CUT_OFF, limit)


@pytest.mark.parametrize("states", [False, True])
def test_probe_judges_a_server_that_refuses_long_prompts_up_to_its_limit(
    probed, states
):
    found = probed(Manners(limit=400, beyond="refuse", states=states))
    assert found.is_right
    assert (found.judgement.limit, found.judgement.refuses) == (400, True)
    assert str(found.judgement).startswith(
        "OK up to 400 tokens; the server refuses more ("
    )


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_in_one_form_for_at_most_the_timeout(
    extended, monkeypatch, status
):
    monkeypatch.setattr(client, "PAUSE", 0.2)
    asked = []

    def refuse(request):
        asked.append(request.path)
        return status, {}, b"too many requests"

    with (
        listening.serving(refuse) as url,
        pytest.raises(RopepatchError, match=rf"is busy \(HTTP {status}\)") as error,
    ):
        ropepatch.probe(url, extended, timeout=0.5)
    assert 1 < len(asked) < client.TRIES
    assert "logprobs" not in error.value.hint


def test_probe_requests_growing_prefixes_without_streaming_and_closes_its_client(
    probed, monkeypatch
):
    manners, clients, kind = Manners(), [], client.HTTPX.Client
    monkeypatch.setattr(
        client.HTTPX,
        "Client",
        lambda **options: clients.append(kind(**options)) or clients[-1],
    )
    probed(manners)
    assert [one.is_closed for one in clients] == [True]
    prompts = [question["prompt"] for question in manners.asked]
    assert all(two[: len(one)] == one for one, two in pairwise(prompts))
    assert not any(question["stream"] for question in manners.asked)


def test_the_model_name_of_the_server_is_the_default_checkpoint(probed, extended):
    assert probed(Manners(model=str(extended)), checkpoint=None).is_right
    with pytest.raises(RopepatchError) as error:
        probed(Manners(model="no/such-folder/here"), checkpoint=None)
    assert "CHECKPOINT" in error.value.hint


def test_the_api_key_comes_from_the_environment_and_never_appears_in_errors(
    probed, monkeypatch
):
    with pytest.raises(RopepatchError) as error:
        probed(Manners(key="s3cret"))
    assert client.KEY in error.value.hint
    monkeypatch.setenv(client.KEY, "s3cret")
    assert probed(Manners(key="s3cret")).is_right
    with pytest.raises(RopepatchError) as error:
        probed(Manners(key="s3cret", before=99, reply=(418, b"you sent s3cret")))
    assert "s3cret" not in str(error.value)


REPLIES = [
    *(b"<html>", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b" " * 300_000),
    b'{"choices": [{"logprobs": null}]}',
    *(
        b'{"choices": [{"logprobs": {"top_logprobs": [%s]}}]}' % value
        for value in (b'{"a": "x"}', b'{"a": 3.0}')
    ),
]


@pytest.mark.parametrize(
    "reply", [*((200, body) for body in REPLIES), (500, b"out of memory"), (404, b"no")]
)
def test_an_invalid_response_raises_a_one_line_error(probed, reply):
    with pytest.raises(RopepatchError) as error:
        probed(Manners(before=10**6, reply=reply))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", [RIGHT, UNSCALED])
def test_positions_without_an_answer_do_not_change_the_verdict(extended, probed, model):
    """As llama.cpp does where it samples the end of the text."""
    positions = readings.read(extended).positions
    ends = frozenset({positions[3], positions[30], positions[-1]})
    assert {end % 2 for end in ends} == {
        0,
        1,
    }  # the test server omits the answer in two ways
    found = probed(Manners(style="chat", ends=ends), mistake=model)
    assert found.judgement.verdict == model
    assert [row for row, got in enumerate(found.answers) if got is None] == [
        3,
        30,
        len(positions) - 1,
    ]


@pytest.mark.parametrize(
    "timeout",
    [0, -(10**400), 1j, "60", float("nan"), True],
    ids=lambda one: str(one)[:5],
)
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout):
    with pytest.raises(RopepatchError, match="`timeout` must be a number above 0, got"):
        ropepatch.probe("http://localhost:8000", timeout=timeout)


def test_save_reading_without_a_checkpoint_raises_an_error(probed):
    with pytest.raises(RopepatchError, match="`save_reading` needs a checkpoint"):
        probed(checkpoint=None, options={"save_reading": True})


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://x", "http://", "", "http://me:secret@127.0.0.1:9"),
        *("http://[::1", f"http://{'a' * 300}", "http://a:b"),
    ],
)
def test_errors_of_invalid_or_unreachable_addresses_hide_the_password(extended, url):
    with pytest.raises(RopepatchError) as error:
        ropepatch.probe(url, extended)
    assert ("no answer from http://127.0.0.1:9" in str(error.value)) == url.endswith(
        ":9"
    )
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "form", "count"),
    [
        (None, client.FORMS[0], 1),
        (500, None, 1),
        (500, client.FORMS[0], client.TRIES),
        (503, None, client.TRIES),
    ],
    ids=[
        "too slow",
        "500 for a request form not tried before",
        "500 for a form that worked before",
        "busy",
    ],
)
def test_permanent_errors_are_not_retried(status, form, count):
    requests = []

    def answer(request):
        requests.append(request)
        if status is None:
            raise client.HTTPX.ReadTimeout("", request=request)
        return client.HTTPX.Response(status)

    server = client.Server("http://localhost:8000", timeout=5)
    server.form, server.client = (
        form,
        client.HTTPX.Client(transport=client.HTTPX.MockTransport(answer)),
    )
    with (
        server,
        pytest.raises(
            RopepatchError, match="within 5 seconds" if status is None else f"{status}"
        ),
    ):
        server._ask("POST", "completions", {})
    assert len(requests) == count


def test_a_server_crash_during_the_probe_raises_an_error_instead_of_a_verdict(
    extended, probed
):
    engine, manners = Engine(extended), Manners()
    tops = engine.tops

    def until_it_crashes(*arguments):
        if len(manners.asked) > 30:
            manners.before, manners.reply = 10**6, (400, b"the generation thread died")
        return tops(*arguments)

    engine.tops = until_it_crashes
    with pytest.raises(RopepatchError, match="stopped answering"):
        probed(manners, engine=engine)


def test_probe_computes_a_missing_fingerprint_and_saves_it_only_on_request(
    tmp_path, extended, probed
):
    bare = ropepatch.extend("tiny", tmp_path / "bare", to="4x", reading=False).folder
    said = []
    assert probed(checkpoint=bare, options={"say": said.append}).is_right
    assert "computing it now" in said[0]
    assert not readings.exists(bare)
    assert probed(checkpoint=bare, options={"save_reading": True}).is_right
    assert readings.read(bare) == readings.read(extended)
    edit_json(bare / READING, weights="others")
    with pytest.raises(RopepatchError, match="belongs to other weights"):
        probed(checkpoint=bare)


def test_the_probe_command_prints_each_position_and_the_verdict(run_here, extended):
    with serving(engine_of(extended), Checkpoint(extended).tokenizer, Manners()) as url:
        done = run_here("probe", url, extended, "--quiet")
    assert done.returncode == 0, done.stderr
    assert "OK: the server applies the RoPE scaling" in done.stdout.splitlines()[-1]
    numbers = [line.split()[0] for line in done.stdout.splitlines() if line]
    assert set(map(str, readings.read(extended).positions)) <= set(numbers)
    with serving(
        engine_of(extended, UNSCALED), Checkpoint(extended).tokenizer, Manners()
    ) as url:
        done = run_here("probe", url, extended, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["verdict"] == UNSCALED
    assert RIGHT in json.loads(done.stdout)["divergences"]
    assert run_here("probe", "http://127.0.0.1:9", extended).returncode == 2
