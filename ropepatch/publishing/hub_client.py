"""The Hub's client with a time limit, and its errors as one line and a hint, without the token."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.errors import HTTPError as HttpxError  # type: ignore[attr-defined]  # that of its httpx
from huggingface_hub.utils import http_backoff  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from ropepatch.errors import RopepatchError
from ropepatch.model.source import hub_answers

TIME_LIMIT = 120.0  # seconds without a sign of life from the Hub
SIGNED = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
AGAIN = "run the same command again: it resumes the upload"
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, which comes first"
ROOM = (
    "the storage quota on the Hub is exceeded",
    "free some storage or get more at https://hf.co/settings/billing",
)
MOVED = ("somebody else changed {repo} meanwhile", AGAIN)
ANSWERS = {
    401: ("the Hub rejected the token", LOG_IN),
    402: ROOM,
    403: (
        "this token may not write to {repo}",
        "use a token with write access, or a repository of your own; `hf auth whoami` prints your account",
    ),
    404: (
        "the Hub has no {repo}, or this token may not see it",
        "check the spelling; the user or the organisation must exist",
    ),
    409: MOVED,
    412: MOVED,
    413: ROOM,
    429: ("the Hub's rate limit was reached (429)", f"wait some minutes, then {AGAIN}"),
}


@contextmanager
def hub_errors(repo: str, token: str | None) -> Iterator[None]:
    """Set a time limit for the Hub's client, and raise its errors as `RopepatchError` without the token."""
    with hub_answers(repo):
        try:
            bars = nullcontext() if sys.stderr.isatty() else _no_bars()
            with _careful(), bars, warnings.catch_warnings():
                # httpx's warning about huggingface_hub's way of passing files
                warnings.filterwarnings("ignore", "Use 'content=<...>'", DeprecationWarning)
                yield
        except (HttpxError, OSError, ValueError, RuntimeError) as error:
            # An uploading thread wraps the error in a RuntimeError.
            message, hint = _explained(
                error.__cause__ or error if type(error) is RuntimeError else error, repo
            )
            raise RopepatchError(message.replace(token, "…") if token else message, hint=hint) from error


def _explained(error: BaseException, repo: str) -> tuple[str, str]:
    if isinstance(error, OfflineModeIsEnabled):
        return "the Hub is switched off (HF_HUB_OFFLINE)", "unset HF_HUB_OFFLINE to push"
    if isinstance(error, LocalTokenNotFoundError):
        return "no token for the Hub", LOG_IN
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        message, hint = ANSWERS.get(status, (f"the Hub answered {status} for {{repo}}", AGAIN))
        said = _line(error.server_message or "")
        return message.format(repo=repo) + (f": {said}" if said else ""), hint
    if isinstance(error, HttpxError):
        if type(error).__name__.endswith("Timeout"):
            return f"the Hub did not answer within {TIME_LIMIT:.0f} seconds", AGAIN
        if type(error).__name__ == "ConnectError":
            return "cannot reach the Hub", "check the network, and HF_ENDPOINT if it is set"
        return "the connection to the Hub broke", AGAIN
    if isinstance(error, OSError) and error.errno:
        where = f" {error.filename}" if error.filename else ""
        return f"cannot read{where}: {os.strerror(error.errno)}", "check the folder, and the disk it is on"
    return f"cannot push to {repo}: {_line(str(error))}", f"fix that, or {AGAIN}"


def _line(text: str) -> str:
    return " ".join(text.split())[:200]


@contextmanager
def _careful() -> Iterator[None]:
    """Set a time limit, and remove signatures, which grant access, from logged addresses."""
    client, logger = get_session(), logging.getLogger(http_backoff.__module__)
    timeout = client.timeout
    if timeout.read is None:
        client.timeout = TIME_LIMIT
    logger.addFilter(_without_signatures)
    try:
        yield
    finally:
        client.timeout = timeout
        logger.removeFilter(_without_signatures)


def _without_signatures(record: logging.LogRecord) -> bool:
    record.msg, record.args = SIGNED.sub(r"\1?…", record.getMessage()), ()
    return True


@contextmanager
def _no_bars() -> Iterator[None]:
    """Disable progress bars, unless the environment decides."""
    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
