"""Log lines and warnings that no control character in a name can garble."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ropepatch.errors import printable_lines


class _PrintableRecord(logging.LogRecord):
    """A log record without control characters."""

    def getMessage(self) -> str:  # noqa: N802  # logging calls it by this name
        return printable_lines(super().getMessage())


@contextmanager
def printable_logs() -> Iterator[None]:
    """Within the block escape log lines and warnings of all libraries."""
    record, format_warning = logging.getLogRecordFactory(), warnings.formatwarning
    logging.setLogRecordFactory(_PrintableRecord)
    warnings.formatwarning = lambda *words, **more: printable_lines(
        format_warning(*words, **more)
    )
    try:
        yield
    finally:
        logging.setLogRecordFactory(record)
        warnings.formatwarning = format_warning
