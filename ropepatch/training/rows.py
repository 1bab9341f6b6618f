"""Training sequences and batches; each is determined by its number and the seed.

Shapes: W tokens of a row, a training sequence; N tokens of a batch of concatenated rows; S segments in it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ropepatch.data.positions import PositionSampling
from ropepatch.data.questions import VERSION, Questions
from ropepatch.data.texts import IGNORED, begun
from ropepatch.data.tiny.materials import MATERIALS
from ropepatch.data.tiny.tales import Narrator
from ropepatch.data.tokens import TokenStore, tokenizer_digest
from ropepatch.errors import RopepatchError
from ropepatch.settings import key_of, refuse_unknown, seed_of
from ropepatch.training.packed_attention import segments
from ropepatch.training.recipe import Data

# Tokens of the text around questions, in total and per piece
AROUND, PIECE = 2**20, 2**12


@dataclass(frozen=True, eq=False)
class Row:
    """A training sequence of concatenated documents.

    Attributes:
        ids: Token ids, int64 [W].
        labels: The ids, or -100 for tokens without a loss, such as the first of each document [W].
        lengths: Tokens of each document in the row; they add up to W.
        answers: Weights of the tokens as known answers, float32 [W]; 0 for all other tokens.
    """

    ids: Tensor
    labels: Tensor
    lengths: tuple[int, ...]
    answers: Tensor

    @classmethod
    def alone(cls, ids: Tensor, labels: Tensor, answers: Tensor) -> Row:
        """Return a row of one document, of which the first token has no label."""
        labels = labels.clone()
        labels[0] = IGNORED
        return cls(ids, labels, (len(ids),), answers)

    def joined(self) -> Row:
        """Return the row as one document: every token but the first has a label."""
        begins = list(accumulate(self.lengths))[:-1]
        labels = self.labels.clone()
        labels[begins] = self.ids[begins]
        return Row(self.ids, labels, (len(self.ids),), self.answers)


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Documents joined end to end, cut into windows, and shuffled in each epoch.

    The tokens before ``begin`` are held out. Every row begins with the token ``first``, if there is one.
    """

    store: TokenStore
    begin: int
    seed: int
    first: int | None = None

    @cached_property
    def digest(self) -> str:
        """Identifies the content."""
        return key_of((self.store.digest, self.begin, self.seed, self.first))

    def row(self, index: int, window: int) -> Row:
        """Return the row with a number from 0, of W = ``window`` tokens."""
        begin = self._beginning(index, window)
        stored, lengths = self.store.piece(begin, begin + window)
        ids = begun(stored, self.first)
        if ids is not stored:
            counts = list(lengths)
            counts[0] += 1
            counts[-1] -= 1
            lengths = tuple(filter(None, counts))
        labels = ids.clone()
        labels[[0, *accumulate(lengths[:-1])]] = IGNORED
        return Row(ids, labels, lengths, torch.zeros(window))

    def _beginning(self, index: int, window: int) -> int:
        """Return the index of the first token of a row."""
        tokens = len(self.store) - self.begin
        windows = tokens // window
        if windows < 1:
            raise RopepatchError(
                f"{self.store.name} has {max(tokens, 0)} tokens to train on, too few for a training "
                f"sequence of {window}",
                hint="give more text, or lower data.windows",
            )
        epoch, place = divmod(index, windows)
        order = _order(windows, seed_of(self.seed, window, epoch))
        return self.begin + window * int(order[place])


@lru_cache(maxsize=16)
def _order(windows: int, seed: int) -> Tensor:
    """Return the order of the windows in an epoch."""
    return torch.randperm(windows, generator=torch.Generator().manual_seed(seed))


class GeneratedRows:
    """Rows of a material of the bundled checkpoint, one document each, without repetition."""

    def __init__(
        self, material: str, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> None:
        refuse_unknown([material], MATERIALS, "material")
        self.digest = key_of((material, tokenizer_digest(tokenizer), seed))
        self._narrator = Narrator(tokenizer)
        self._material, self._seed = material, seed

    def row(self, index: int, window: int) -> Row:
        """As `TokenRows.row`; raises `RopepatchError` if the material needs more tokens."""
        seed = seed_of(self._seed, self._material, window, index)
        ids, labels = MATERIALS[self._material](self._narrator, window, seed)
        return Row.alone(ids, labels, torch.zeros(window))


class QuestionRows:
    """Rows with questions about distant text of a store, one document each."""

    def __init__(
        self,
        store: TokenStore,
        begin: int,
        tokenizer: PreTrainedTokenizerBase,
        kinds: Sequence[str],
        seed: int,
    ) -> None:
        self.digest = key_of((store.digest, begin, list(kinds), VERSION, seed))
        pieces = torch.split(store.ids(begin, min(begin + AROUND, len(store))), PIECE)
        texts = [
            str(tokenizer.decode(piece, skip_special_tokens=True)) for piece in pieces
        ]
        self._questions = Questions(tokenizer, texts, kinds, seed)

    def row(self, index: int, window: int) -> Row:
        """As `TokenRows.row`."""
        ids, answers = self._questions.row(index, window)
        return Row.alone(ids, ids, answers)


Stream = TokenRows | GeneratedRows | QuestionRows


def held_out(
    store: TokenStore, length: int, count: int, first: int | None = None
) -> tuple[list[Tensor], int]:
    """Return the first ``count`` pieces of ``length`` tokens, int64, and where the rest begins.

    Every piece begins with the token ``first``, if there is one. The document in which the last piece ends
    continues in the rest.
    """
    taken = length * count
    if len(store) < taken:
        raise RopepatchError(
            f"{store.name} has {len(store)} tokens, too few to hold out {count} x {length}",
            hint="give more text, or fewer or shorter pieces",
        )
    pieces = torch.split(store.ids(0, taken), length)
    return [begun(piece, first) for piece in pieces], taken


@dataclass(frozen=True, eq=False)
class Schedule:
    """The window and source of every row of a training; all int64."""

    begins: Tensor  # the first row of each batch, then the number of rows
    windows: Tensor  # the tokens of each row
    sources: Tensor  # the number of each row's source
    indices: Tensor  # the number of earlier rows with the same source and window

    @classmethod
    def of(
        cls, data: Data, *, trained: int, steps: int, per_step: int, seed: int
    ) -> Schedule:
        """Make the schedule of ``steps`` optimiser steps of ``per_step`` batches each.

        The steps cycle through the windows; all batches of a step have the same window.
        """
        lengths, room = data.lengths(trained)
        steps_of = torch.arange(steps * per_step) // per_step
        window_of = torch.tensor(lengths)[steps_of % len(lengths)]
        rows = room // window_of
        windows = window_of.repeat_interleave(rows)
        shares = torch.tensor(
            [source.weight for source in data.sources], dtype=torch.float64
        )
        generator = torch.Generator().manual_seed(seed_of(seed, "sources"))
        drawn = (
            torch.rand(len(windows), generator=generator, dtype=torch.float64)
            * shares.sum()
        )
        sources = torch.bucketize(drawn, shares.cumsum(0)[:-1], right=True)
        indices = torch.empty_like(windows)
        for source in range(len(shares)):
            for window in set(lengths):
                alike = ((sources == source) & (windows == window)).nonzero().flatten()
                indices[alike] = torch.arange(len(alike))
        begins = torch.cat([torch.zeros(1, dtype=torch.long), rows.cumsum(0)])
        return cls(begins, windows, sources, indices)

    def tokens(self, source: int) -> int:
        """Count the training tokens of a source."""
        return int(self.windows[self.sources == source].sum())


@dataclass(frozen=True, eq=False)
class Batches(Dataset[dict[str, Tensor | int]]):
    """The batches of a training in order, each one forward pass of one process.

    Arguments and number determine an item. n processes take items in turn, with ``per_step`` n times the
    batches that each accumulates. A step then has the same items for any n.

    An item concatenates the rows of the batch: ``input_ids``, ``labels`` and ``position_ids``, int64 [1, N].
    ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32 [S + 1], are the bounds of the segments; ``max_length_q``
    and ``max_length_k`` are the length of the longest. ``answers``, float32 [1, N], are the weights of known
    answers. Segments are the documents of each row or, without boundaries, the rows. The
    labels are not shifted; the first of each segment is -100.
    """

    schedule: Schedule
    streams: Sequence[Stream]
    positions: PositionSampling
    boundaries: bool
    target: int
    seed: int

    def __post_init__(self) -> None:
        for window in {*self.schedule.windows.tolist()}:
            for stream in self.streams:
                stream.row(0, window)  # raises if it has none

    def __len__(self) -> int:
        return len(self.schedule.begins) - 1

    def __getitem__(self, item: int) -> dict[str, Tensor | int]:
        bounds = self.schedule.begins[item : item + 2].tolist()
        rows = [self._row(number) for number in range(*bounds)]
        positions = []
        for number, row in enumerate(rows):
            draw = random.Random(seed_of(self.seed, "positions", item, number))
            for length in row.lengths:
                positions.append(self.positions.sample(length, self.target, draw))
        lengths = [length for row in rows for length in row.lengths]
        return {
            "input_ids": torch.cat([row.ids for row in rows])[None],
            "labels": torch.cat([row.labels for row in rows])[None],
            "position_ids": torch.cat(positions)[None],
            "answers": torch.cat([row.answers for row in rows])[None],
            **segments(lengths),
        }

    def _row(self, number: int) -> Row:
        stream = self.streams[int(self.schedule.sources[number])]
        index = int(self.schedule.indices[number])
        row = stream.row(index, int(self.schedule.windows[number]))
        return row if self.boundaries else row.joined()
