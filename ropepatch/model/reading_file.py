"""`reading.json` beside weights: what the model computes of one text on both sides of its old window.

Positions are counted in tokens read: at position n the next token is that after the first n tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt

from ropepatch.errors import RopepatchError
from ropepatch.files import read_json, whole_file
from ropepatch.model.record_file import Number, Part, Text, Tokens, Whole, validated

FILE = "reading.json"
RIGHT = "right"  # the hypothesis that the checkpoint is computed as stock transformers computes it
LONGEST = 2**24  # tokens: beyond, float32 does not tell neighbouring positions apart
Token = Annotated[StrictInt, Field(ge=0, lt=2**32)]
LogProb = Annotated[Number, Field(ge=-1e6, le=0)]  # nats
HINT = "remove it, and `ropepatch probe --save-reading` writes it again"


class Source(Part):
    """The text that was read.

    Args:
        kind: `tales`, sentences that its tokenizer splits, or `tokens`, drawn at random.
        seed: The text is drawn from it.
        length: The number of its tokens.
        sha256: Of the token ids, as little-endian integers of 4 bytes.
        ids: The token ids themselves, of a short text.
    """

    kind: Literal["tales", "tokens"]
    seed: Whole
    length: Annotated[Tokens, Field(le=LONGEST)]
    sha256: Text
    ids: list[Token] | None = None


class Tops(Part):
    """The most probable next tokens at every position, under one way to compute the model.

    Args:
        ids: Of the tokens at each position, the most probable first.
        log_probs: Theirs, in nats.
    """

    ids: list[list[Token]]
    log_probs: list[list[LogProb]]

    def at(self, index: int) -> dict[int, float]:
        """The log-probabilities at the position of an index, by token."""
        return dict(zip(self.ids[index], map(float, self.log_probs[index]), strict=True))


class Reading(Part):
    """`reading.json`.

    Args:
        version: Of this layout.
        weights: The fingerprint of the weights that were read.
        window: The context L before the extension, in tokens.
        target: The context after it, in tokens.
        vocabulary: The number of tokens that the model knows.
        dtype: The precision of the computation.
        source: The text.
        positions: At which next tokens are compared, ascending.
        tops: By hypothesis: `right`, and the mistakes that can be told from it.
        alike: The mistakes that cannot: at these positions they answer as `right` does.
        versions: Of the libraries that computed it.
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
    versions: dict[Text, Text]

    @property
    def beyond(self) -> list[bool]:
        """Whether each position is beyond the old window."""
        return [position > self.window for position in self.positions]


def exists(folder: Path) -> bool:
    """Whether there is a reading."""
    return (folder / FILE).is_file()


def read(folder: Path) -> Reading:
    """The reading of a checkpoint."""
    return parse(read_json(folder / FILE))


def parse(content: dict[str, Any]) -> Reading:
    """The reading that a file holds."""
    reading = validated(Reading, content, HINT, file=FILE)
    rows = len(reading.positions)
    whole = all(
        len(tops.ids) == len(tops.log_probs) == rows
        and all(len(ids) == len(logs) > 0 for ids, logs in zip(tops.ids, tops.log_probs, strict=True))
        for tops in reading.tops.values()
    )
    ascending = reading.positions == sorted(set(reading.positions))
    inside = rows > 0 and ascending and reading.positions[-1] <= reading.source.length == reading.target
    known = [*(ids for tops in reading.tops.values() for ids in tops.ids), reading.source.ids or []]
    inside = inside and max(map(max, filter(None, known)), default=0) < reading.vocabulary
    if not whole or not inside or RIGHT not in reading.tops or len(set(reading.beyond)) < 2:
        raise RopepatchError(f"the lists of {FILE} do not fit together", hint=HINT)
    return reading


def write(folder: Path, reading: Reading) -> None:
    """Put a reading into a folder, whole or not at all."""
    with whole_file(folder / FILE) as partial:
        partial.write_text(reading.model_dump_json(exclude_unset=True) + "\n", encoding="utf-8")
