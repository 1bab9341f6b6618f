"""The text of a fit: windows of the target's length, to learn from and to decide by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.data.sources import stream_documents
from ropepatch.data.texts import digest, windows
from ropepatch.data.tiny.corpus import Narrator
from ropepatch.errors import RopepatchError
from ropepatch.settings import seed_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 16  # windows, at most, that decide, and as many that are read once at the end; else 1 in 6
FEWEST = 10  # windows without which nothing is learned
TALES = 200  # that tiny learns from


@dataclass(frozen=True, eq=False)
class Material:
    """Windows, all of one length.

    Args:
        train: To learn from.
        held_out: To decide by.
        unseen: To tell at the end what came out: neither learned from nor decided by.
        text: Where they are from.
    """

    train: Sequence[Tensor]
    held_out: Sequence[Tensor]
    unseen: Sequence[Tensor]
    text: str

    @property
    def digest(self) -> str:
        """Of all their tokens."""
        return digest([*self.train, *self.held_out, *self.unseen])


def read_material(
    tokenizer: PreTrainedTokenizerBase,
    text: str | Path | None,
    *,
    field: str,
    split: str,
    length: int,
    spare: int,
) -> Material:
    """Windows cut from a text, joined as `ropepatch.data.texts.windows` joins it; or tales of tiny.

    Args:
        tokenizer: The model's.
        text: A file, a folder, a `datasets` id or a saved set; None for tales.
        field: The column or key of a document's text.
        split: Of a `datasets` id or a saved set.
        length: Tokens of a window.
        spare: Leave out the windows that a perplexity task with so many would read.

    Raises:
        RopepatchError: No such text, or too little of it.
    """
    if text is None:
        narrator = Narrator(tokenizer)
        count = TALES + 2 * HELD_OUT
        cut = [narrator.tale(length, seed_of("fit", index)).ids for index in range(count)]
        return Material(cut[2 * HELD_OUT :], cut[:HELD_OUT], cut[HELD_OUT : 2 * HELD_OUT], "tales")
    documents = stream_documents(text, field=field, split=split)
    cut = [torch.tensor(window) for window in windows(tokenizer, documents, length=length, count=None)]
    spared = {index * len(cut) // spare for index in range(spare)}
    left = [window for index, window in enumerate(cut) if index not in spared]
    if len(left) < FEWEST:
        kept = f", {len(spared)} of them left out," if spared else ""
        raise RopepatchError(
            f"{text} makes {len(cut)} windows of {length} tokens{kept} and a fit needs {FEWEST}",
            hint="give more text",
        )
    held = 2 * min(HELD_OUT, max(2, len(left) // 6))
    apart = [index * len(left) // held for index in range(held)]
    return Material(
        [window for index, window in enumerate(left) if index not in set(apart)],
        [left[index] for index in apart[::2]],
        [left[index] for index in apart[1::2]],
        str(text),
    )
