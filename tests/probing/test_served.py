"""`evaluate` on a test server: a correct server gives the same results as its checkpoint."""

import functools
import json

import pytest
from completions_server import Manners, serving
from engines import Engine

import ropepatch
from ropepatch import RopepatchError
from ropepatch.evaluation.suites import Suite
from ropepatch.evaluation.tasks import LmEvalTask, PerplexityTask, RetrievalTask
from ropepatch.model.checkpoint import Checkpoint
from ropepatch.model.source import TINY
from ropepatch.probing import client

RETRIEVAL = RetrievalTask(lengths=(64, 128), haystacks=3)
LOSS = PerplexityTask(windows=2, lengths=(64, 128), positions=24)
SUITE = Suite(to=("0.5x",), tasks=(RETRIEVAL, LOSS))
LLAMA, VLLM = Manners(style="chat"), Manners(echoes=True)
engine_of = functools.cache(Engine)


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(client, "PAUSE", 0.0)
    monkeypatch.delenv(client.KEY, raising=False)


def measured(manners, suite=SUITE, *, rounded_from=None, address="http://{}", **options):
    """The results of a server of `tiny`, by task."""
    engine = engine_of(TINY, rounded_from=rounded_from)
    with serving(engine, Checkpoint(TINY).tokenizer, manners) as url:
        found = ropepatch.evaluate(
            address.format(url.removeprefix("http://")), suite, "tiny", say=options.pop("say", len), **options
        )
    return {result.task: result for result in found if result.label != "floor"}


@functools.cache
def of_checkpoint(*tasks):
    found = ropepatch.evaluate("tiny", Suite(to=("0.5x",), tasks=tasks), dtype="float32", say=len)
    return {result.task: result for result in found if result.label != "floor"}


def numbers(result, *measures):
    return {(row.measure, str(row.at)): (row.n, row.value) for row in result.rows if row.measure in measures}


@pytest.mark.parametrize(
    "manners",
    [
        LLAMA,
        Manners(style="chat", silent=frozenset(range(20, 60))),
        VLLM,
        Manners(echoes=True, limit=128, states=True),
        Manners(echoes=True, biased=True, style="texts"),
    ],
    ids=["llama.cpp", "llama.cpp without partial characters", "vLLM", "vLLM at its limit", "SGLang"],
)
def test_a_correct_server_scores_like_its_checkpoint(manners):
    served, own = measured(manners), of_checkpoint(*SUITE.tasks)
    for task, measures in (("perplexity", ["loss"]), ("retrieval", ["found", "log_prob"])):
        expected = numbers(own[task], *measures)
        found = numbers(served[task], *measures)
        assert {place: n for place, (n, _) in found.items()} == {p: n for p, (n, _) in expected.items()}
        assert found == {place: (n, pytest.approx(value, abs=1e-4)) for place, (n, value) in expected.items()}
        assert served[task].model == own[task].model
        assert served[task].parameters == own[task].parameters
    accuracy = numbers(served["retrieval"], "found")
    assert accuracy == numbers(own["retrieval"], "found")


@pytest.mark.parametrize("manners", [LLAMA, VLLM], ids=["one token at a time", "whole prompts"])
def test_loss_by_position_shows_where_a_rounded_kv_cache_deviates(manners):
    task = PerplexityTask(windows=2, lengths=(128,))
    suite = Suite(to=("0.5x",), tasks=(task,))
    own = of_checkpoint(task)["perplexity"].of("loss", "begin", "end")
    served = measured(manners, suite, rounded_from=64, positions=128)["perplexity"].of("loss", "begin", "end")
    differs = {row.at["begin"]: abs(row.value - other.value) for row, other in zip(own, served, strict=True)}
    assert max(off for begin, off in differs.items() if begin < 64) < 1e-3
    assert min(off for begin, off in differs.items() if begin >= 64) > 0.01


@pytest.mark.parametrize(
    "manners",
    [
        Manners(style="none"),
        Manners(style="none", takes_ids=False),
        Manners(style="chat", biased=True),
        Manners(style="mlx", most=10, biased=True),
    ],
    ids=[
        "no log-probabilities",
        "neither log-probabilities nor token ids",
        "log-probabilities that include the bias",
        "mlx-lm",
    ],
)
def test_a_server_without_usable_log_probs_is_measured_by_retrieval_accuracy_only(manners):
    said = []
    served, own = measured(manners, say=said.append), of_checkpoint(*SUITE.tasks)
    assert [*served] == ["retrieval"]
    assert numbers(served["retrieval"], "found", "log_prob") == numbers(own["retrieval"], "found")
    assert any("without perplexity" in line for line in said)
    with pytest.raises(RopepatchError, match="cannot be measured"):
        measured(manners, Suite(to=("0.5x",), tasks=(LOSS, LmEvalTask(tasks=("x",)))))


def test_lengths_beyond_the_servers_limit_are_left_out_with_a_message():
    said = []
    served = measured(Manners(style="chat", limit=100, states=True), say=said.append)
    own = of_checkpoint(*SUITE.tasks)
    assert sum("without 128 tokens" in line for line in said) == 2
    for task in ("perplexity", "retrieval"):
        shorter = numbers(own[task], "found", "loss").items()
        assert numbers(served[task], "found", "loss").keys() == {
            (measure, at) for (measure, at), _ in shorter if "128" not in at and "91" not in at
        } | {(measure, at) for (measure, at), _ in shorter if "'end': 91" in at}
    with pytest.raises(RopepatchError, match="at 64 tokens and more: m accepts at most 40 tokens"):
        measured(Manners(style="chat", limit=40, states=True))
    for beyond, words in (("told", "reports 100 prompt tokens"), ("refuse", "maximum context length")):
        with pytest.raises(RopepatchError, match=words):
            measured(Manners(style="chat", limit=100, beyond=beyond))


def test_results_of_a_server_are_reused_and_contain_no_key_or_password(tmp_path, monkeypatch):
    monkeypatch.setenv(client.KEY, "s3cret")
    manners = Manners(echoes=True, key="s3cret", model="models/q4.gguf")
    said, options = [], {"out": tmp_path, "suite": None, "lengths": [64], "windows": 2, "limit": 1}
    first = measured(manners, say=said.append, **options)
    requests = len(manners.asked)
    again = measured(manners, say=said.append, **options)
    assert len(manners.asked) < 1.5 * requests
    assert again == first
    assert first["perplexity"].label == "q4.gguf"
    monkeypatch.delenv(client.KEY)
    page = {"report": tmp_path / "page.html", "command": "ropepatch eval http://me:s3cret@there tiny"}
    measured(Manners(style="none"), say=said.append, address="http://me:s3cret@{}", **options | page)
    written = "".join(file.read_text() for file in tmp_path.iterdir()) + "".join(said)
    assert "ropepatch eval http://there tiny" in written
    assert "s3cret" not in written
    assert json.loads((tmp_path / "tiny-64-perplexity-q4.gguf.json").read_text())["env"]["server"]


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("tiny", {"served_as": "m"}, "needs the address of a server"),
        ("http://127.0.0.1:9", {"methods": "yarn", "to": "2x"}, "cannot be used with a server"),
        ("http://127.0.0.1:9", {}, "no answer from"),
    ],
)
def test_misplaced_server_options_and_an_unreachable_server_raise_errors(model, options, words):
    with pytest.raises(RopepatchError, match=words):
        ropepatch.evaluate(model, **options)
