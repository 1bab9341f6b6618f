"""What the tasks of a suite read: the right tokens, and a mistake found before anything is measured."""

import json
import math

import pytest
import torch

import ropepatch
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import measure
from ropepatch.evaluation.protocols import Disjoint
from ropepatch.evaluation.suites import Suite
from ropepatch.evaluation.tasks import LmEvalTask, PerplexityTask, RetrievalTask
from ropepatch.evaluation.tasks.perplexity import PerplexityMeasurement


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory, tiny):
    """Documents without a beginning-of-sequence token, of 600 tokens each."""
    tokenizer = tiny[1]
    tales = held_out_tales(tokenizer, length=601, count=3)
    lines = [json.dumps({"body": tokenizer.decode(tale.ids[1:])}) for tale in tales]
    file = tmp_path_factory.mktemp("text") / "tales.jsonl"
    file.write_text("\n".join(lines))
    return file


def task(jsonl, **options) -> PerplexityTask:
    return PerplexityTask(text=str(jsonl), field="body", windows=None, documents=2, **options)


def prepared(given, tokenizer, *, to=256) -> PerplexityMeasurement:
    return given.prepare("model", tokenizer, trained=256, to=to)


def suite(given, **options) -> Suite:
    return Suite(models=("tiny",), to=("1x",), tasks=(given,), **options)


@pytest.mark.parametrize("protocol", ["sliding", "disjoint"])
def test_windows_move_over_pieces_of_twice_the_greatest_window(jsonl, tiny, protocol):
    options = {"stride": 64} if protocol == "sliding" else {}
    ready = prepared(task(jsonl, protocol=protocol, lengths=(128, 256), **options), tiny[1])
    assert {len(piece) for piece in ready.pieces} == {512}
    assert ready.parameters["read"] == 512


def test_how_much_is_read_can_be_said(jsonl, tiny):
    ready = prepared(task(jsonl, protocol="disjoint", lengths=(128,), read="1x"), tiny[1])
    assert {len(piece) for piece in ready.pieces} == {256}
    with pytest.raises(RopepatchError, match="read is 100 tokens, less than a window of 128"):
        prepared(task(jsonl, protocol="disjoint", lengths=(128,), read=100), tiny[1])


@pytest.mark.parametrize("bos", ["document", "window", "none"])
def test_a_window_has_its_length_wherever_the_first_token_stands(jsonl, tiny, bos):
    model, tokenizer = tiny
    ready = prepared(task(jsonl, protocol="truncated", lengths=(128,), bos=bos), tokenizer)
    (row,) = ready.run(model, tokenizer, None, lambda done, total: None)
    assert (row.n, len(row.clusters)) == (2 * 127, 2)
    begins = {piece[0].item() == tokenizer.bos_token_id for piece in ready.pieces}
    assert begins == {bos == "document"}


def test_disjoint_windows_that_begin_anew_leave_no_token_over(jsonl, tiny):
    model, tokenizer = tiny
    ready = prepared(task(jsonl, protocol="disjoint", lengths=(128,), read=128, bos="window"), tokenizer)
    (row,) = ready.run(model, tokenizer, None, lambda done, total: None)
    assert row.n == 2 * 127
    curve = ropepatch.perplexity(model, tokenizer, ready.pieces, protocol=Disjoint(128), bos="window")
    assert row.value == pytest.approx(torch.cat(curve.nll).mean().item())


def test_the_tales_of_tiny_have_their_first_token():
    given = PerplexityTask(documents=2, windows=None, bos="none")
    with pytest.raises(RopepatchError, match="begin with its beginning-of-sequence token"):
        measure(suite(given))


def test_a_length_without_room_for_a_prompt_is_refused_before_anything_is_measured():
    with pytest.raises(RopepatchError, match="a haystack of 24 tokens has no room"):
        measure(suite(RetrievalTask(lengths=(24, 256))))


def test_windows_of_one_document_are_one_cluster(tiny, tmp_path):
    """24 windows, spread over three novels of unequal length, have the three novels for clusters."""
    model, tokenizer = tiny
    for number, sentences in enumerate((100, 250, 400)):
        (tmp_path / f"{number}.txt").write_text(
            f"Chapter {number}. The mill wheel turns and turns. " * sentences
        )
    given = PerplexityTask(text=str(tmp_path), windows=24, lengths=(16, 64))
    ready = prepared(given, tokenizer, to=64)
    assert len(ready.pieces) == 24
    assert set(ready.sources) == {0, 1, 2}
    rows = ready.run(model, tokenizer, None, lambda done, total: None)
    assert {len(row.clusters) for row in rows} == {3}
    (whole,) = (row for row in rows if row.at == {"length": 64})
    counts = [ready.sources.count(number) * 63 for number in range(3)]
    assert [weight for _, weight in whole.clusters] == counts
    assert sum(counts) == whole.n == 24 * 63
    curve = ropepatch.perplexity(model, None, ready.pieces[: ready.sources.count(0)])
    assert whole.clusters[0][0] == pytest.approx(curve.at(64).mean * counts[0])


def test_a_changed_text_is_not_taken_for_the_one_measured(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a rope has no end until it is cut. " * 40)
    given = LmEvalTask(tasks=("ropepatch_long_perplexity",), metadata={"text": str(text)})
    out = tmp_path / "out"
    list(measure(suite(given), out=out))
    text.write_text("a knot is what holds until it is cut. " * 40)
    with pytest.raises(RopepatchError, match=r"other settings: it differs in .*parameters"):
        measure(suite(given), out=out)


def test_a_target_that_is_named_twice_is_measured_once():
    given = suite(PerplexityTask(windows=2))
    results = list(measure(given.model_copy(update={"to": ("1x", 256)})))
    assert [result.label for result in results] == ["floor", "baseline"]


def test_stretches_of_a_tiny_context_hold_a_token_each(tiny):
    ready = PerplexityTask(windows=2, lengths=(16,)).prepare("tiny", tiny[1], trained=4, to=16)
    assert ready.edges == sorted(set(ready.edges))
    assert 1 not in ready.edges
    assert not math.isnan(ready.floor[-1].value)
