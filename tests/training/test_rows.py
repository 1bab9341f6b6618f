"""Rows contain every token once per epoch; a batch depends only on its number."""

import random
from collections import Counter
from itertools import accumulate, pairwise

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from ropepatch.data.positions import PoSE, TrueLength
from ropepatch.data.texts import Texts
from ropepatch.data.tokens import TokenStore
from ropepatch.errors import RopepatchError
from ropepatch.training.recipe import Data
from ropepatch.training.rows import (
    Batches,
    GeneratedRows,
    Schedule,
    TokenRows,
    held_out,
)

LENGTHS = [*range(70, 220, 3), *range(1, 400, 7)]

lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def store_of(lengths, name="books", first=0):
    """A store in which every token is its own: ``first`` and those after it."""
    documents = torch.arange(first, first + sum(lengths)).split(lengths)
    return TokenStore.of(
        name, Dataset.from_dict({"input_ids": [ids.tolist() for ids in documents]})
    )


def data_of(*weights, windows=(8,), tokens_per_batch=24, boundaries=True):
    return Data(
        sources=tuple(
            Texts(text=f"source {number}", weight=weight)
            for number, weight in enumerate(weights)
        ),
        windows=windows,
        tokens_per_batch=tokens_per_batch,
        boundaries=boundaries,
    )


def batches_of(
    data, streams, positions=None, *, trained=8, target=64, steps=6, per_step=2, seed=0
):
    schedule = Schedule.of(
        data, trained=trained, steps=steps, per_step=per_step, seed=seed
    )
    layout = {"boundaries": data.boundaries, "target": target, "seed": seed}
    return Batches(schedule, streams, positions or TrueLength(), **layout)


# rows of a text


@given(
    lengths_of_documents,
    st.integers(0, 20),
    st.integers(1, 30),
    st.integers(0, 3),
    st.integers(0, 2**64 - 1),
)
def test_an_epoch_has_every_token_of_its_windows_once(
    lengths, begin, window, epoch, seed
):
    store = store_of(lengths)
    count = (sum(lengths) - begin) // window
    rows = TokenRows(store, begin, seed)
    if count < 1:
        with pytest.raises(RopepatchError, match="too few for a training sequence"):
            rows.row(0, window)
        return
    read = [
        rows.row(epoch * count + index, window).ids.tolist() for index in range(count)
    ]
    windows = [
        list(range(begin + window * k, begin + window * (k + 1))) for k in range(count)
    ]
    assert sorted(read) == windows


def test_epochs_seeds_and_windows_have_their_own_order():
    store = store_of([5050])  # 50 rows of 100 or of 101

    def order(seed, epoch, window=100):
        rows = TokenRows(store, 0, seed)
        return [
            int(rows.row(epoch * 50 + index, window).ids[0]) // window
            for index in range(50)
        ]

    orders = [order(0, 0), order(0, 1), order(1, 0), order(0, 0, 101)]
    for number, one in enumerate(orders):
        assert one not in orders[:number]
        assert sum(after == before + 1 for before, after in pairwise(one)) < 10


# held-out text


def test_held_out_first_tokens_are_not_trained_on():
    store = store_of([7, 30, 63])
    pieces, begin = held_out(store, 12, 2)
    assert torch.equal(torch.stack(pieces), torch.arange(24).view(2, 12))
    assert begin == 24
    rows = TokenRows(store, begin, 0)
    read = {token for index in range(19) for token in rows.row(index, 4).ids.tolist()}
    assert read == set(range(24, 100))
    with pytest.raises(
        RopepatchError, match="books has 23 tokens, too few to hold out 2 x 12"
    ):
        held_out(store_of([23]), 12, 2)


def test_each_sequence_begins_with_bos_where_a_family_needs_it():
    store, bos = store_of([7, 1, 16], first=100), 5
    pieces, _ = held_out(store, 8, 2, bos)
    assert [piece.tolist() for piece in pieces] == [
        [bos, *range(100, 107)],
        [bos, *range(108, 115)],
    ]
    rows = TokenRows(store, 0, 0, bos)
    found = [rows.row(index, 8) for index in range(3)]
    assert sorted(row.ids.tolist() for row in found) == [
        [bos, *range(n, n + 7)] for n in (100, 108, 116)
    ]
    assert {row.lengths for row in found} == {
        (8,)
    }  # the document of one token is dropped
    assert all(row.labels.tolist() == [-100, *row.ids[1:].tolist()] for row in found)


# which rows


@settings(deadline=None)
@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=4),
    st.lists(st.sampled_from([2, 3, 5, 8]), min_size=1, max_size=3),
    st.integers(8, 40),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_a_schedule_follows_windows_and_counts_each_source(
    weights, windows, room, steps, per_step
):
    data = data_of(*weights, windows=tuple(windows), tokens_per_batch=room)
    schedule = Schedule.of(data, trained=8, steps=steps, per_step=per_step, seed=3)
    row, seen = 0, Counter()
    taken = [0] * len(weights)
    for item in range(steps * per_step):
        assert int(schedule.begins[item]) == row
        window = windows[item // per_step % len(windows)]
        for _ in range(room // window):
            source = int(schedule.sources[row])
            assert int(schedule.windows[row]) == window
            assert int(schedule.indices[row]) == seen[source, window]
            seen[source, window] += 1
            taken[source] += window
            row += 1
    assert int(schedule.begins[-1]) == len(schedule.windows) == row
    assert [schedule.tokens(source) for source in range(len(weights))] == taken


def test_sources_are_drawn_by_their_weights():
    data = data_of(1.0, 3.0, 0.001, 6.0, windows=(2,), tokens_per_batch=200)
    schedule = Schedule.of(data, trained=8, steps=500, per_step=1, seed=0)
    counts = torch.bincount(schedule.sources, minlength=4) / 50_000
    assert counts.tolist() == pytest.approx([0.1, 0.3, 0.0001, 0.6], abs=0.01)
    other = Schedule.of(data, trained=8, steps=500, per_step=1, seed=1)
    for one in (schedule.sources[1:], other.sources[:-1]):  # drawn row by row
        assert (schedule.sources[:-1] == one).double().mean() < 0.6


@pytest.mark.parametrize(("window", "room"), [(9, 8), (1, 8), ("2x", 15)])
def test_a_window_without_room_or_label_is_refused(window, room):
    with pytest.raises(
        RopepatchError, match=f"data.windows must be from 2 to tokens_per_batch .{room}"
    ):
        Schedule.of(
            data_of(1.0, windows=(4, window), tokens_per_batch=room),
            trained=8,
            steps=1,
            per_step=1,
            seed=0,
        )


# batches


@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("positions", [TrueLength(), PoSE(chunks=3)], ids=repr)
def test_a_batch_is_the_rows_of_its_schedule_in_segments(positions, boundaries):
    lengths = [[3, 9, 30, 1, 1, 50, 6], [100], [2] * 40]
    streams = [
        TokenRows(store_of(parts, f"s{n}", 1000 * n), n, n)
        for n, parts in enumerate(lengths)
    ]
    data = data_of(
        2.0, 1.0, 1.0, windows=(8, 16, 5), tokens_per_batch=33, boundaries=boundaries
    )
    batches = batches_of(data, streams, positions, per_step=3, seed=11)
    schedule = batches.schedule
    assert len(batches) == 18
    for item in range(18):
        first, last = schedule.begins[item : item + 2].tolist()
        rows, parts = [], []
        for number in range(first, last):
            stream = streams[int(schedule.sources[number])]
            window = int(schedule.windows[number])
            rows.append(stream.row(int(schedule.indices[number]), window))
            parts += rows[-1].lengths if boundaries else [window]
        ends = [0, *accumulate(parts)]
        batch, ids = batches[item], torch.cat([one.ids for one in rows])
        labels = ids.clone()
        labels[ends[:-1]] = -100
        assert torch.equal(batch["input_ids"][0], ids)
        assert torch.equal(batch["labels"][0], labels)
        assert not batch["answers"].any()
        for side in "qk":
            assert batch[f"cu_seq_lens_{side}"].tolist() == ends
            assert batch[f"max_length_{side}"] == max(parts)
        for segment in batch["position_ids"][0].split(parts):
            assert bool((segment.diff() > 0).all())
            assert int(segment[-1]) < 64
            if positions.name == "true-length":
                assert segment.tolist() == list(range(len(segment)))


def test_labels_left_out_stay_out_without_boundaries(tiny):
    data = data_of(1.0, windows=(64,), tokens_per_batch=128, boundaries=False)
    rows = GeneratedRows("retold", tiny[1], 0)
    batch = batches_of(data, [rows])[0]
    assert batch["cu_seq_lens_q"].tolist() == [0, 64, 128]
    assert torch.equal(batch["labels"][0, :64], rows.row(0, 64).labels)
    assert int((batch["labels"][0] == -100).sum()) > 60


# processes and order


def test_a_batch_does_not_depend_on_what_was_asked_before(tiny):
    data = data_of(2.0, 1.0, windows=(64, "1x"), tokens_per_batch=300)
    streams = [TokenRows(store_of(LENGTHS), 30, 1), GeneratedRows("tales", tiny[1], 2)]
    settings = {"trained": 100, "target": 800, "steps": 12, "per_step": 4, "seed": 9}
    mixed, copy = (batches_of(data, streams, PoSE(), **settings) for _ in range(2))
    expected = [mixed[item] for item in range(len(mixed))]
    order = list(range(len(mixed)))
    random.Random(1).shuffle(order)
    for item in order:
        torch.testing.assert_close(copy[item], expected[item], rtol=0, atol=0)
    ids = [batch["input_ids"] for batch in expected]
    assert not any(torch.equal(one, other) for one, other in pairwise(ids))


# errors before the first step


def test_a_source_shorter_than_a_window_is_refused():
    streams = [
        TokenRows(store_of([n], f"source {number}"), 0, 0)
        for number, n in enumerate([100, 15])
    ]
    with pytest.raises(
        RopepatchError,
        match="source 1 has 15 tokens to train on, too few for a training sequence of 16",
    ):
        batches_of(data_of(1.0, 1.0, windows=(8, 16)), streams)
