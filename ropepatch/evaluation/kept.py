"""The partial results of an interrupted measurement."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ropepatch.errors import RopepatchError


class Kept:
    """A folder of partial results by key, from which an interrupted measurement resumes.

    Each process appends lines of JSON to its own file; incomplete lines are ignored. Floats are restored
    exactly. The caller guarantees that the folder belongs to one model and one measurement; without a folder
    nothing is kept.

    Attributes:
        found: The values kept by earlier runs.
    """

    def __init__(self, folder: Path | None) -> None:
        self.found: dict[Any, Any] = {}
        self._folder, self._name = folder, f"{secrets.token_hex(8)}.jsonl"
        if folder is None:
            return
        with _disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for file in sorted(folder.glob("*.jsonl")):
                for line in file.read_text(
                    encoding="utf-8", errors="replace"
                ).splitlines():
                    with suppress(ValueError):
                        key, value = json.loads(line)
                        self.found[key] = value

    def write(self, key: int | str, value: Any) -> None:
        """Keep a value."""
        if self._folder is not None:
            with _disk_errors(self._folder):
                # Another process that finished first may have removed it.
                self._folder.mkdir(parents=True, exist_ok=True)
                with (self._folder / self._name).open("a", encoding="utf-8") as file:
                    file.write(
                        f"\n{json.dumps([key, value])}"
                    )  # the line before may be incomplete


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RopepatchError(
            f"cannot keep results in {folder}: {error}",
            hint="choose a folder that you can write to",
        ) from error
