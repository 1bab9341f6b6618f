"""The text of a fit: windows of the target's length, to learn from and to decide by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropepatch.errors import RopepatchError
from ropepatch.evaluation.sources import stream_documents
from ropepatch.evaluation.texts import digest, windows
from ropepatch.seeds import seed_of
from ropepatch.tiny.corpus import Narrator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = 16  # windows, at most, that decide; at least 1 in 5 if there are few
FEWEST = 10  # windows without which nothing is learned
TALES = 200  # that tiny learns from


@dataclass(frozen=True, eq=False)
class Material:
    """Windows, all of one length.

    Args:
        train: To learn from.
        held_out: To decide by.
        text: Where they are from.
    """

    train: Sequence[Tensor]
    held_out: Sequence[Tensor]
    text: str

    @property
    def digest(self) -> str:
        """Of all their tokens."""
        return digest([*self.train, *self.held_out])


def read_material(
    tokenizer: PreTrainedTokenizerBase,
    text: str | Path | None,
    *,
    field: str,
    split: str,
    length: int,
    spare: int,
) -> Material:
    """Windows cut from a text, joined as `ropepatch.evaluation.texts.windows` joins it; or tales of tiny.

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
        cut = [narrator.tale(length, seed_of("fit", index)).ids for index in range(TALES + HELD_OUT)]
        return Material(cut[HELD_OUT:], cut[:HELD_OUT], "tales")
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
    held = min(HELD_OUT, max(2, len(left) // 5))
    deciding = {index * len(left) // held for index in range(held)}
    return Material(
        [window for index, window in enumerate(left) if index not in deciding],
        [left[index] for index in sorted(deciding)],
        str(text),
    )
