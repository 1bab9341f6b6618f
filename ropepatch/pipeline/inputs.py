"""What a caller may write in several ways, read once: a model's name, a length."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

from ropepatch.errors import RopepatchError
from ropepatch.extension.planning import trained_on
from ropepatch.model.source import find_source
from ropepatch.model.survey import survey_checkpoint
from ropepatch.settings import Length, parse_length, relative_length


def model_name(model: str | os.PathLike[str]) -> str:
    """A model as a command line names it: a folder called tiny is not the bundled checkpoint."""
    return "./tiny" if model == Path("tiny") else os.fspath(model)


def check_writable(place: Path, hint: str) -> None:
    """Refuse a file or folder that could not be made, before the work that it is to hold.

    Raises:
        RopepatchError: With the reason, and the hint.
    """
    try:
        folder = next(above for above in (place, *place.absolute().parents) if above.exists())
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RopepatchError(f"cannot write {place}: {error.strerror or error}", hint=hint) from error


def in_tokens(length: Length, model: str, revision: str | None, original: Length | None = None) -> int:
    """A length in tokens: 32768, `32k`, or a multiple of the model's own context or of the original, `4x`.

    Raises:
        RopepatchError: If it is none of these, or there is no such model.
    """
    if not str(length).endswith("x"):
        return parse_length(str(length))
    survey = trained_on(survey_checkpoint(find_source(model, revision, weights=False)), original)
    return relative_length(length, survey.rope.original_max_position_embeddings)
