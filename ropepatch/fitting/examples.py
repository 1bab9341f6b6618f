"""The text of a fit, cut into windows for training, validation and test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import TextOrIds, cut_windows, digest
from ropepatch.data.tiny.tales import Narrator
from ropepatch.data.tokens import TokenStore
from ropepatch.errors import RopepatchError
from ropepatch.model.config import forward_operations, text_config
from ropepatch.model.precision import HOUR
from ropepatch.settings import seed_of

BATCH_TOKENS = 4096  # tokens per step; one window at least
HELD_OUT = 16  # most windows for validation, and as many for the test; else 1 in 6
FEWEST = 10  # fewest windows for a fit
TALES = 200  # training stories for tiny
WRITTEN = 64  # self-generated training sequences
SKIPPING = 0.1  # weight of the answers at skipped positions, relative to those of the target length
SHORTER = (2, 8)  # divisors of the original length, for shorter sequences on slow devices
PASSES = 4  # cost of a training sequence in forward passes: the teacher's, its own, and the backward pass


def rows_of_step(length: int) -> int:
    """Return the number of sequences of a length per step."""
    return max(1, BATCH_TOKENS // length)


def row_length(model: Any, window: int, target: int, steps: int, device: str) -> int:
    """Return the length of the training sequences: the target, or less if that takes more than an hour.

    Shorter sequences have half the original length, or else an eighth, at skipped positions.
    """
    config, weights = text_config(model.config), sum(weight.numel() for weight in model.parameters())
    hour = HOUR["cpu" if device == "cpu" else "cuda"]
    for length in (target, window // SHORTER[0]):
        rows = rows_of_step(length)
        if PASSES * steps * rows * forward_operations(config, weights, length) <= hour:
            return length
    return max(1, window // SHORTER[1])


def windows_to_write(row: int, target: int) -> int:
    """Return the number of target windows for `WRITTEN` training sequences and the held-out text."""
    learned = -(-WRITTEN * row // target)
    return max(FEWEST, learned + 2 * min(HELD_OUT, max(2, learned // 4)))


@dataclass(frozen=True, eq=False)
class Splits:
    """Windows of one length, and the name of their text."""

    train: Sequence[Tensor]
    validation: Sequence[Tensor]  # for the selection of vectors
    test: Sequence[Tensor]  # used once, at the end
    sources: Sequence[int]  # index of the document in which each test window begins
    text: str

    @property
    def windows(self) -> list[Tensor]:
        """All windows: training, validation and test."""
        return [*self.train, *self.validation, *self.test]

    @property
    def digest(self) -> str:
        """SHA-256 of all tokens."""
        return digest(self.windows)

    def check_ids(self, vocabulary: int) -> None:
        """Raise `RopepatchError` for token ids outside the vocabulary."""
        for ids in self.windows:
            if ids.min() < 0 or ids.max() >= vocabulary:
                raise RopepatchError(
                    f"{self.text} contains token id {ids.max().item()}, the model has {vocabulary} tokens",
                    hint="give text, or ids of the model's own tokenizer",
                )


def read_splits(
    tokenizer: PreTrainedTokenizerBase,
    text: str | Path | TokenStore | None,
    *,
    field: str,
    split: str,
    length: int,
    spare: int,
) -> Splits:
    """Cut a text into windows with `ropepatch.data.texts.cut_windows`; without a text, generate stories.

    A text may also be a store of self-generated tokens. ``spare`` leaves out the windows that a perplexity
    task with so many windows would measure.
    """
    if text is None:
        narrator = Narrator(tokenizer)
        tales = [narrator.tale(length, seed_of("fit", i)).ids for i in range(TALES + 2 * HELD_OUT)]
        validation, test = tales[:HELD_OUT], tales[HELD_OUT : 2 * HELD_OUT]
        return Splits(tales[2 * HELD_OUT :], validation, test, range(HELD_OUT), "tales")
    documents: Iterable[TextOrIds]
    if isinstance(text, TokenStore):
        documents = [ids.long() for ids in torch.split(text.tokens, text.starts.diff().tolist())]
        text = text.reading.source
    else:
        documents = stream_documents(text, field=field, split=split)
    joined = cut_windows(tokenizer, documents, length=length, count=None)
    cut = [(document, torch.tensor(window)) for document, window in joined]
    spared = {index * len(cut) // spare for index in range(spare)}
    left = [window for index, window in enumerate(cut) if index not in spared]
    if len(left) < FEWEST:
        less = f", {len(spared)} of them left out," if spared else ""
        raise RopepatchError(
            f"{text} gives {len(cut)} windows of {length} tokens{less}; a fit needs {FEWEST}",
            hint="give more text",
        )
    held = 2 * min(HELD_OUT, max(2, len(left) // 6))
    apart = [index * len(left) // held for index in range(held)]
    return Splits(
        [window for index, (_, window) in enumerate(left) if index not in set(apart)],
        [left[index][1] for index in apart[::2]],
        [left[index][1] for index in apart[1::2]],
        [left[index][0] for index in apart[1::2]],
        str(text),
    )
