"""Running stock transformers code without warnings, and with one-line errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from ropepatch.errors import RopepatchError, argument, is_out_of_memory

_QUIET = ContextVar("_QUIET", default=False)


def _is_heard(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or not _QUIET.get()


def _filter_handlers() -> None:
    """Add a filter to every handler of transformers that hides warnings within `stock_code`."""
    logger: logging.Logger | None = logging.getLogger("transformers")
    while logger:
        for handler in logger.handlers:
            handler.addFilter(_is_heard)  # once: a second time does nothing
        logger = logger.parent if logger.propagate else None


@contextmanager
def stock_code(
    what: str, hint: str = "fix config.json so that transformers loads it"
) -> Iterator[None]:
    """Convert any exception of transformers to a one-line error, and hide its warnings.

    Only warnings of this thread are hidden: the logger's level, which all threads share, does not change.
    """
    _filter_handlers()
    token = _QUIET.set(True)
    try:
        yield
    except RopepatchError:
        raise
    except Exception as error:  # stock code may raise anything on invalid files
        cause: BaseException = error
        while (
            cause.__cause__ is not None
        ):  # strict configurations wrap the reason twice
            cause = cause.__cause__
        if is_out_of_memory(cause):
            raise
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise RopepatchError(
            f"transformers cannot {what}: {reason[:300]}", hint=hint
        ) from error
    finally:
        _QUIET.reset(token)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which it shows also without a terminal."""
    logging: Any = transformers_logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def saving(folder: Path) -> Iterator[None]:
    """Save a model without progress bars; report a file that cannot be written in one line."""
    try:
        with no_progress_bars():
            yield
    except SafetensorError as error:
        hint = f"make room, or choose another {argument('out')}"
        raise RopepatchError(f"cannot write {folder}: {error}", hint=hint) from error
