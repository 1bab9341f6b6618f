"""The Hub's client with a time limit, and its errors as one line and a hint, without the token."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.errors import HTTPError as HttpxError  # type: ignore[attr-defined]  # that of its httpx
from huggingface_hub.utils import http_backoff  # type: ignore[attr-defined]

from ropepatch.errors import RopepatchError
from ropepatch.model.checkpoint import hub_answers

TIME_LIMIT = 120.0  # seconds without a sign of life from the Hub
SIGNED = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']*")
AGAIN = "run the same command again: it resumes the upload"
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, which comes first"
ANSWERS = {
    401: ("the Hub rejected the token", LOG_IN),
    403: (
        "this token may not write to {repo}",
        "use a token with write access, or a repository of your own; `hf auth whoami` prints your account",
    ),
    404: (
        "the Hub has no {repo}, or this token may not see it",
        "check the spelling; the user or the organisation must exist",
    ),
    412: ("somebody else changed {repo} meanwhile", AGAIN),
}


@contextmanager
def hub_errors(repo: str, token: str | None) -> Iterator[None]:
    """Set a time limit for the Hub's client, and raise its errors as `RopepatchError` without the token."""
    with hub_answers(repo):
        try:
            with _careful(), warnings.catch_warnings():
                # httpx's warning about huggingface_hub's way of passing files
                warnings.filterwarnings(
                    "ignore", "Use 'content=<...>'", DeprecationWarning
                )
                yield
        except (HttpxError, OSError, ValueError, RuntimeError) as error:
            # An uploading thread wraps the error in a RuntimeError.
            cause = error.__cause__ if type(error) is RuntimeError else None
            message, hint = _explained(cause or error, repo)
            raise RopepatchError(
                message.replace(token, "…") if token else message, hint=hint
            ) from error


def _explained(error: BaseException, repo: str) -> tuple[str, str]:
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        message, hint = ANSWERS.get(
            status, (f"the Hub answered {status} for {{repo}}", AGAIN)
        )
        said = error.server_message or ""
    elif isinstance(error, HttpxError):
        message, hint = (
            "the connection to the Hub broke",
            f"check the network and HF_ENDPOINT, then {AGAIN}",
        )
        said = str(error)
    else:
        message, hint, said = (
            "cannot push to {repo}",
            f"fix that, or {AGAIN}",
            str(error),
        )
    said = " ".join(said.split())[:200]
    return message.format(repo=repo) + (f": {said}" if said else ""), hint


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
