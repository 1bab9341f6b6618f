"""Documents read together: the same losses as alone, little padding, bounded memory, any order."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_models import build, decoder_passes, expected, tokens
from torch import Tensor
from transformers import PreTrainedModel

from ropepatch.evaluation import perplexity as module
from ropepatch.evaluation.batches import Passage, TokenizedDocument, batched, key_of, padded
from ropepatch.evaluation.loss_reader import LossReader
from ropepatch.evaluation.perplexity import perplexity
from ropepatch.evaluation.protocols import Disjoint, OnePass, Sliding, Window

NEARLY = (60, 58, 60, 57, 33, 32, 60, 7, 7, 59)  # some of them so alike that they are read together


def shapes_read(model: PreTrainedModel, documents: object, **options: object) -> list[tuple[int, int]]:
    """(rows, length) of every forward pass of the decoder."""
    with decoder_passes(model) as shapes:
        perplexity(model, None, documents, **options)
    return shapes


def passages(lengths: list[int], seed: int = 0) -> list[Passage]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Passage(
            TokenizedDocument(index, torch.randint(48, (length,), generator=generator)),
            Window(0, length, 1),
            0,
        )
        for index, length in enumerate(lengths)
    ]


# The same losses


def test_documents_are_read_together(llama):
    assert shapes_read(llama, tokens(*NEARLY), tokens_per_batch=250) == [(2, 7), (2, 33), (4, 60), (2, 60)]
    assert shapes_read(llama, tokens(*[100] * 11)) == [(10, 100), (1, 100)]  # 1024 tokens on a CPU


@pytest.mark.parametrize("protocol", [OnePass(), Sliding(20, 6), Disjoint(20)], ids=lambda p: p.label)
def test_the_order_of_documents_read_together_changes_nothing(llama, protocol):
    documents = tokens(*NEARLY)
    curve = perplexity(llama, None, documents, protocol=protocol, tokens_per_batch=200)
    rows: dict[int, list[Tensor]] = {}
    for index, nll in zip(curve.documents, curve.nll, strict=True):
        rows.setdefault(index, []).append(nll)
    for seed in range(3):
        order = random.Random(seed).sample(range(len(NEARLY)), len(NEARLY))
        shuffled = perplexity(
            llama, None, [documents[i] for i in order], protocol=protocol, tokens_per_batch=200
        )
        wanted = [row for i in order for row in rows[i]]
        assert all(map(torch.equal, shuffled.nll, wanted))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [9.0] * 4},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_a_rope_that_follows_the_length_is_not_padded(rope):
    parameters = rope | {"rope_theta": 100.0, "original_max_position_embeddings": 31}
    model = build(max_position_embeddings=31, rope_parameters=parameters)
    documents = tokens(31, 32, 30, 32, 40)  # the longrope of 31 tokens in a batch of 32 would be the long one
    assert shapes_read(model, documents) == [(1, 30), (1, 31), (2, 32), (1, 40)]
    curve = perplexity(model, None, documents)
    for ids, nll in zip(documents, curve.nll, strict=True):
        perplexity(model, None, tokens(8))  # makes `dynamic` forget the longer document before
        torch.testing.assert_close(nll, expected(model, ids), rtol=1e-5, atol=2e-5)


# What is read together


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 300), min_size=1, max_size=40),
    st.integers(1, 1000),
    st.integers(1, 9),
    st.sampled_from([0.0, 1 / 16, 1 / 4]),
)
def test_batches_hold_every_passage_once_and_keep_all_bounds(lengths, tokens_per_batch, rows, padding):
    given_passages = passages(lengths)
    batches = batched(given_passages, tokens=tokens_per_batch, rows=rows, padding=padding)
    assert sorted(map(id, (p for batch in batches for p in batch))) == sorted(map(id, given_passages))
    for batch in batches:
        longest = max(map(len, batch))
        assert len(batch) <= rows
        assert len(batch) == 1 or len(batch) * longest <= tokens_per_batch
        assert len(batch) * longest - sum(map(len, batch)) <= padding * len(batch) * longest
        assert padded(batch).shape == (len(batch), longest)
    assert [max(map(len, batch)) for batch in batches] == sorted(max(map(len, batch)) for batch in batches)


def test_passages_scored_from_different_tokens_are_not_read_together():
    document = TokenizedDocument(0, torch.arange(20))
    windows = [Window(0, 8, 1), Window(4, 12, 8), Window(8, 16, 12), Window(12, 20, 13)]
    batches = batched([Passage(document, w, 0) for w in windows], tokens=100, rows=9, padding=0.1)
    assert sorted([sorted(p.window.begin for p in batch) for batch in batches]) == [[0, 12], [4, 8]]


def test_the_shortest_passages_are_read_first_wherever_they_are_scored():
    document = TokenizedDocument(0, torch.arange(20))
    windows = [Window(0, 8, 1), Window(4, 12, 8), Window(8, 12, 9), Window(12, 18, 16), Window(0, 20, 1)]
    batches = batched([Passage(document, w, 0) for w in windows], tokens=1, rows=9, padding=0.1)
    assert [len(batch[0]) for batch in batches] == [4, 6, 8, 8, 20]


def test_the_losses_of_a_passage_do_not_hold_those_of_its_batch(llama):
    batch = passages([19, 20, 20])
    for nll in LossReader(llama, 100).read(batch):
        assert nll.untyped_storage().nbytes() == 4 * len(nll)


def test_a_short_row_repeats_its_last_token():
    short, long = passages([2, 4])
    rows = padded([short, long])
    assert rows[0].tolist() == [*short.ids.tolist(), *[short.ids[-1].item()] * 2]
    assert torch.equal(rows[1], long.ids)


@pytest.mark.parametrize(
    "change",
    [
        {"ids": torch.tensor([1, 2, 3, 4, 5, 7])},
        {"window": Window(0, 5, 1)},
        {"window": Window(1, 6, 2)},
        {"window": Window(0, 6, 2)},
        {"before": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_key_of_a_batch_says_what_is_read_and_scored(change):
    fields = {"ids": torch.arange(1, 7), "window": Window(0, 6, 1), "before": 0}

    def key(index: int, ids: Tensor, window: Window, before: int) -> str:
        return key_of([Passage(TokenizedDocument(index, ids), window, before)])

    assert key(0, **fields) == key(7, **fields)
    assert key(0, **fields) != key(0, **(fields | change))


def test_the_key_of_a_batch_is_the_same_in_every_process():
    key = key_of([Passage(TokenizedDocument(0, torch.arange(1, 7)), Window(0, 6, 1), 0)])
    assert key == "a0321dd4a3f304cc8fd1eac43c4f59ae3f561d1c68eeebcc38f8dbb30f7e21da"


# Streams


def test_an_iterator_is_read_in_blocks_as_it_comes(llama, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    taken, seen = [], []

    def stream():
        for ids in tokens(*NEARLY):
            taken.append(ids)
            yield ids

    curve = perplexity(llama, None, stream(), progress=lambda done, total: seen.append(len(taken)))
    assert sorted(set(seen)) == [4, 8, 10]
    whole = perplexity(llama, None, tokens(*NEARLY))
    assert curve.documents == whole.documents == tuple(range(10))
    torch.testing.assert_close(curve.nll, whole.nll, rtol=0, atol=2e-5)


def test_a_document_of_a_stream_that_cannot_be_read_is_named_by_its_index_in_the_stream(llama, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 2)
    with pytest.raises(module.RopepatchError, match=r"documents\[4\]"):
        perplexity(llama, None, iter([*tokens(5, 5, 5, 5), [1]]))
