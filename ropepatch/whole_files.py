"""Files that are written whole or not at all."""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def whole_file(file: Path) -> Iterator[Path]:
    """A path beside the file to write to; it takes the file's name if all went well, else it is gone."""
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
