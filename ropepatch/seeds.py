"""Seeds that follow from what is drawn, so that order, resume and parallel work change nothing."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """A 64-bit seed for the draw that ``parts`` describe; the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")
