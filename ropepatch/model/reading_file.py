"""The fingerprint `reading.json`: a model's predictions within and beyond its original context length.

Position n is the prediction after the first n tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt

from ropepatch.errors import RopepatchError
from ropepatch.files import read_json, whole_file
from ropepatch.model.record_file import Number, Part, Text, Tokens, Whole, validated

FILE = "reading.json"
# The hypothesis that the engine computes what stock transformers computes
RIGHT = "right"
LONGEST = 2**24  # tokens: beyond it, float32 cannot distinguish neighbouring positions
Token = Annotated[StrictInt, Field(ge=0, lt=2**32)]
LogProb = Annotated[Number, Field(ge=-1e6, le=0)]  # nats
Divergence = Annotated[Number, Field(ge=0, le=1e6)]  # nats
HINT = "write it again with `ropepatch probe --save-reading`"


class Source(Part):
    """The text of a fingerprint.

    Args:
        kind: `tales` for sentences, `tokens` for random tokens.
        seed: The seed of the text.
        length: The number of tokens.
        sha256: The sha256 of the token ids, as little-endian integers of 4 bytes.
        ids: The token ids, stored for a short text only.
    """

    kind: Literal["tales", "tokens"]
    seed: Whole
    length: Annotated[Tokens, Field(le=LONGEST)]
    sha256: Text
    ids: list[Token] | None = None


class Tops(Part):
    """The most probable next tokens at every position, under one hypothesis.

    Args:
        ids: The token ids at each position, most probable first.
        log_probs: Their log-probabilities, in nats.
    """

    ids: list[list[Token]]
    log_probs: list[list[LogProb]]

    def rows(self) -> list[dict[int, float]]:
        """Return the log-probabilities by token, at each position."""
        pairs = zip(self.ids, self.log_probs, strict=True)
        return [dict(zip(ids, map(float, logs), strict=True)) for ids, logs in pairs]


class Reading(Part):
    """The fingerprint of an extended checkpoint, `reading.json`.

    Args:
        version: Version of this layout.
        weights: Checksum of the weights.
        window: The original context length, in tokens.
        target: The target length, in tokens.
        vocabulary: The size of the vocabulary.
        dtype: The precision of the computation.
        source: The text.
        positions: The compared positions, ascending.
        tops: The predictions by hypothesis: `right`, and each error that can be distinguished from it.
        alike: The errors that cannot be distinguished from `right` at these positions.
        rounded: The KL divergence of the right RoPE in 16 bits from `right` at each position, in nats.
        versions: Versions of the libraries that computed it.
    """

    version: Literal[1]
    weights: Text
    window: Tokens
    target: Tokens
    vocabulary: Tokens
    dtype: Text
    source: Source
    positions: list[Tokens]
    tops: dict[Text, Tops]
    alike: list[Text] = Field(default_factory=list)
    rounded: list[Divergence]
    versions: dict[Text, Text]

    @property
    def beyond(self) -> list[bool]:
        """Whether each position is beyond the original context length."""
        return [position > self.window for position in self.positions]


def exists(folder: Path) -> bool:
    """Return whether a folder has a fingerprint."""
    return (folder / FILE).is_file()


def read(folder: Path) -> Reading:
    """Read the fingerprint of a checkpoint's folder."""
    return parse(read_json(folder / FILE))


def parse(content: dict[str, Any]) -> Reading:
    """Parse and validate the content of a fingerprint."""
    reading = validated(Reading, content, HINT, file=FILE)
    rows = len(reading.positions)
    whole = len(reading.rounded) == rows and all(
        len(tops.ids) == len(tops.log_probs) == rows
        and all(
            len(ids) == len(logs) > 0
            for ids, logs in zip(tops.ids, tops.log_probs, strict=True)
        )
        for tops in reading.tops.values()
    )
    ascending = reading.positions == sorted(set(reading.positions))
    inside = (
        rows > 0
        and ascending
        and reading.positions[-1] <= reading.source.length == reading.target
    )
    known = [
        *(ids for tops in reading.tops.values() for ids in tops.ids),
        reading.source.ids or [],
    ]
    inside = (
        inside and max(map(max, filter(None, known)), default=0) < reading.vocabulary
    )
    if (
        not whole
        or not inside
        or RIGHT not in reading.tops
        or len(set(reading.beyond)) < 2
    ):
        raise RopepatchError(f"the lists of {FILE} are inconsistent", hint=HINT)
    return reading


def write(folder: Path, reading: Reading) -> None:
    """Write a fingerprint into a folder, completely or not at all."""
    with whole_file(folder / FILE) as partial:
        partial.write_text(
            reading.model_dump_json(exclude_unset=True) + "\n", encoding="utf-8"
        )
