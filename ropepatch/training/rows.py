"""Rows of documents, and the batches that are made of them: each follows from its number and the seed alone.

Shapes: W tokens of a row, a window; N tokens of a batch, those of its rows on end; S segments in it.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ropepatch.data.positions import PositionSampling, row_positions
from ropepatch.data.questions import Questions
from ropepatch.data.tiny.materials import IGNORED, MATERIALS
from ropepatch.data.tiny.tales import Narrator
from ropepatch.data.tokens import TokenStore, amount, tokenizer_digest
from ropepatch.errors import RopepatchError, printable
from ropepatch.settings import refuse_unknown, seed_of
from ropepatch.training.recipe import Data

AROUND, PIECE = 2**20, 2**12  # tokens of the text around questions, in all and of each piece

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Row:
    """Documents on end.

    Attributes:
        ids: Token ids, int64 [W].
        labels: The ids, or -100 where a token is not trained on, as is the first of each document [W].
        lengths: Tokens of each document, or of what of it is in the row; they add up to W.
        answers: What the tokens weigh as answers that are known [W]; None for none.
    """

    ids: Tensor
    labels: Tensor
    lengths: tuple[int, ...]
    answers: Tensor | None = None

    def joined(self) -> Row:
        """The row as one document: every token but the first has a label."""
        begins = list(accumulate(self.lengths))[:-1]
        labels = self.labels.clone()
        labels[begins] = self.ids[begins]
        return Row(self.ids, labels, (len(self.ids),), self.answers)


class TokenRows:
    """Documents joined end to end and cut into windows, which come in an order of their own in each epoch.

    The tokens before ``begin`` are held out. `digest` names the content, `size` counts the tokens that can be
    read before they come again; None if they never do.
    """

    def __init__(self, store: TokenStore, begin: int, seed: int) -> None:
        self.name = store.reading.source
        self.digest = hashlib.sha256(repr((store.digest, begin, seed)).encode()).hexdigest()
        self.size: int | None = max(len(store) - begin, 0)
        self._store, self._begin, self._seed = store, begin, seed
        self._orders: dict[int, tuple[int, Tensor]] = {}  # by window, the epoch and the order in it

    def row(self, index: int, window: int) -> Row:
        """The row of a number from 0, in W = ``window`` tokens."""
        begin = self._beginning(index, window)
        ids, lengths = self._store.piece(begin, begin + window)
        labels = ids.clone()
        labels[[0, *accumulate(lengths[:-1])]] = IGNORED
        return Row(ids, labels, lengths)

    def document(self, index: int, window: int) -> int:
        """The number of the document in which a row begins."""
        begin = self._beginning(index, window)
        return int(torch.searchsorted(self._store.starts, begin, right=True)) - 1

    def _beginning(self, index: int, window: int) -> int:
        """The first token of a row."""
        windows = (len(self._store) - self._begin) // window
        if windows < 1:
            held_out = f" after {self._begin} held-out ones" if self._begin else ""
            raise RopepatchError(
                f"{self.name} has {self.size} tokens{held_out}, too few for a training sequence of {window}",
                hint="give more text, or lower data.windows",
            )
        epoch, place = divmod(index, windows)
        return self._begin + window * int(self._order(window, windows, epoch)[place])

    def _order(self, window: int, windows: int, epoch: int) -> Tensor:
        if self._orders.get(window, (None,))[0] != epoch:
            generator = torch.Generator().manual_seed(seed_of(self._seed, window, epoch))
            self._orders[window] = (epoch, torch.randperm(windows, generator=generator))
        return self._orders[window][1]


class GeneratedRows:
    """Rows of a material of the bundled checkpoint, one document each, and never the same twice."""

    def __init__(self, material: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        refuse_unknown([material], MATERIALS, "material")
        self.name = f"generated {material}"
        self.digest = hashlib.sha256(repr((material, tokenizer_digest(tokenizer), seed)).encode()).hexdigest()
        self.size: int | None = None
        self._material, self._narrator, self._seed = material, _narrator(tokenizer), seed

    def row(self, index: int, window: int) -> Row:
        """As `TokenRows.row`; refused where the material does not come in so few tokens."""
        seed = seed_of(self._seed, self._material, window, index)
        ids, labels = MATERIALS[self._material](self._narrator, window, seed)
        labels = labels.clone()
        labels[0] = IGNORED
        return Row(ids, labels, (window,))


class QuestionRows:
    """Rows that ask for what stands far before in the text of a store, one document each."""

    def __init__(
        self,
        store: TokenStore,
        begin: int,
        tokenizer: PreTrainedTokenizerBase,
        kinds: Sequence[str],
        seed: int,
    ) -> None:
        self.name = f"questions ({', '.join(kinds)})"
        self.digest = hashlib.sha256(repr((store.digest, begin, [*kinds], seed)).encode()).hexdigest()
        self.size: int | None = None
        pieces = torch.split(store.tokens[begin : begin + AROUND], PIECE)
        texts = [str(tokenizer.decode(piece, skip_special_tokens=True)) for piece in pieces]
        self._questions = Questions(tokenizer, texts, kinds, seed)

    def row(self, index: int, window: int) -> Row:
        """As `TokenRows.row`."""
        ids, answers = self._questions.row(index, window)
        labels = ids.clone()
        labels[0] = IGNORED
        return Row(ids, labels, (window,), answers)


@lru_cache(maxsize=1)
def _narrator(tokenizer: PreTrainedTokenizerBase) -> Narrator:
    return Narrator(tokenizer)


Stream = TokenRows | GeneratedRows | QuestionRows


def check_rows(streams: Iterable[Stream], windows: Iterable[int]) -> None:
    """Refuse rows that cannot be drawn, now and not after hours."""
    for window in sorted({*windows}):
        for stream in streams:
            stream.row(0, window)


def held_out(store: TokenStore, length: int, count: int) -> tuple[list[Tensor], int]:
    """The first ``count`` pieces of ``length`` tokens, int64, and where the rest begins.

    The document in which the last of them ends continues in the rest.
    """
    taken = length * count
    if len(store) < taken:
        raise RopepatchError(
            f"{store.reading.source} has {len(store)} tokens, too few to hold out {count} x {length}",
            hint="give more text, or fewer or shorter pieces",
        )
    return list(torch.split(store.tokens[:taken].long(), length)), taken


@dataclass(frozen=True, eq=False)
class Schedule:
    """What every row of a training is; all int64."""

    begins: Tensor  # the first row of each batch, and the number of rows
    windows: Tensor  # the tokens of each row
    sources: Tensor  # the number of each row's source
    indices: Tensor  # how many earlier rows are of the same source and window

    @classmethod
    def of(cls, data: Data, *, trained: int, steps: int, per_step: int, seed: int) -> Schedule:
        """The schedule of ``steps`` optimiser steps of ``per_step`` batches each.

        The steps take one window after the other; all batches of a step have the same.
        """
        lengths, room = data.lengths(trained)
        steps_of = torch.arange(steps * per_step) // per_step
        window_of = torch.tensor(lengths)[steps_of % len(lengths)]
        rows = room // window_of
        windows = window_of.repeat_interleave(rows)
        shares = torch.tensor([source.weight for source in data.sources], dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed_of(seed, "sources"))
        drawn = torch.rand(len(windows), generator=generator, dtype=torch.float64) * shares.sum()
        sources = torch.bucketize(drawn, shares.cumsum(0)[:-1], right=True)
        indices = torch.empty_like(windows)
        for source in range(len(shares)):
            for window in set(lengths):
                alike = ((sources == source) & (windows == window)).nonzero().flatten()
                indices[alike] = torch.arange(len(alike))
        begins = torch.cat([torch.zeros(1, dtype=torch.long), rows.cumsum(0)])
        return cls(begins, windows, sources, indices)

    def tokens(self, source: int) -> int:
        """How many tokens of a source the training takes."""
        return int(self.windows[self.sources == source].sum())


class Batches(Dataset[dict[str, Tensor | int]]):
    """Whole forward passes of one process, in the order in which they are trained on.

    An item follows from the arguments and its number alone; `digest` names all of them. Dealt to n processes
    in turn, with ``per_step`` n times the batches that each accumulates, a step has the same items however
    many they are.

    An item is one sequence, the rows of the batch on end: ``input_ids``, ``labels`` and ``position_ids``,
    int64 [1, N]; ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 [S + 1], where the segments begin and the
    last ends; ``max_length_q`` and ``max_length_k``, the longest, as numbers; where a source asks questions
    ``answers`` [1, N], what the tokens weigh as answers that are known. Segments are the documents of
    each row, or, without boundaries, the rows. The labels are not shifted, and the first of each segment is
    -100.
    """

    def __init__(
        self,
        schedule: Schedule,
        streams: Sequence[Stream],
        positions: PositionSampling,
        *,
        boundaries: bool,
        target: int,
        seed: int,
    ) -> None:
        self.schedule, self._streams, self._positions = schedule, list(streams), positions
        self._boundaries, self._target, self._seed = boundaries, target, seed
        check_rows(streams, self.schedule.windows.tolist())
        sampling = positions.model_dump(mode="json")
        decisive = (boundaries, sampling, target, seed, [stream.digest for stream in streams])
        hashed = hashlib.sha256(repr(decisive).encode())
        for values in (self.schedule.begins, self.schedule.windows, self.schedule.sources):
            hashed.update(values.numpy().tobytes())
        self.digest = hashed.hexdigest()
        for number, stream in enumerate(streams):
            if (times := self.times(number)) >= 1.05:
                logger.warning("%s is read %.1f times", printable(stream.name), times)

    def times(self, source: int) -> float:
        """How often the training reads a source; 0 for what never comes again."""
        size = self._streams[source].size
        return self.schedule.tokens(source) / size if size else 0.0

    @property
    def report(self) -> list[str]:
        """How much is read of each source."""
        return [
            f"{stream.name}: {amount(self.schedule.tokens(number))} tokens are read"
            + ("" if stream.size is None else f", {self.times(number):.1f} times what it has")
            for number, stream in enumerate(self._streams)
        ]

    def __len__(self) -> int:
        return len(self.schedule.begins) - 1

    def __getitem__(self, item: int) -> dict[str, Tensor | int]:
        if not 0 <= item < len(self):
            raise IndexError(f"there are {len(self)} batches, got {item}")
        first, last = self.schedule.begins[item : item + 2].tolist()
        rows = [self._row(number) for number in range(first, last)]
        positions = []
        for number, row in enumerate(rows):
            draw = random.Random(seed_of(self._seed, "positions", item, number))
            positions.append(row_positions(self._positions, row.lengths, self._target, draw))
        asked: dict[str, Tensor] = {}
        if any(isinstance(stream, QuestionRows) for stream in self._streams):
            answers = (torch.zeros(len(row.ids)) if row.answers is None else row.answers for row in rows)
            asked = {"answers": torch.cat([*answers])[None]}
        lengths = [length for row in rows for length in row.lengths]
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return {
            "input_ids": torch.cat([row.ids for row in rows])[None],
            "labels": torch.cat([row.labels for row in rows])[None],
            "position_ids": torch.cat(positions)[None],
            **asked,
            **{f"cu_seq_lens_{side}": ends for side in "qk"},
            **{f"max_length_{side}": max(lengths) for side in "qk"},
        }

    def _row(self, number: int) -> Row:
        schedule = self.schedule
        columns = (schedule.sources, schedule.indices, schedule.windows)
        source, index, window = (int(column[number]) for column in columns)
        row = self._streams[source].row(index, window)
        return row if self._boundaries else row.joined()
