"""Search files for access tokens and private keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ropepatch.errors import RopepatchError
from ropepatch.files import check_regular

HUB_TOKEN = re.compile(rb"hf_[A-Za-z0-9]{34}")
PRIVATE_KEY = re.compile(
    rb"-----BEGIN[ A-Z0-9]{0,40}PRIVATE KEY( BLOCK)?-----[\s\S]{64,}?KEY( BLOCK)?-----"
)
LARGEST = 256 << 20  # bytes; larger files are not searched


def check_secrets(
    files: Mapping[str, Path], token: str | None = None
) -> tuple[str, ...]:
    """Raise `RopepatchError` for files with a Hub token or a private key, in UTF-8, UTF-16 or UTF-32.

    The error does not contain the secret.

    Args:
        files: The files by their names in an error.
        token: The user's own token, of any form.

    Returns:
        The names of files too large to search.
    """
    large = []
    for name, path in files.items():
        try:
            check_regular(path)
            if path.stat().st_size > LARGEST:
                large.append(name)
                continue
            data = path.read_bytes().replace(b"\0", b"")  # UTF-16 and UTF-32 as ASCII
        except OSError as error:
            raise RopepatchError(
                f"cannot read {path}: {error.strerror or error}",
                hint="make the file readable, or remove it",
            ) from error
        is_token = HUB_TOKEN.search(data) or (token and token.encode() in data)
        if is_token or PRIVATE_KEY.search(data):
            raise RopepatchError(
                f"{name} contains {'a Hub access token' if is_token else 'a private key'}",
                hint="remove it, and revoke it if others may have seen it",
            )
    return tuple(large)
