"""An entry of the token cache: documents as token ids in one file, mapped into memory.

The file is safetensors, and there whole or not at all: ``tokens``, int32 [N], those of all documents on end,
``lengths``, int32 [D], how the source was read, and a checksum over all three.

Shapes: N tokens, D documents.
"""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ropepatch.files import whole_file

HEADER = 2**16  # bytes before the tokens; what stands there is written last, when their number is known
CHUNK = 2**22  # tokens that are hashed at one time

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Reading:
    """How a source was read; filled in as it is.

    Attributes:
        source: The path or id of the source.
        revision: The revision on the Hub, or a hash of the sizes and times of the files.
        min_tokens: Shorter documents were left out.
        complete: Whether it was read to its end.
        bad: Rows that were left out because they could not be read.
        first_bad: What was wrong with the first.
        short: Documents that were left out.
    """

    source: str
    revision: str | None
    min_tokens: int
    complete: bool = False
    bad: int = 0
    first_bad: str = ""
    short: int = 0

    def leave_out(self, reason: str) -> None:
        """Count a row that cannot be read."""
        self.first_bad = self.first_bad or reason[:300]
        self.bad += 1


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The documents of an entry up to a number of tokens; in another process it opens the file again.

    Attributes:
        file: The entry.
        tokens: Those of all documents, int32 [N], mapped from the file.
        starts: Where each document begins, and the last ends, int64 [D + 1].
        digest: SHA-256 of the tokens and of the lengths of the documents.
        reading: How the source was read for this entry.
    """

    file: Path
    tokens: Tensor
    starts: Tensor
    digest: str
    reading: Reading

    @property
    def report(self) -> str:
        """One line: how much there is, and what was left out."""
        reading = self.reading
        parts = [f"{amount(len(self.starts) - 1)} documents, {amount(len(self.tokens))} tokens"]
        if reading.short:
            parts.append(f"{amount(reading.short)} shorter than {reading.min_tokens} tokens left out")
        if reading.bad:
            parts.append(f"{amount(reading.bad)} bad rows left out, the first: {reading.first_bad}")
        return "; ".join(parts)

    def piece(self, begin: int, end: int) -> tuple[Tensor, tuple[int, ...]]:
        """Token ids, int64 [end - begin], and how many of them are of each document."""
        first, last = torch.searchsorted(self.starts, torch.tensor([begin + 1, end])).tolist()
        cuts = [begin, *self.starts[first:last].tolist(), end]
        lengths = tuple(after - before for before, after in pairwise(cuts))
        return self.tokens[begin:end].long(), lengths

    def __len__(self) -> int:
        """Its tokens."""
        return len(self.tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.file, len(self.starts) - 1, self.digest, self.reading)


def write(file: Path, documents: Iterable[Tensor], reading: Reading) -> None:
    """Write an entry, whole or not at all, as the documents come.

    Args:
        file: The entry.
        documents: The token ids [T] of each, int32.
        reading: How they were read, as it stands after the last of them.

    Raises:
        OSError: The disk does not take it.
    """
    lengths, hashed = array("i"), hashlib.sha256()
    with whole_file(file) as partial, partial.open("wb") as out:
        out.seek(HEADER)
        for ids in documents:
            lengths.append(len(ids))
            content = ids.numpy().tobytes()
            hashed.update(content)
            out.write(content)
        hashed.update(lengths)
        out.write(lengths)
        read = json.dumps(asdict(reading))
        hashed.update(read.encode())
        out.seek(0)
        out.write(_header(sum(lengths), len(lengths), {"reading": read, "sha256": hashed.hexdigest()}))


def _header(tokens: int, documents: int, metadata: dict[str, str]) -> bytes:
    end = 4 * tokens
    content = {
        "__metadata__": metadata,
        "tokens": {"dtype": "I32", "shape": [tokens], "data_offsets": [0, end]},
        "lengths": {"dtype": "I32", "shape": [documents], "data_offsets": [end, end + 4 * documents]},
    }
    return struct.pack("<Q", HEADER - 8) + json.dumps(content).encode().ljust(HEADER - 8)


def find(file: Path, tokens: int) -> TokenStore | None:
    """The first documents of an entry that together have so many tokens.

    All if the source has no more; None if the entry is not there, has too few tokens, or is damaged, of which
    a warning is logged. The whole entry is checked against its checksum.
    """
    if not file.exists():
        return None
    try:
        stored, lengths, metadata = _mapped(file)
        reading = Reading(**json.loads(metadata["reading"]))
        starts = _starts(lengths)
        if len(stored) < tokens and not reading.complete:
            return None
        count = min(int(torch.searchsorted(starts, tokens)), len(lengths))
        hashed = hashlib.sha256()
        _hash(hashed, stored[: starts[count]])
        first = hashed.copy()
        _hash(first, lengths[:count])
        _hash(hashed, stored[starts[count] :])
        _hash(hashed, lengths)
        hashed.update(metadata["reading"].encode())
        if hashed.hexdigest() != metadata["sha256"]:
            raise ValueError("it does not hold what was written")
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        logger.warning("%s is damaged (%s); its source is read again", file, error)
        return None
    return TokenStore(file, stored[: starts[count]], starts[: count + 1], first.hexdigest(), reading)


def _reopened(file: Path, documents: int, digest: str, reading: Reading) -> TokenStore:
    stored, lengths, _ = _mapped(file)
    starts = _starts(lengths[:documents])
    return TokenStore(file, stored[: starts[-1]], starts, digest, reading)


def _mapped(file: Path) -> tuple[Tensor, Tensor, dict[str, str]]:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor("tokens"), opened.get_tensor("lengths"), opened.metadata() or {}


def _starts(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0, dtype=torch.long)])


def _hash(hashed: Any, numbers: Tensor) -> None:
    for chunk in torch.split(numbers, CHUNK):
        hashed.update(chunk.numpy().tobytes())


def amount(count: int) -> str:
    """As words have it: 5.1 M, or 1,204."""
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"
