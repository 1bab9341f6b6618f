"""The checkpoints of a run: sealed when they are whole, and known to be damaged when they are not."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from pathlib import Path

from ropepatch.errors import printable
from ropepatch.files import whole_file, write_json

SEAL = "sealed.json"  # written last: name and SHA-256 of every file
NAME = re.compile(r"checkpoint-(\d+)")

logger = logging.getLogger(__name__)


def seal(checkpoint: Path) -> None:
    """Write down what the checkpoint holds; it counts from now on."""
    hashes = _hashes(checkpoint)
    with whole_file(checkpoint / SEAL) as partial:
        write_json(partial, hashes, indent=1)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; None if it is as it was sealed."""
    try:
        sealed = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))
        hashes = _hashes(checkpoint)
    except FileNotFoundError:
        return "it was not finished"
    except (OSError, ValueError) as error:
        return f"it cannot be read: {error}"
    if not isinstance(sealed, dict):
        return f"{SEAL} is not what was written"
    differing = sorted(name for name in sealed.keys() | hashes if sealed.get(name) != hashes.get(name))
    return f"{differing[0]} is not what was written" if differing else None


def newest_sound(run: Path) -> Path | None:
    """The newest checkpoint of a run that is whole, or None; newer ones are removed, with a warning."""
    steps = [int(match[1]) for folder in run.glob("*") if (match := NAME.fullmatch(folder.name))]
    for step in sorted(steps, reverse=True):
        folder = run / f"checkpoint-{step}"
        reason = damage(folder)
        if reason is None:
            return folder
        logger.warning("%s is damaged, resuming from the one before: %s", printable(str(folder)), reason)
        shutil.rmtree(folder)
    return None


def _hashes(checkpoint: Path) -> dict[str, str]:
    hashes = {}
    for file in sorted(file for file in checkpoint.rglob("*") if file.is_file() and file.name != SEAL):
        with file.open("rb") as stream:
            name = file.relative_to(checkpoint).as_posix()
            hashes[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes
