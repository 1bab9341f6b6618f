"""Any checkpoint, with the position encoding it was saved with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ropepatch.encodings.saving import swap_again
from ropepatch.model.config import load_config
from ropepatch.model.loading import load_model, load_tokenizer
from ropepatch.model.record_file import needs_ropepatch, read_config
from ropepatch.model.source import find_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(model: str | Path, revision: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint with its tokenizer; on the CPU, in the dtype it asks for and in eval mode.

    Args:
        model: A checkpoint folder, a Hub id, or `tiny`, the checkpoint that comes with ropepatch.
        revision: Of a Hub id.

    Raises:
        RopepatchError: If there is no such checkpoint, or transformers cannot load it.
    """
    folder = find_source(model, revision, weights=True).folder
    return load_checkpoint(folder), load_tokenizer(folder)


def load_checkpoint(folder: Path) -> PreTrainedModel:
    """The model of a checkpoint folder; one that was saved with a swapped position encoding has it.

    Raises:
        RopepatchError: If transformers cannot load it, or its weights are not those of config.json.
    """
    if not needs_ropepatch(folder):
        return load_model(folder)
    model = load_model(folder, load_config(read_config(folder)))
    swap_again(model, folder)
    return model
