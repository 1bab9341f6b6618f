"""What the tasks of a suite read: the right tokens, and a mistake found before anything is measured."""

import json

import pytest
import torch

import ropepatch
from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import cut_windows, token_ids
from ropepatch.data.tiny.tales import held_out_tales
from ropepatch.errors import RopepatchError
from ropepatch.evaluation.measuring import Suite, measure
from ropepatch.evaluation.tasks import (
    BEGINNINGS,
    Goal,
    LmEvalTask,
    PerplexityTask,
    RetrievalTask,
)


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory, tiny):
    """Documents without a beginning-of-sequence token, of 600 tokens each."""
    tokenizer = tiny[1]
    tales = held_out_tales(tokenizer, length=601, count=3)
    lines = [json.dumps({"body": tokenizer.decode(tale.ids[1:])}) for tale in tales]
    file = tmp_path_factory.mktemp("text") / "tales.jsonl"
    file.write_text("\n".join(lines))
    return file


def documents_of(jsonl, tokenizer):
    """The first two, behind a beginning-of-sequence token."""
    texts = [json.loads(line)["body"] for line in jsonl.read_text().splitlines()]
    return token_ids(tokenizer, texts[:2])


def task(jsonl, **options):
    return PerplexityTask(
        text=str(jsonl), field="body", windows=None, documents=2, **options
    )


def rows_of(given, tiny, to=256):
    ready = given.prepare(Goal("model", tiny[1], 256, to))
    return ready.measure(tiny[0])


def suite(given, **options):
    return Suite(models=("tiny",), to=("1x",), tasks=(given,), **options)


def test_windows_slide_over_pieces_of_twice_the_greatest_window(jsonl, tiny):
    rows = rows_of(task(jsonl, stride=64, lengths=(128, 256)), tiny)
    pieces = [document[:512] for document in documents_of(jsonl, tiny[1])]
    for row, window in zip(rows, (128, 256), strict=True):
        curve = ropepatch.perplexity(tiny[0], None, pieces, window=window, stride=64)
        assert (row.length, row.n, len(row.clusters)) == (window, 2 * 511, 2)
        assert row.value == pytest.approx(torch.cat(curve.nll).mean().item())


@pytest.mark.parametrize(
    ("family", "given", "bos"),
    [
        ("llama", None, "document"),
        ("gemma3_text", None, "window"),
        ("gemma2", "none", "none"),
    ],
)
def test_bos_stands_where_the_family_needs_it(jsonl, tiny, family, given, bos):
    reads = PerplexityTask(
        text=str(jsonl), field="body", windows=5, lengths=(100,), bos=given
    )
    ready = reads.prepare(Goal("model", tiny[1], 256, 256, family))
    assert ready.parameters["bos"] == bos
    assert BEGINNINGS[bos] in PerplexityTask.method(ready.parameters)
    texts = list(stream_documents(jsonl, field="body"))
    cut = cut_windows(tiny[1], texts, length=100, count=5, bos=bos)
    (row,) = [row for row in ready.measure(tiny[0]) if row.at == {"length": 100}]
    expected = ropepatch.perplexity(tiny[0], None, [ids for _, ids in cut]).at(100)
    assert row.value == pytest.approx(expected.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            PerplexityTask(documents=2, bos="none"),
            "need bos, its beginning-of-sequence token",
        ),
        (
            PerplexityTask(stride=128, lengths=(128,)),
            "stride must be from 1 to 127 for windows of 128 tokens",
        ),
        (PerplexityTask(lengths=(1,)), "lengths must be at least 2 tokens, got 1"),
        (
            PerplexityTask(lengths=(257,)),
            "lengths go to 257, beyond the target length of 256",
        ),
        (RetrievalTask(lengths=(24, 256)), "a haystack of 24 tokens has no room"),
        (PerplexityTask(), "has no revisions"),
    ],
)
def test_what_fits_no_model_is_refused_before_anything_is_measured(given, message):
    with pytest.raises(RopepatchError, match=message):
        measure(suite(given), revision="main" if "revisions" in message else None)


def test_windows_of_one_document_are_one_cluster(tiny, tmp_path):
    """24 windows, spread over three novels of unequal length, have the three novels for clusters."""
    for number, sentences in enumerate((100, 250, 400)):
        (tmp_path / f"{number}.txt").write_text(
            f"Chapter {number}. The mill wheel turns and turns. " * sentences
        )
    given = PerplexityTask(text=str(tmp_path), windows=24, lengths=(16, 64))
    rows = rows_of(given, tiny, to=64)
    assert {len(row.clusters) for row in rows} == {3}
    (whole,) = (row for row in rows if row.at == {"length": 64})
    cut = cut_windows(tiny[1], stream_documents(tmp_path), length=64, count=24)
    counts = [63 * sum(source == number for source, _ in cut) for number in range(3)]
    assert [weight for _, weight in whole.clusters] == counts
    assert sum(counts) == whole.n == 24 * 63


def test_a_changed_text_is_not_taken_for_the_one_measured(tiny, tmp_path):
    text = tmp_path / "text.txt"
    metadata = {"text": str(text)}
    given = LmEvalTask(tasks=("ropepatch_long_perplexity",), metadata=metadata)
    digests = set()
    for word in ("rope", "knot"):
        text.write_text(f"a {word} is what holds until it is cut. " * 40)
        ready = given.prepare(Goal("model", tiny[1], 256, 256))
        digests.add(ready.parameters["digest"])
    assert len(digests) == 2
