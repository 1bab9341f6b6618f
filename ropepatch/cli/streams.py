"""Output and log lines that a full disk, a closed stream or a control character does not break."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ropepatch.errors import printable
from ropepatch.progress import LONGEST


class Output:
    """stdout or stderr. If it is closed or full, lines go to another stream instead, or nowhere.

    Attributes:
        failure: Why it cannot be written to; None if it can.
    """

    def __init__(self, stream: Any, instead: Any) -> None:
        self._stream, self._instead = stream, instead
        self.failure = None if stream else OSError(errno.EBADF, "it is closed")

    def write(self, text: str) -> int:
        """Write text at once, so that an error arises here."""
        if self.failure is None:
            try:
                self._stream.write(text)
                self._stream.flush()
                return len(text)
            except BrokenPipeError:  # its reader, such as `head`, has enough
                raise
            except OSError as error:
                self.failure = error
                # For what it still buffers
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if self._instead is not None:
            self._instead.write(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: `write` flushes."""

    def isatty(self) -> bool:
        """Whether a person reads it."""
        return self.failure is None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream or self._instead or sys.__stderr__, name)


class _PrintableRecord(logging.LogRecord):
    """A log record without control characters."""

    def getMessage(self) -> str:  # noqa: N802  # logging calls it by this name
        return _printable_lines(super().getMessage())


def _printable_lines(text: str) -> str:
    return "\n".join(printable(line, LONGEST) for line in text.split("\n"))


@contextmanager
def safe_streams() -> Iterator[tuple[Output, Output]]:
    """Within the block replace stdout and stderr, and escape log lines and warnings of all libraries."""
    while (unused := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # else the next file that is opened would be taken for a closed stdin, stdout or stderr
    os.close(unused)
    streams, record = (sys.stdout, sys.stderr), logging.getLogRecordFactory()
    format_warning = warnings.formatwarning
    stderr = Output(sys.stderr, None)
    stdout = Output(sys.stdout, stderr)
    sys.stdout, sys.stderr = stdout, stderr
    logging.setLogRecordFactory(_PrintableRecord)
    warnings.formatwarning = lambda *words, **more: _printable_lines(
        format_warning(*words, **more)
    )
    try:
        yield stdout, stderr
    finally:
        (sys.stdout, sys.stderr), warnings.formatwarning = streams, format_warning
        logging.setLogRecordFactory(record)
